"""Memory through which a checkpoint passes: as much is told, and taken."""

from __future__ import annotations

SECTOR_BYTES = 4096  # with which a block begins

# On the way out of their places: as much is copied, and waited for, at once.
TILE_BYTES = 2**24
SMALL_TILE_BYTES = 2**20  # where the plan leaves no memory free: then buffers are beside its limit
NUM_STAGED = 2  # buffers for what is read from elsewhere: one with the reader, one that is filled meanwhile

# On the way to the disk.
BLOCK_BYTES = 2**24
SMALL_BLOCK_BYTES = 2**22  # where the plan leaves no memory free for all of them
NUM_BLOCKS = 12  # full ones
NUM_OPEN = 2  # files, each with a block that is being filled


def num_blocks(saved_bytes: int, block_bytes: int) -> int:
    """Of a checkpoint of this size, at most."""
    return min(NUM_BLOCKS, saved_bytes // block_bytes + 1) + NUM_OPEN


def buffer_bytes(saved_bytes: int, largest_bytes: int, spare_bytes: int) -> tuple[int, int]:
    """Within the spare memory of a plan, and beside its limit. `largest_bytes`: of arrays that are not on the host."""
    fits = spare_bytes >= NUM_STAGED * TILE_BYTES
    staged_bytes = NUM_STAGED * min(TILE_BYTES if fits else SMALL_TILE_BYTES, largest_bytes)
    blocks_bytes = num_blocks(saved_bytes, BLOCK_BYTES) * (BLOCK_BYTES + SECTOR_BYTES)
    if staged_bytes + blocks_bytes <= spare_bytes:
        return staged_bytes + blocks_bytes, 0
    small_bytes = num_blocks(saved_bytes, SMALL_BLOCK_BYTES) * SMALL_BLOCK_BYTES
    return (staged_bytes, small_bytes) if staged_bytes <= spare_bytes else (0, staged_bytes + small_bytes)
