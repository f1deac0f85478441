"""Bytes on their way into files: blocks that a few threads fill, sum and write.

[Note: blocks] Values that are put may be those that an update wants to change. So they are copied into a block, and
then are free. A block that is full is summed and written. All three are done by a few threads, each with large calls:
whoever waits for Python's lock, which training holds, does so a few times a block, and others work meanwhile. Who reads
the values (one thread) only says what goes where, inside of `copying`; what is small it copies itself, and what is put
outside of that too. Copies come before writes: updates may wait for them. So a checkpoint is written as fast as its
disk, with the memory of NUM_BLOCKS blocks and one of each file that is open. It is lent by whoever has the values, so
that it counts where theirs does; where there is no room for all of it, blocks are small, and of the system.

[Note: past the page cache] Where a file system allows it, blocks go straight to the disk. Where not, each is waited for
and its pages leave the cache: what waits there counts against the control group. Those of a file then go one after the
other: the system would let several threads spin for its lock. The end of a file, which fills no sector, goes through
the cache too; it is on the disk when its file is synced.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from hightide.checkpoint.files import filesystem
from hightide.ir.save_sizes import NUM_BLOCKS, SMALL_BLOCK_BYTES, num_blocks
from hightide.stores.disk_file import SECTOR_BYTES, PageBuffer, memory_at
from hightide.stores.threads import background

NUM_WRITERS = 6
SMALL_BYTES = 64 * 1024  # not worth another thread
THREAD = "hightide-save-blocks"

# As ctypes.memmove, but with Python's lock: to ask for it again would take longer than the copy.
_copy_small = ctypes.PyDLL(None).memmove
_copy_small.argtypes, _copy_small.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p


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

    def __init__(self, buffer: Memory, file: File, offset: int) -> None:
        self.buffer, self.file, self.offset = buffer, file, offset
        self.num_bytes = 0
        self.num_copies = 0  # that are still to be made
        self.is_full = False

    def add(self, address: int, num_bytes: int) -> None:
        (_copy_small if num_bytes < SMALL_BYTES else ctypes.memmove)(self._end, address, num_bytes)
        self.num_bytes += num_bytes

    def add_later(self, value: Tensor, address: int, num_bytes: int, values: _Values) -> _Copy:
        """Room for it. `value` keeps the memory at `address`."""
        copy = _Copy(self, value, self._end, address, num_bytes, values)
        self.num_bytes += num_bytes
        return copy

    @property
    def _end(self) -> int:
        return self.buffer.address + self.num_bytes

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


def place_of(value: Tensor | bytes) -> tuple[int, int]:
    """The address of its bytes, and how many."""
    if isinstance(value, Tensor):
        return value.data_ptr(), value.nbytes
    return ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value or 0, len(value)


class Memory(Protocol):
    """Of a block."""

    @property
    def memory(self) -> Any: ...

    @property
    def address(self) -> int: ...


Lent = tuple[Tensor, Callable[[], object]]  # bytes, and what gives them back
Lend = Callable[[int], Lent | None]  # so many, if there is room


class _LentMemory:
    """From a sector's begin on, as direct writes ask for."""

    def __init__(self, lent: Tensor, num_bytes: int) -> None:
        self._lent = lent
        self.address = -(-lent.data_ptr() // SECTOR_BYTES) * SECTOR_BYTES
        assert self.address + num_bytes <= lent.data_ptr() + lent.nbytes
        self.memory = memory_at(self.address, num_bytes)


def _new(num_bytes: int) -> Memory:
    buffer = PageBuffer(num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            buffer.memory.madvise(mmap.MADV_HUGEPAGE)
    return buffer


@dataclass(eq=False, slots=True)
class _Values:
    """What is put together, and whom to tell that all of it was copied."""

    then: Callable[[], object]
    num_left: int = 1  # copies to be made; and while more may come


@dataclass(eq=False, slots=True)
class _Copy:
    block: Block
    value: Tensor
    target: int
    source: int
    num_bytes: int
    values: _Values


class Blocks:
    """Those of one checkpoint. One thread puts values."""

    def __init__(self, block_bytes: int, lend: Lend | None = None, expected_bytes: int = 0) -> None:
        """`expected_bytes` of the checkpoint. None lends: no limit counts."""
        self._give_back: list[Callable[[], object]] = []
        self._free: list[Memory] = []
        self._is_lent = lend is not None and self._borrow(lend, block_bytes, num_blocks(expected_bytes, block_bytes))
        if lend is not None and not self._is_lent:
            block_bytes = min(block_bytes, SMALL_BLOCK_BYTES)
        self.block_bytes = block_bytes
        self._lock = threading.Lock()
        self._wanted = threading.Condition(self._lock)  # there is work
        self._done = threading.Condition(self._lock)  # some was done
        self._copies: deque[_Copy] = deque()
        self._full: deque[Block] = deque()
        self._num_sent = 0  # blocks that are not written yet
        self._num_copying = 0
        self._values: _Values | None = None
        self._threads: list[threading.Thread] = []
        self._num_writers = NUM_WRITERS
        self._error: tuple[File | None, BaseException] | None = None
        self._is_closed = False

    @contextmanager
    def copying(self, then: Callable[[], object]) -> Iterator[None]:
        """Values that are put inside are copied by others, and must stay until `then` is called, by one of them. What
        it raises is a failure of the checkpoint."""
        assert self._values is None
        values = self._values = _Values(then)
        try:
            yield
        finally:
            self._values = None
        self._is_copied(values)

    def put(self, block: Block, value: Tensor | bytes, address: int, num_bytes: int) -> None:
        """Bytes of `value`, at `address`."""
        values = self._values
        if values is None or not isinstance(value, Tensor) or num_bytes < SMALL_BYTES or not self._has_threads():
            block.add(address, num_bytes)
            return
        copy = block.add_later(value, address, num_bytes, values)
        with self._lock:
            block.num_copies += 1
            values.num_left += 1
            self._copies.append(copy)
            self._wanted.notify()

    def take(self, file: File, offset: int) -> Block:
        return Block(self.take_buffer(), file, offset)

    def take_buffer(self) -> Memory:
        """For a block; when too many are full, or all that was lent is in use, it is waited for."""
        with self._lock:
            while self._error is None and self._num_sent >= (1 if self._is_lent and not self._free else NUM_BLOCKS):
                self._done.wait()
            buffer = self._free.pop() if self._free else None
        return buffer or _new(self.block_bytes)

    def _borrow(self, lend: Lend, block_bytes: int, count: int) -> bool:
        """All, or nothing."""
        for _ in range(count):
            lent = lend(block_bytes + SECTOR_BYTES)
            if lent is None:
                self._return()
                return False
            self._give_back.append(lent[1])
            self._free.append(_LentMemory(lent[0], block_bytes))
        return True

    def _return(self) -> None:
        self._free.clear()
        while self._give_back:
            self._give_back.pop()()

    def send(self, block: Block) -> None:
        """It is full. Others write it, meanwhile; where no thread is to be had, it is written here."""
        has_threads = self._has_threads()
        with self._lock:
            self._num_sent += 1
            block.is_full = True
            if block.num_copies == 0:
                self._full.append(block)
                self._wanted.notify()
        if not has_threads:
            while (work := self._next(waits=False)) is not None:
                work()

    def _has_threads(self) -> bool:
        if len(self._threads) < self._num_writers:
            try:
                self._threads.append(background(f"{THREAD}-{len(self._threads)}", self._work))
            except RuntimeError:  # the system allows no more, or the process ends
                self._num_writers = len(self._threads)
        return bool(self._threads)

    def write(self, block: Block) -> None:
        """Here and now: for what is not worth a thread."""
        block.write()
        self._free.append(block.buffer)

    def settle(self) -> None:
        """All that was put is copied, and all that was sent is written; or something went wrong."""
        with self._lock:
            while (self._copies or self._num_copying or self._num_sent) and self._error is None:
                self._done.wait()

    @property
    def failure(self) -> tuple[File | None, BaseException] | None:
        """The first thing that went wrong, and where; None: not in a file."""
        return self._error

    def close(self) -> None:
        """What waits is left out, what runs is waited for: then files may be closed, and values may go. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._full.clear()
            self._copies.clear()
            self._wanted.notify_all()
        for thread in self._threads:
            thread.join()
        self._return()

    # -- the threads ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (work := self._next()) is not None:
            work()
            del work  # an idle thread must not keep values alive

    def _next(self, waits: bool = True) -> Callable[[], None] | None:
        with self._lock:
            while not self._copies and not self._full and not self._is_closed and waits:
                self._wanted.wait()
            if self._is_closed:
                return None
            if self._copies:
                self._num_copying += 1
                return partial(self._copy, self._copies.popleft())
            return partial(self._write, self._full.popleft()) if self._full else None

    def _copy(self, copy: _Copy) -> None:
        ctypes.memmove(copy.target, copy.source, copy.num_bytes)
        block = copy.block
        with self._lock:
            block.num_copies -= 1
            if block.is_full and not block.num_copies and not self._is_closed:
                self._full.append(block)
                self._wanted.notify()
        self._is_copied(copy.values)
        with self._lock:
            self._num_copying -= 1
            self._done.notify()

    def _is_copied(self, values: _Values) -> None:
        with self._lock:
            values.num_left -= 1
            if values.num_left:
                return
        try:
            values.then()
        except BaseException as error:
            self._fail(None, error)

    def _write(self, block: Block) -> None:
        try:
            block.write()
            block.await_written()
        except BaseException as error:
            self._fail(block.file, error)
        with self._lock:
            self._num_sent -= 1
            self._free.append(block.buffer)
            self._done.notify()

    def _fail(self, file: File | None, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = (file, error)
            self._done.notify()
