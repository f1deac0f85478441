"""Disks that fail, fill up, hang or lie, under a store: real files and processes. Many more: `bench/disk_faults.py`."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import Ended, run_script
from hightide.ir.limits import DiskLimit
from hightide.stores import disk, disk_requests
from hightide.stores.disk import DiskStore
from hightide.stores.disk_requests import ChangedBytes

PATH = Path(__file__).resolve().parents[2] / "bench" / "disk_faults.py"
SECTOR = 4096
WAIT_S = 60.0  # a disk may be busy with others
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files and processes of Linux")


@pytest.fixture(scope="module")
def faults() -> Any:
    spec = importlib.util.spec_from_file_location("disk_faults", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["disk_faults"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["disk_faults"]


KINDS = (
    "EIO", "ENOSPC", "EDQUOT", "short", "nothing moved", "slow", "hangs", "write lost", "read elsewhere",
    "written elsewhere", "bit changed", "sector zeroed", "sector exchanged", "no folder", "a link", "no directory",
    "too little room", "full while set aside", "no direct transfers", "full tmpfs", "read-only", "closed under way",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_told_or_made_good(faults: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*KINDS, "killed"} == set(faults.KINDS)
    monkeypatch.setattr(disk, "JOIN_TIMEOUT_S", 0.5)
    found = faults.run_all([kind, kind], tmp_path, seed=KINDS.index(kind))
    assert [one.problems for one in found] == [[], []]
    if any(one.skipped for one in found):
        pytest.skip(found[0].skipped)
    assert all(one.hit for one in found)


def test_the_driver_finds_what_is_silent(faults: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same faults under a store that makes no sums, or loses what a short write left out."""
    monkeypatch.setattr(disk_requests, "SectorSums", lambda num_bytes: None)
    found = faults.run_all(["bit changed", "write lost"] * 3, tmp_path, seed=1)
    assert any("silent" in problem for one in found for problem in one.problems)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore([DiskLimit(str(tmp_path), 64 * SECTOR)], request_bytes=2 * SECTOR)
    yield store
    store.close()


