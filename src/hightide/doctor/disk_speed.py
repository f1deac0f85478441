"""Speeds of a disk: large and small requests, reads, writes and both at once, beyond what its caches take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import psutil

from hightide.doctor.scratch_file import LARGE_BYTES, ScratchFile, in_order, rate, scattered, scratch_file
from hightide.ir.machine import DISK_DEPTH, DISK_REQUEST_BYTES, Disk, SmallRequests
from hightide.ir.units import exactly, format_bytes

NUM_THREADS = 4  # with large requests
SMALL_BYTES = (4 << 10, 32 << 10, 256 << 10)
NUM_SMALL_THREADS = 16
SHAPES = (  # of requests, of which the fastest is found: the bytes of one, and how many are under way each way
    (DISK_REQUEST_BYTES, DISK_DEPTH),
    (DISK_REQUEST_BYTES, 2 * DISK_DEPTH),
    (DISK_REQUEST_BYTES // 4, DISK_DEPTH),
    (DISK_REQUEST_BYTES // 4, 4 * DISK_DEPTH),
)
MIN_GAIN = 1.05  # below this, the first of them is as good
NUM_CHECKED = 16  # large requests that are read back and compared
SPARE_BYTES = 1 << 30  # that a disk keeps free
MIN_FILE_BYTES = 8 * LARGE_BYTES
SUSTAINED_PART = 0.25  # the last part of what is written in a row


@dataclass(frozen=True)
class DiskTest:
    """How much is done. Each phase ends with its time or its bytes, whichever comes first."""

    folder: Path
    file_bytes: int = 16 << 30  # beyond the caches of most drives and controllers
    sustained_s: float = 20.0
    phase_s: float = 4.0
    small_s: float = 1.5
    shape_s: float = 1.0

    @property
    def most_written_bytes(self) -> int:
        """The whole file in a row, half of it while reading, and an eighth for each size of small requests and each
        shape of large ones."""
        return self.file_bytes + self.file_bytes // 2 + (len(SMALL_BYTES) + len(SHAPES)) * (self.file_bytes // 8)

    def announcement(self) -> str:
        return (
            f"writing up to {format_bytes(self.most_written_bytes)} ({self.most_written_bytes} bytes) in {self.folder}:"
            f" a temporary file of {format_bytes(self.file_bytes)}, removed in any case"
        )

    def check(self) -> None:
        """ValueError if it cannot be done."""
        if self.file_bytes < MIN_FILE_BYTES:
            raise ValueError(
                f"{self.file_bytes} bytes are too few to measure a disk; give --disk-bytes at least {MIN_FILE_BYTES} "
                f"({format_bytes(MIN_FILE_BYTES)})"
            )
        if not self.folder.is_dir():
            raise ValueError(f"--disk {self.folder}: there is no such folder; make it, or name another")
        needed_bytes, free_bytes = self.file_bytes + SPARE_BYTES, psutil.disk_usage(str(self.folder)).free
        if needed_bytes > free_bytes:
            missing_bytes = needed_bytes - free_bytes
            raise ValueError(
                f"--disk {self.folder}: {free_bytes} bytes are free and the measurement needs {needed_bytes}: "
                f"{exactly(missing_bytes)} are missing. Free them, name another folder, "
                "or give a smaller --disk-bytes"
            )


def measure_disk(test: DiskTest, tell: Callable[[str], None] = lambda _: None) -> Disk:
    """`tell` is called at the beginning of each phase. What the system refuses is a ValueError."""
    test.check()
    try:
        return _measure(test, tell)
    except OSError as error:
        raise ValueError(f"--disk {test.folder}: {error}; if the disk is well, name another folder") from error


def _measure(test: DiskTest, tell: Callable[[str], None]) -> Disk:
    """Reads touch only what was written before: blocks that were set aside and never written cost no reading."""
    with scratch_file(test.folder, test.file_bytes) as file:
        tell("disk: writing")
        whole_bytes = test.file_bytes // LARGE_BYTES * LARGE_BYTES
        (written,) = file.run(test.sustained_s, in_order(0, whole_bytes, True, NUM_THREADS))
        num_written = len(written)
        if num_written < 2:
            raise ValueError(
                f"--disk {test.folder}: {num_written * LARGE_BYTES} bytes were written in {test.sustained_s:g} s; this "
                "disk is too slow to hold anything of a training run, name another"
            )
        tell("disk: reading back and comparing")
        file.verify(range(0, num_written * LARGE_BYTES, max(1, num_written // NUM_CHECKED) * LARGE_BYTES))
        tell("disk: reading")
        (read,) = file.run(test.phase_s, in_order(0, num_written * LARGE_BYTES, False, NUM_THREADS))
        tell("disk: reading and writing at once")
        middle_bytes = num_written // 2 * LARGE_BYTES
        reads = in_order(0, middle_bytes, False, NUM_THREADS)
        read_too, written_too = file.run(test.phase_s, reads, in_order(middle_bytes, middle_bytes, True, NUM_THREADS))
        tell("disk: the best size and number of requests")
        request_bytes, depth = _best_shape(file, test.shape_s, middle_bytes, test.file_bytes // 8)
        small = []
        for size in SMALL_BYTES:
            tell(f"disk: requests of {format_bytes(size)}")
            part = (num_written * LARGE_BYTES, test.file_bytes // 8, size)
            (in_,) = file.run(test.small_s, scattered(*part, False, NUM_SMALL_THREADS))
            (out,) = file.run(test.small_s, scattered(*part, True, NUM_SMALL_THREADS))
            small.append(SmallRequests(size, rate(in_), rate(out)))
        filesystem = filesystem_of(test.folder)
        return Disk(
            name=f"{filesystem.kind} on {filesystem.device}",
            is_direct=file.is_direct,
            read_bytes_per_s=rate(read),
            write_bytes_per_s=rate(written),
            sustained_write_bytes_per_s=rate(written, begin=1 - SUSTAINED_PART),
            written_bytes=num_written * LARGE_BYTES,
            read_while_writing_bytes_per_s=rate(read_too),
            write_while_reading_bytes_per_s=rate(written_too),
            small=tuple(small),
            request_bytes=request_bytes,
            depth=depth,
        )


def by_turns(disks: Sequence[tuple[Disk, int]]) -> Disk:
    """As one disk, each with the bytes that it may have: a chunk lies on one of them, and chunks follow each other."""
    slowest = min((disk for disk, _ in disks), key=lambda disk: disk.read_while_writing_bytes_per_s)
    if len(disks) == 1:
        return slowest
    total_bytes = sum(size for _, size in disks)
    rates = {
        name: total_bytes / sum(size / getattr(disk, name) for disk, size in disks)
        for name in (one.name for one in fields(Disk))
        if name.endswith("_per_s")
    }
    names = " and ".join(disk.name for disk, _ in disks)
    written_bytes = min(disk.written_bytes for disk, _ in disks)
    is_direct = all(disk.is_direct for disk, _ in disks)
    return replace(slowest, name=names, is_direct=is_direct, written_bytes=written_bytes, **rates)


def _best_shape(file: ScratchFile, seconds: float, middle_bytes: int, most_bytes: int) -> tuple[int, int]:
    """With which most is read and written, both at once, in the halves of what was written before."""
    rates = {}
    for request_bytes, depth in SHAPES:
        num_bytes = min(middle_bytes, most_bytes) // request_bytes * request_bytes
        reads = in_order(0, num_bytes, False, depth, request_bytes)
        writes = in_order(middle_bytes, num_bytes, True, depth, request_bytes)
        rates[request_bytes, depth] = sum(rate(done) for done in file.run(seconds, reads, writes))
    best = max(rates, key=rates.__getitem__)
    return best if rates[best] >= MIN_GAIN * rates[SHAPES[0]] else SHAPES[0]


@dataclass(frozen=True)
class Filesystem:
    kind: str  # ext4, overlay, tmpfs, ...
    device: str


def filesystem_of(folder: Path) -> Filesystem:
    real = folder.resolve()
    above = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    if not above:
        return Filesystem("an unknown file system", "an unknown device")
    nearest = max(above, key=lambda part: len(part.mountpoint))
    return Filesystem(nearest.fstype, nearest.device)
