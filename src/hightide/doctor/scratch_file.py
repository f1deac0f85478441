"""A temporary file and requests to it from several threads. It has no name, so nothing is left behind however the
process ends."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hightide.doctor.pace import Piece
from hightide.stores.disk_file import SECTOR_BYTES, DiskFile, PageBuffer, open_disk_file

STAMP_BYTES = 8  # each written request begins with its own offset
LARGE_BYTES = 16 << 20


@dataclass(frozen=True)
class OffsetQueue:
    """What threads take one after the other. Reads begin again at the end; writes are done once."""

    offsets: Sequence[int]
    request_bytes: int
    is_write: bool
    num_threads: int


def in_order(
    start: int, num_bytes: int, is_write: bool, num_threads: int, request_bytes: int = LARGE_BYTES
) -> OffsetQueue:
    return OffsetQueue(range(start, start + num_bytes, request_bytes), request_bytes, is_write, num_threads)


def scattered(within_bytes: int, num_bytes: int, request_bytes: int, is_write: bool, num_threads: int) -> OffsetQueue:
    """So many bytes of requests, anywhere in the file's beginning, none twice."""
    places = range(within_bytes // request_bytes)
    chosen = random.Random(0).sample(places, min(len(places), num_bytes // request_bytes))
    return OffsetQueue([place * request_bytes for place in chosen], request_bytes, is_write, num_threads)


def rate(done: Sequence[Piece], begin: float = 0.0) -> float:
    """Bytes per second, of the part that begins at this share of all requests and goes to the end."""
    ordered = sorted(done, key=lambda one: one.end_s)
    first = int(len(ordered) * begin)
    since_s = ordered[first - 1].end_s if first else min(one.start_s for one in ordered)
    return sum(one.num_bytes for one in ordered[first:]) / max(ordered[-1].end_s - since_s, 1e-9)


class ScratchFile:
    def __init__(self, file: DiskFile) -> None:
        self._file = file
        self._noise = os.urandom(LARGE_BYTES)  # some drives compress

    @property
    def is_direct(self) -> bool:
        return self._file.is_direct

    def run(self, seconds: float, *streams: OffsetQueue) -> list[list[Piece]]:
        """Does each stream's requests at the same time as the others', until one has none left or the time is over."""
        ends = _Ends(time.perf_counter() + seconds)
        self._file.forget_cached()
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
        buffer = PageBuffer(LARGE_BYTES)
        for offset in offsets:
            self._file.transfer(buffer.address, offset, LARGE_BYTES, is_write=False)
            found = buffer.memory
            is_same = found[:STAMP_BYTES] == _stamp(offset) and found[STAMP_BYTES:] == self._noise[STAMP_BYTES:]
            if not is_same:
                raise OSError(
                    f"{self._file} does not return what was written, within {LARGE_BYTES} bytes from {offset} on: "
                    "do not use this disk, and look at the system's log"
                )

    def _work(self, stream: OffsetQueue, offsets: _Offsets, ends: _Ends) -> list[Piece]:
        buffer = PageBuffer(stream.request_bytes)
        buffer.memory[:] = self._noise[: stream.request_bytes]
        done: list[Piece] = []
        while not ends.at_once.is_set() and not (done and ends.is_over()):  # at least one, however slow the disk is
            offset = offsets.take()
            if offset is None:
                ends.exhausted.set()
                break
            start_s = time.perf_counter()
            if stream.is_write:
                buffer.memory[:STAMP_BYTES] = _stamp(offset)
            try:
                self._file.transfer(buffer.address, offset, stream.request_bytes, stream.is_write)
            except BaseException:
                ends.at_once.set()
                raise
            done.append(Piece(start_s, time.perf_counter(), stream.request_bytes))
        return done


class _Ends:
    """When threads stop."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self.exhausted = threading.Event()  # a stream has nothing left
        self.at_once = threading.Event()

    def is_over(self) -> bool:
        return self.exhausted.is_set() or time.perf_counter() >= self._deadline_s


class _Offsets:
    def __init__(self, stream: OffsetQueue) -> None:
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
    file = open_disk_file(folder, num_bytes // SECTOR_BYTES * SECTOR_BYTES, flags_through_cache=os.O_DSYNC)
    try:
        yield ScratchFile(file)
    finally:
        file.close()
