"""The disk's measurement: complete, bounded, and gone afterwards."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from forked import run_script
from hightide.doctor import disk_speed as disk
from hightide.doctor import scratch_file
from hightide.doctor.disk_speed import MIN_FILE_BYTES, DiskTest, by_turns, filesystem_of, measure_disk
from hightide.doctor.known import load_machine
from hightide.doctor.pace import Piece
from hightide.doctor.scratch_file import LARGE_BYTES, in_order, rate, scattered
from hightide.stores import disk_file

PAGE = os.sysconf("SC_PAGESIZE")


def small(folder: Path) -> DiskTest:
    return DiskTest(folder, MIN_FILE_BYTES, sustained_s=30.0, phase_s=0.1, small_s=0.05, shape_s=0.05)


@pytest.mark.parametrize("direct", [True, False])
def test_all_rates_and_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        monkeypatch.setattr(disk_file, "_try_direct", lambda descriptor: "refused")
    stages: list[str] = []
    written = _count_writes(monkeypatch)
    found = measure_disk(small(tmp_path), stages.append)
    rates = [value for name, value in vars(found).items() if name.endswith("_per_s")]
    rates += [value for one in found.small for value in (one.read_bytes_per_s, one.write_bytes_per_s)]
    assert len(rates) == 11 and min(rates) > 0
    assert found.written_bytes == MIN_FILE_BYTES
    assert sum(size for _, size in written) <= small(tmp_path).most_written_bytes + PAGE  # which tries O_DIRECT
    assert found.is_direct == (direct and goes_past_the_cache(tmp_path))
    assert {is_direct for is_direct, size in written if size > PAGE} == {found.is_direct}
    assert len(stages) == 8
    assert (found.request_bytes, found.depth) in disk.SHAPES
    assert list(tmp_path.iterdir()) == []


def goes_past_the_cache(folder: Path) -> bool:
    """Whether the file system of these tests does: written here without the code under test."""
    name = folder / "direct"
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.pwritev(descriptor, [mmap.mmap(-1, PAGE)], 0) == PAGE
    except OSError:
        return False
    finally:
        os.close(descriptor)
        name.unlink()


def _count_writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Whether each went past the cache, and its bytes."""
    counted: list[tuple[bool, int]] = []
    real = os.pwritev

    def pwritev(descriptor: int, buffers: Any, offset: int) -> int:
        size = real(descriptor, buffers, offset)
        counted.append((bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT), size))
        return size

    monkeypatch.setattr(os, "pwritev", pwritev)
    return counted


def test_a_file_has_no_name_while_it_is_used(tmp_path: Path) -> None:
    with scratch_file.scratch_file(tmp_path, MIN_FILE_BYTES):
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["writing", "reading", "setting aside"])
def test_an_error_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken disk")

    name = {"writing": "pwritev", "reading": "preadv", "setting aside": "posix_fallocate"}[where]
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(ValueError, match="broken disk"):
        measure_disk(small(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(link)]


def test_a_disk_that_returns_something_else_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        count = real(descriptor, buffers, offset)
        buffers[0][len(buffers[0]) // 2] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ValueError, match=rf"does not return what was written, within {LARGE_BYTES} bytes from 0 on"):
        measure_disk(small(tmp_path))


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """In the middle of writing, in a process of its own."""
    program = """
        import os, signal, sys, threading
        from pathlib import Path
        from hightide.doctor.disk_speed import DiskTest, measure_disk

        def tell(stage):
            print(stage, flush=True)
            if stage == "disk: reading":
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
        measure_disk(DiskTest(Path(sys.argv[1]), 1 << 28, phase_s=60.0), tell)
    """
    ended = run_script(program, [str(tmp_path)], timeout_s=60.0)
    assert ended.status != 0 and "KeyboardInterrupt" in ended.stderr, ended
    assert ended.stdout.endswith("disk: reading\n") and list(tmp_path.iterdir()) == []


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\d+ bytes \(.* TiB\) are missing"):
        measure_disk(replace(small(tmp_path), file_bytes=1 << 60))
    with pytest.raises(ValueError, match="no such folder"):
        measure_disk(small(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=f"at least {MIN_FILE_BYTES}"):
        measure_disk(replace(small(tmp_path), file_bytes=1))


def test_the_announcement_has_the_bytes(tmp_path: Path) -> None:
    test = DiskTest(tmp_path, 16 << 30)
    assert str(test.most_written_bytes) in test.announcement() and "38.0 GiB" in test.announcement()


def test_rates() -> None:
    done = [Piece(0.0, 1.0, 100), Piece(0.0, 2.0, 100), Piece(1.0, 4.0, 100), Piece(2.0, 6.0, 100)]
    assert rate(done) == pytest.approx(400 / 6)
    assert rate(done, begin=0.5) == pytest.approx(200 / 4)


def test_requests_stay_inside() -> None:
    requests = scattered(1 << 20, 1 << 18, 4096, True, 1)
    assert len(set(requests.offsets)) == 64 and max(requests.offsets) + 4096 <= 1 << 20
    assert list(in_order(LARGE_BYTES, 2 * LARGE_BYTES, False, 1).offsets) == [LARGE_BYTES, 2 * LARGE_BYTES]


def test_a_folder_is_on_its_nearest_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    part = type(psutil.disk_partitions(all=True)[0])
    parts = [
        part(device="/dev/a", mountpoint="/", fstype="ext4", opts=""),
        part(device="tmpfs", mountpoint=str(tmp_path), fstype="tmpfs", opts=""),
        part(device="/dev/b", mountpoint=str(tmp_path) + "x", fstype="xfs", opts=""),
    ]
    monkeypatch.setattr(disk.psutil, "disk_partitions", lambda all: parts)
    assert filesystem_of(tmp_path).kind == "tmpfs"
    assert filesystem_of(Path("/")).device == "/dev/a"


def test_several_disks_by_turns_are_as_slow_as_their_bytes_are() -> None:
    """A third of the bytes on a disk that is ten times as slow takes five times as long as the other two."""
    fast = load_machine("h200").disk
    assert fast is not None
    rates = [one.name for one in fields(fast) if one.name.endswith("_per_s")]
    slow = replace(fast, name="slow", depth=1, **{name: getattr(fast, name) / 10 for name in rates})
    both = by_turns([(fast, 2 << 30), (slow, 1 << 30)])
    for name in rates:
        assert getattr(both, name) == pytest.approx(getattr(fast, name) / 4), name
    assert both.name == f"{fast.name} and slow" and both.depth == 1 and both.small == slow.small
    assert by_turns([(fast, 5)]) is fast
