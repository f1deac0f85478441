"""Sums of parts, joined, are the sum of the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from hightide.checkpoint.files.joined_sums import joined


@given(st.lists(st.binary(max_size=3000), max_size=5))
def test_joined_is_the_sum_of_all(parts: list[bytes]) -> None:
    sum_ = 0
    for part in parts:
        sum_ = joined(sum_, zlib.crc32(part), len(part))
    assert sum_ == zlib.crc32(b"".join(parts))


def test_of_large_ones() -> None:
    first, second = b"\x01" * 5_000_001, bytes(range(256)) * 70_000
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
