"""Sums of what was written, sector by sector, so that other bytes are noticed when they are read.

[Note: sums] The 64-bit words of each eighth of a sector are added up. Upper bits that all of them have in common are
lost in that, so the first word goes into it once more, shifted. The eight results are mixed, weighted by their places
and folded to 32 bits. That runs at the speed of memory, and takes a thousandth of what it watches over. A changed bit,
a sector that is an older one, another's, or was never written: each gives another sum, but for one in 2^32 (and but for
changes inside one eighth that cancel each other out). Where a write failed nobody knows what is there: such sectors get
sums that fit neither the old bytes nor the new, until they are written again.
"""

from __future__ import annotations

import ctypes

import torch

from hightide.stores.disk_file import SECTOR_BYTES

_PARTS = 8
_WORDS = SECTOR_BYTES // _PARTS // 8
_WEIGHTS = torch.randint(1 << 62, (_PARTS,), generator=torch.Generator().manual_seed(0)) | 1


class SectorSums:
    """Of a file that begins as zeros. Memory is at a multiple of 8, and whole sectors."""

    def __init__(self, num_bytes: int) -> None:
        self._sums = torch.zeros(num_bytes // SECTOR_BYTES, dtype=torch.int32)  # takes no memory until it is written

    def note(self, offset: int, address: int, num_bytes: int) -> None:
        self._of(offset, num_bytes).copy_(_sums(address, num_bytes))

    def spoil(self, offset: int, num_bytes: int) -> None:
        """See [Note: sums]."""
        self._of(offset, num_bytes).add_(1)

    def first_difference(self, offset: int, address: int, num_bytes: int) -> int | None:
        """Where in the file the first sector begins that is not what was written."""
        expected, found = self._of(offset, num_bytes), _sums(address, num_bytes)
        if torch.equal(expected, found):
            return None
        return offset + int((expected != found).nonzero()[0]) * SECTOR_BYTES

    def _of(self, offset: int, num_bytes: int) -> torch.Tensor:
        first = offset // SECTOR_BYTES
        return self._sums[first : first + num_bytes // SECTOR_BYTES]


def _sums(address: int, num_bytes: int) -> torch.Tensor:
    words = torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.int64)
    words = words.view(-1, _PARTS, _WORDS)
    parts = words.sum(2).bitwise_xor_(words[:, :, 0] >> 17)
    parts.bitwise_xor_(parts >> 31)
    return (parts.mv(_WEIGHTS) >> 32).to(torch.int32)