def failing(number: int, is_hit: Callable[[int], bool], name: str) -> Callable[..., int]:
    real = getattr(os, name)

    def call(descriptor: int, buffers: Any, offset: int) -> int:
        if is_hit(offset):
            raise OSError(number, os.strerror(number))
        return int(real(descriptor, buffers, offset))

    return call


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failed_write_is_never_read_as_if_it_were_well(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    region = store.allocate(16 * SECTOR, "optimizer states")
    store.write(region, torch.ones(16 * SECTOR, dtype=torch.uint8)).wait(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(number, lambda offset: offset == 4 * SECTOR, "pwritev"))
        ticket = store.write(region, torch.full((16 * SECTOR,), 2, dtype=torch.uint8))
        with pytest.raises(OSError) as caught:
            ticket.wait(WAIT_S)
    assert caught.value.errno == number and str(tmp_path) in str(caught.value)
    assert f"writing {2 * SECTOR} bytes at {4 * SECTOR} ended after 0" in str(caught.value)
    for at in range(16):  # each sector by itself: its new bytes, or an error; never the old ones
        into = torch.zeros(SECTOR, dtype=torch.uint8)
        try:
            store.read(region, into, at * SECTOR).wait(WAIT_S)
        except ChangedBytes as error:
            assert "optimizer states" in str(error)
        else:
            assert bool((into == 2).all()) and at not in (4, 5)
    store.write(region, torch.full((16 * SECTOR,), 3, dtype=torch.uint8)).wait(WAIT_S)
    into = torch.zeros(16 * SECTOR, dtype=torch.uint8)
    store.read(region, into).wait(WAIT_S)
    assert bool((into == 3).all())


def test_changed_bytes_name_chunk_file_and_offset(store: DiskStore, tmp_path: Path) -> None:
    store.allocate(3 * SECTOR, "before")
    region = store.allocate(8 * SECTOR, "layers.7 states")
    store.write(region, torch.ones(2 * SECTOR)).wait(WAIT_S)
    descriptor = os.open(f"/proc/self/fd/{store._disks[0].file._descriptor}", os.O_WRONLY)
    os.pwrite(descriptor, b"x", region.offset + 5 * SECTOR + 77)
    os.fsync(descriptor)
    os.close(descriptor)
    store.read(region, torch.zeros(5 * SECTOR // 4)).wait(WAIT_S)  # what lies before it is well
    with pytest.raises(ChangedBytes) as caught:
        store.read(region, torch.zeros(2 * SECTOR)).wait(WAIT_S)
    for words in ("'layers.7 states'", f"{SECTOR} bytes at {region.offset + 5 * SECTOR} of", str(tmp_path)):
        assert words in str(caught.value)
    with pytest.raises(ChangedBytes):  # not made good by writing beside it
        store.write(region, torch.ones(2), 5 * SECTOR + 800).wait(WAIT_S)


def python(program: str, *arguments: object, timeout_s: float = 100.0) -> Ended:
    return run_script(textwrap.dedent(HEAD) + textwrap.dedent(program), [*map(str, arguments)], timeout_s)


HEAD = """
    import os, sys, time, torch
    from hightide.ir.limits import DiskLimit
    from hightide.stores.disk import DiskStore
    def make(**options):
        return DiskStore([DiskLimit(sys.argv[1], 16 << 20)], **options)
"""


@pytest.mark.parametrize(("name", "end"), [("preadv", "store.close()"), ("pwritev", "pass")])
def test_a_hang_is_an_error_and_the_process_exits(tmp_path: Path, name: str, end: str) -> None:
    program = f"""
        store = make(timeout_s=1.0, request_bytes=1 << 20, depth=2)
        region, other = (store.allocate(4 << 20, label) for label in ("chunk 3", "chunk 4"))
        memory = torch.ones(1 << 20)
        store.write(region, memory).wait(60)
        os.{name} = lambda *_: time.sleep(1000)
        move, rest = (store.read, store.write) if {name!r} == "preadv" else (store.write, store.read)
        tickets = [move(region, memory), move(other, memory)]
        for ticket in tickets:
            try:
                ticket.wait(60)
            except TimeoutError as error:
                assert "'chunk 3'" in str(error) and sys.argv[1] in str(error) and "after 1 s" in str(error), error
                print(error)
        for late in (move(region, memory), rest(region, memory)):
            assert isinstance(late.error, TimeoutError)
        start_s = time.monotonic()
        {end}
        assert time.monotonic() - start_s < 30
        print("ends", flush=True)
    """
    done = python(program, tmp_path)
    assert done.status == 0 and done.stdout.endswith("ends\n"), done.stderr
    assert done.stdout.count("of them at") == 2 and not done.stderr


def test_a_process_ends_with_requests_under_way(tmp_path: Path) -> None:
    """Python ends threads that nobody joins; one inside a torch operation would abort the process."""
    program = """
        store = make()
        region = store.allocate(16 << 20, "data")
        memory = torch.ones(4 << 20)
        tickets = [move(region, memory) for _ in range(8) for move in (store.write,)]
        tickets += [store.read(region, torch.empty(4 << 20)) for _ in range(8)]
    """
    done = python(program, tmp_path)
    assert (done.status, done.stderr) == (0, "")


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="becomes somebody else")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    program = """
        os.chmod(sys.argv[1], 0o755)
        os.chdir("/")
        os.setgid(65534), os.setuid(65534)
        try:
            make()
        except ValueError as error:
            print(error)
    """
    folder = Path("/dev/shm" if os.path.isdir("/dev/shm") else "/var/tmp", f"hightide-{os.getpid()}")  # all may enter
    folder.mkdir()
    try:
        done = python(program, folder)
        assert f"{folder}: no file can be made" in done.stdout and "Permission denied" in done.stdout, done.stderr
        assert list(folder.iterdir()) == []
    finally:
        folder.rmdir()


def test_a_killed_process_leaves_nothing_and_its_space_is_back(faults: Any, tmp_path: Path) -> None:
    """On a disk that nobody else uses, where one can be mounted: then its free bytes are compared too."""
    with faults.mounted(tmp_path / "mount", "size=64m") as is_mounted:
        folder = tmp_path / "mount"
        free_bytes = os.statvfs(folder).f_bavail
        program = """
            import signal, threading
            threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                store = make()
                region, memory = store.allocate(8 << 20, "data"), torch.ones(2 << 20)
                for _ in range(3):
                    store.write(region, memory)
                    store.read(region, torch.empty(2 << 20)).wait(60)
                store.close()
        """
        for delay_s in (0.0, 0.2):
            ended = python(program, folder, delay_s, timeout_s=WAIT_S)
            assert ended.status == -signal.SIGKILL, ended
            assert list(folder.iterdir()) == []
        if is_mounted:
            deadline_s = time.monotonic() + WAIT_S
            while os.statvfs(folder).f_bavail != free_bytes and time.monotonic() < deadline_s:
                time.sleep(0.05)
            assert os.statvfs(folder).f_bavail == free_bytes
