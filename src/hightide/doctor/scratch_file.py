"""A temporary file and requests to it from several threads. Its name is removed as soon as it is open, so nothing is
left behind however the process ends."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hightide.doctor.pace import Piece

STAMP_BYTES = 8  # each written request begins with its own offset
LARGE_BYTES = 16 << 20


@dataclass(frozen=True)
class Requests:
    """What threads take one after the other. Reads begin again at the end; writes are done once."""

    offsets: Sequence[int]
    request_bytes: int
    is_write: bool
    num_threads: int


def in_order(start: int, num_bytes: int, is_write: bool, num_threads: int) -> Requests:
    return Requests(range(start, start + num_bytes, LARGE_BYTES), LARGE_BYTES, is_write, num_threads)


def scattered(within_bytes: int, num_bytes: int, request_bytes: int, is_write: bool, num_threads: int) -> Requests:
    """So many bytes of requests, anywhere in the file's beginning, none twice."""
    places = range(within_bytes // request_bytes)
    chosen = random.Random(0).sample(places, min(len(places), num_bytes // request_bytes))
    return Requests([place * request_bytes for place in chosen], request_bytes, is_write, num_threads)


def rate(done: Sequence[Piece], begin: float = 0.0) -> float:
    """Bytes per second, of the part that begins at this share of all requests and goes to the end."""
    ordered = sorted(done, key=lambda one: one.end_s)
    first = int(len(ordered) * begin)
    since_s = ordered[first - 1].end_s if first else min(one.start_s for one in ordered)
    return sum(one.num_bytes for one in ordered[first:]) / max(ordered[-1].end_s - since_s, 1e-9)


class ScratchFile:
    def __init__(self, descriptor: int, is_direct: bool, label: str) -> None:
        self.is_direct = is_direct
        self._descriptor, self._label = descriptor, label
        self._noise = os.urandom(LARGE_BYTES)  # some drives compress

    def run(self, seconds: float, *streams: Requests) -> list[list[Piece]]:
        """Does each stream's requests at the same time as the others', until one has none left or the time is over."""
        ends = _Ends(time.perf_counter() + seconds)
        if not self.is_direct:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with ThreadPoolExecutor(sum(stream.num_threads for stream in streams)) as pool:
            try:
                futures = []
                for stream in streams:
                    offsets = _Offsets(stream)
                    futures.append([pool.submit(self._work, stream, offsets, ends) for _ in range(stream.num_threads)])
                return [[one for future in group for one in future.result()] for group in futures]
            finally:
                ends.at_once.set()  # also after Ctrl-C: threads end with their present request

    def verify(self, offsets: Sequence[int]) -> None:
        """Compares large requests with what was written, byte by byte."""
        buffer = mmap.mmap(-1, LARGE_BYTES)
        for offset in offsets:
            self._transfer(buffer, offset, is_write=False)
            is_same = buffer[:STAMP_BYTES] == _stamp(offset) and buffer[STAMP_BYTES:] == self._noise[STAMP_BYTES:]
            if not is_same:
                raise OSError(
                    f"{self._label} does not return what was written, within {LARGE_BYTES} bytes from {offset} on: "
                    "do not use this disk, and look at the system's log"
                )

    def _work(self, stream: Requests, offsets: _Offsets, ends: _Ends) -> list[Piece]:
        buffer = mmap.mmap(-1, stream.request_bytes)  # aligned, as requests past the cache must be
        buffer[:] = self._noise[: stream.request_bytes]
        done: list[Piece] = []
        while not ends.at_once.is_set() and not (done and ends.is_over()):  # at least one, however slow the disk is
            offset = offsets.take()
            if offset is None:
                ends.exhausted.set()
                break
            start_s = time.perf_counter()
            if stream.is_write:
                buffer[:STAMP_BYTES] = _stamp(offset)
            try:
                self._transfer(buffer, offset, stream.is_write)
            except BaseException:
                ends.at_once.set()
                raise
            done.append(Piece(start_s, time.perf_counter(), stream.request_bytes))
        return done

    def _transfer(self, buffer: mmap.mmap, offset: int, is_write: bool) -> None:
        move = os.pwritev if is_write else os.preadv
        moved_bytes = move(self._descriptor, [buffer], offset)
        if moved_bytes != len(buffer):
            way = "write to" if is_write else "read from"
            raise OSError(f"a {way} {self._label} at {offset} ended after {moved_bytes} of {len(buffer)} bytes")


class _Ends:
    """When threads stop."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self.exhausted = threading.Event()  # a stream has nothing left
        self.at_once = threading.Event()

    def is_over(self) -> bool:
        return self.exhausted.is_set() or time.perf_counter() >= self._deadline_s


class _Offsets:
    def __init__(self, stream: Requests) -> None:
        self._lock = threading.Lock()
        self._left = iter(stream.offsets) if stream.is_write else itertools.cycle(stream.offsets)

    def take(self) -> int | None:
        with self._lock:
            return next(self._left, None)


def _stamp(offset: int) -> bytes:
    return offset.to_bytes(STAMP_BYTES, "little")


@contextmanager
def scratch_file(folder: Path, num_bytes: int) -> Iterator[ScratchFile]:
    """Past the page cache where the file system can, else with writes that wait for the disk."""
    unnamed, name = tempfile.mkstemp(prefix=".hightide-doctor-", dir=folder)
    opened = None
    try:
        try:
            opened = _open_direct(name)
            is_direct = opened is not None
            if opened is None:
                opened = os.open(name, os.O_RDWR | os.O_DSYNC)
        finally:
            os.unlink(name)
        os.posix_fallocate(opened, 0, num_bytes)
        yield ScratchFile(opened, is_direct, f"the file of {num_bytes} bytes in {folder}")
    finally:
        os.close(unnamed)
        if opened is not None:
            os.close(opened)


def _open_direct(name: str) -> int | None:
    """None where the file system does not go past its cache. Some say so only at the first write."""
    refusals = (errno.EINVAL, errno.EOPNOTSUPP)
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno in refusals:
            return None
        raise
    try:
        os.pwritev(descriptor, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno in refusals:
            return None
        raise
    return descriptor
