"""Bytes on their way into files: blocks that a few threads sum and write.

[Note: blocks] Values that are put may be those that an update wants to change. So they are copied into a block, and
whoever puts them goes on. A block that is full is summed and written by one of a few threads, each with large calls:
Python's lock is asked for a few times a block, however busy training keeps it. So a checkpoint is written as fast as
its disk, with the memory of NUM_BLOCKS blocks and one of each file that is open.

[Note: past the page cache] Where a file system allows it, blocks go straight to the disk. Where not, each is waited for
and its pages leave the cache: what waits there counts against the control group. Those of a file then go one after the
other: the system would let several threads spin for its lock. The end of a file, which fills no sector, goes through
the cache too; it is on the disk when its file is synced.
"""

from __future__ import annotations

import ctypes
import errno
import threading
import zlib
from collections import deque
from typing import Protocol

from hightide.checkpoint.files import filesystem
from hightide.stores.disk_file import SECTOR_BYTES, Buffer
from hightide.stores.threads import background

BLOCK_BYTES = 16 * 1024**2
NUM_BLOCKS = 8  # full ones
NUM_WRITERS = 4
THREAD = "hightide-save-blocks"


class File(Protocol):
    """That blocks are written to."""

    descriptor: int
    is_direct: bool
    through_cache: threading.Lock

    def note(self, offset: int, sum_: int, num_bytes: int) -> None:
        """Of a block that was summed."""
        ...


class Block:
    """Bytes of one file, from `offset` on."""

    def __init__(self, buffer: Buffer, file: File, offset: int) -> None:
        self.buffer, self.file, self.offset = buffer, file, offset
        self.num_bytes = 0

    def add(self, address: int, num_bytes: int) -> None:
        ctypes.memmove(self.buffer.address + self.num_bytes, address, num_bytes)
        self.num_bytes += num_bytes

    def write(self) -> None:
        with memoryview(self.buffer.memory) as memory, memory[: self.num_bytes] as content:
            self.file.note(self.offset, zlib.crc32(content), self.num_bytes)
            done_bytes = self._write_straight(content)
            if done_bytes < self.num_bytes:
                with self.file.through_cache:
                    filesystem.write_all(self.file.descriptor, content[done_bytes:], self.offset + done_bytes)

    def _write_straight(self, content: memoryview) -> int:
        """How many bytes went past the page cache; see there."""
        file, whole_bytes = self.file, len(content) // SECTOR_BYTES * SECTOR_BYTES
        if not file.is_direct:
            return 0
        try:
            if whole_bytes:
                filesystem.write_all(file.descriptor, content[:whole_bytes], self.offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            filesystem.through_cache(file.descriptor)
            file.is_direct, whole_bytes = False, 0  # only then: other threads look at it
        if whole_bytes < len(content):
            filesystem.through_cache(file.descriptor)
        return whole_bytes

    def await_written(self) -> None:
        if not self.file.is_direct:
            filesystem.await_written(self.file.descriptor, self.offset, self.num_bytes)
            filesystem.let_go(self.file.descriptor, self.offset, self.num_bytes)


class Blocks:
    """Those of one checkpoint. One thread fills them."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._changed = threading.Condition()
        self._free: list[Buffer] = []
        self._full: deque[Block] = deque()
        self._num_running = 0
        self._threads: list[threading.Thread] = []
        self._num_writers = NUM_WRITERS
        self._error: tuple[File, BaseException] | None = None
        self._is_closed = False

    def take(self, file: File, offset: int) -> Block:
        return Block(self.take_buffer(), file, offset)

    def take_buffer(self) -> Buffer:
        """For a block; when too many are full, it is waited for."""
        with self._changed:
            while len(self._full) + self._num_running >= NUM_BLOCKS and self._error is None:
                self._changed.wait()
            buffer = self._free.pop() if self._free else None
        return buffer or Buffer(self.block_bytes)

    def send(self, block: Block) -> None:
        """It is full. Others write it, meanwhile; where no thread is to be had, it is written here."""
        if len(self._threads) < self._num_writers:
            try:
                self._threads.append(background(f"{THREAD}-{len(self._threads)}", self._work))
            except RuntimeError:  # the system allows no more, or the process ends
                self._num_writers = len(self._threads)
        with self._changed:
            self._full.append(block)
            self._changed.notify_all()
        if not self._threads and (taken := self._next()) is not None:
            self._perform(taken)

    def write(self, block: Block) -> None:
        """Here and now: for what is not worth a thread."""
        block.write()
        self._free.append(block.buffer)

    def settle(self) -> None:
        """All that was sent is written, or something went wrong."""
        with self._changed:
            while (self._full or self._num_running) and self._error is None:
                self._changed.wait()

    @property
    def failure(self) -> tuple[File, BaseException] | None:
        """The first thing that went wrong, and where."""
        return self._error

    def close(self) -> None:
        """What waits is left out, what runs is waited for: its file may be closed then. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._full.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._free.clear()

    def _work(self) -> None:
        while (block := self._next()) is not None:
            self._perform(block)

    def _perform(self, block: Block) -> None:
        failed: BaseException | None = None
        try:
            block.write()
            block.await_written()
        except BaseException as error:
            failed = error
        with self._changed:
            if failed is not None and self._error is None:
                self._error = (block.file, failed)
            self._num_running -= 1
            self._free.append(block.buffer)
            self._changed.notify_all()

    def _next(self) -> Block | None:
        with self._changed:
            while not self._full and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            self._num_running += 1
            return self._full.popleft()
