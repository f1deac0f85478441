"""A file of a checkpoint that several ranks write, each at its own places.

[Note: ranks and sectors] Where one rank's bytes end and another's begin is within a sector mostly. What fills sectors
goes past the page cache, from memory that lies as the file does; the rest of a block, up to two parts of sectors, goes
through the cache by another descriptor. So nobody writes bytes that are not its own, whatever the file system is.
"""

from __future__ import annotations

import ctypes
import errno
import threading
import zlib
from collections.abc import Iterable

from torch import Tensor

from hightide.checkpoint.files import filesystem, manifest
from hightide.checkpoint.files.blocks import Block, Blocks, Memory, place_of
from hightide.checkpoint.files.joined_sums import joined
from hightide.checkpoint.files.manifest import FileSums, num_pieces
from hightide.ir.foreign import quoted
from hightide.process.files import NO_SYNC
from hightide.stores.disk_file import SECTOR_BYTES

Sum = tuple[int, int, int]  # offset, CRC-32 and number of bytes of a run; none goes beyond its piece


class SharedFile:
    """One rank's view of it. Runs of bytes come in any order; those that follow one another are one. It may be closed,
    and opened again."""

    def __init__(self, name: str, num_bytes: int, blocks: Blocks) -> None:
        self.name, self.num_bytes = name, num_bytes
        self.is_direct, self.through_cache = False, threading.Lock()
        self._blocks = blocks
        self._block: _RunBlock | None = None
        self._sums: dict[int, tuple[int, int]] = {}
        self.descriptor = self._direct = -1

    def open(self, folder: int) -> None:
        self.descriptor = filesystem.open_to_write(self.name, folder)
        if self.num_bytes >= self._blocks.block_bytes and self._blocks.block_bytes % SECTOR_BYTES == 0:
            try:
                self._direct = filesystem.open_to_write(self.name, folder, past_cache=True)
                self.is_direct = True
            except OSError as error:
                if error.errno not in NO_SYNC:
                    self.close()
                    raise

    def write(self, offset: int, value: Tensor | bytes) -> None:
        address, left_bytes = place_of(value)
        assert 0 <= offset <= offset + left_bytes <= self.num_bytes, (self.name, offset, left_bytes)
        while left_bytes:
            block = self._block
            if block is None or block.offset + block.num_bytes != offset:
                self.end_run()
                block = self._block = _RunBlock(self._blocks.take_buffer(), self, offset)
            num_bytes = min(left_bytes, self._blocks.block_bytes - offset % self._blocks.block_bytes)
            block.add(address, num_bytes)
            address, left_bytes, offset = address + num_bytes, left_bytes - num_bytes, offset + num_bytes
            if offset % self._blocks.block_bytes == 0:
                self.end_run()

    def end_run(self) -> None:
        """What comes next is elsewhere."""
        block, self._block = self._block, None
        if block is not None:
            self._blocks.send(block)

    def note(self, offset: int, sum_: int, num_bytes: int) -> None:
        self._sums[offset] = sum_, num_bytes

    def write_block(self, content: memoryview, offset: int) -> None:
        """See [Note: ranks and sectors]."""
        begin = min(len(content), -offset % SECTOR_BYTES)
        end = max(begin, (offset + len(content)) // SECTOR_BYTES * SECTOR_BYTES - offset)
        if self.is_direct and begin < end:
            try:
                filesystem.write_all(self._direct, content[begin:end], offset + begin)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.is_direct = False
        if not self.is_direct:
            begin = end = len(content)
        for start, stop in ((0, begin), (end, len(content))):
            if start < stop:
                with self.through_cache:
                    filesystem.write_all(self.descriptor, content[start:stop], offset + start)

    @property
    def sums(self) -> list[Sum]:
        """Of all that was written here, as few as can be."""
        found: list[Sum] = []
        for offset, (sum_, num_bytes) in sorted(self._sums.items()):
            if found and found[-1][0] + found[-1][2] == offset and offset % manifest.PIECE_BYTES:
                start, before, length = found.pop()
                found.append((start, joined(before, sum_, num_bytes), length + num_bytes))
            else:
                found.append((offset, sum_, num_bytes))
        return found

    def sync(self) -> None:
        filesystem.sync(self.descriptor)
        filesystem.let_go(self.descriptor, 0, 0)

    def close(self) -> None:
        descriptors, self.descriptor, self._direct = (self.descriptor, self._direct), -1, -1
        for descriptor in descriptors:
            if descriptor >= 0:
                filesystem.close(descriptor)


class _RunBlock(Block):
    """Its bytes lie in memory as in the file: at the same distance from a sector's begin."""

    file: SharedFile

    def __init__(self, buffer: Memory, file: SharedFile, offset: int) -> None:
        super().__init__(buffer, file, offset)
        self._shift = offset % SECTOR_BYTES if len(buffer.memory) % SECTOR_BYTES == 0 else 0  # else nothing is direct

    def add(self, address: int, num_bytes: int) -> None:
        assert self._shift + self.num_bytes + num_bytes <= len(self.buffer.memory)
        ctypes.memmove(self.buffer.address + self._shift + self.num_bytes, address, num_bytes)
        self.num_bytes += num_bytes

    def write(self) -> None:
        with (
            memoryview(self.buffer.memory) as memory,
            memory[self._shift : self._shift + self.num_bytes] as content,
        ):
            self.file.note(self.offset, zlib.crc32(content), self.num_bytes)
            self.file.write_block(content, self.offset)


def joined_sums(name: str, num_bytes: int, found: Iterable[Sum]) -> FileSums:
    """Of a whole file, from those of all ranks. ValueError unless they have written all of it, each byte once."""
    sums, end = [0] * num_pieces(num_bytes, manifest.PIECE_BYTES), 0
    for offset, sum_, length in sorted(found):
        piece = offset // manifest.PIECE_BYTES
        if offset != end or (offset + length - 1) // manifest.PIECE_BYTES != piece:
            raise ValueError(f"{quoted(name)} was not written by the ranks as one: at {end} comes what is at {offset}")
        sums[piece], end = joined(sums[piece], sum_, length), offset + length
    if end != num_bytes:
        raise ValueError(f"{quoted(name)} lacks {num_bytes - end} bytes, which no rank has written")
    return FileSums(name, num_bytes, tuple(sums))
