"""Memory through which a checkpoint passes is within the limit where there is room, and small beside it where not."""

from __future__ import annotations

import pytest

from hightide.ir.save_sizes import BLOCK_BYTES, NUM_BLOCKS, SECTOR_BYTES, SMALL_TILE_BYTES, TILE_BYTES, buffer_bytes
from hightide.stores import disk_file

MIB, LARGE = 2**20, 40 * 10**9


def test_sectors_are_those_of_disks() -> None:
    assert SECTOR_BYTES == disk_file.SECTOR_BYTES


@pytest.mark.parametrize("largest_bytes", [0, 1000, LARGE])
def test_with_room_all_is_within_the_limit(largest_bytes: int) -> None:
    staged = 2 * min(TILE_BYTES, largest_bytes)
    assert buffer_bytes(LARGE, largest_bytes, 2**30) == ((NUM_BLOCKS + 2) * (BLOCK_BYTES + SECTOR_BYTES) + staged, 0)
    assert buffer_bytes(1000, largest_bytes, 2**30) == (3 * (BLOCK_BYTES + SECTOR_BYTES) + staged, 0)


def test_with_less_what_is_beside_is_small() -> None:
    assert buffer_bytes(LARGE, LARGE, 100 * MIB) == (2 * TILE_BYTES, 14 * 4 * MIB)
    assert buffer_bytes(LARGE, LARGE, 0) == (0, 14 * 4 * MIB + 2 * SMALL_TILE_BYTES)
