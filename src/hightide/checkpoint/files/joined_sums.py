"""The sum of two runs of bytes, from the sums of each: so that blocks of a piece can be summed in any order.

A CRC-32 is the remainder of a polynomial over two elements. Bytes that follow multiply what was before by x^8 each; the
sums then add up. Polynomials of degree below 32 are numbers here, whose highest bit is x^0, as in the sum itself.
"""

from __future__ import annotations

from functools import cache

POLYNOMIAL = 0xEDB88320  # x^32 is this
_ONE = 1 << 31


def joined(first: int, second: int, second_bytes: int) -> int:
    """`zlib.crc32(a + b)`, where `first` is that of a, `second` that of b."""
    return _times(first, _power_of_x(8 * second_bytes)) ^ second


@cache
def _power_of_x(exponent: int) -> int:
    if exponent == 0:
        return _ONE
    half = _power_of_x(exponent // 2)
    square = _times(half, half)
    return _times_x(square) if exponent % 2 else square


def _times(first: int, second: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = _times_x(second)
    return product


def _times_x(number: int) -> int:
    return number >> 1 ^ (POLYNOMIAL if number & 1 else 0)
