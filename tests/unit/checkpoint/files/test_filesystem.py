"""Writes that come short, calls that a file system does not have, space that is set aside."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hightide.checkpoint.files import filesystem


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    descriptor = filesystem.open_folder(tmp_path)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def file(folder: int) -> Iterator[int]:
    descriptor = filesystem.create("file", folder)
    yield descriptor
    os.close(descriptor)


def test_short_writes_go_on(file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, counts = os.pwrite, [3, 0, 0, 1, 100]
    monkeypatch.setattr(filesystem.os, "pwrite", lambda fd, data, at: real(fd, data[: counts.pop(0)], at))
    filesystem.write_all(file, memoryview(b"0123456789"), 2)
    assert (tmp_path / "file").read_bytes() == b"\0\0" + b"0123456789"


def test_writes_that_write_nothing_end(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem.os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="8 writes in a row at 5 wrote nothing"):
        filesystem.write_all(file, memoryview(b"x"), 5)


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_file_systems_that_cannot_sync(call: str, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "_sync_file_range", None)
    sync = filesystem.sync if call == "fsync" else lambda file: filesystem.await_written(file, 0, 1)
    for number, is_told in ((errno.EINVAL, False), (errno.ENOSYS, False), (errno.EIO, True), (errno.ENOSPC, True)):

        def fail(_: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(filesystem.os, call, fail)
        if is_told:
            with pytest.raises(OSError, match=os.strerror(number)):
                sync(file)
        else:
            sync(file)


def test_parts_can_be_waited_for_and_leave_the_cache(tmp_path: Path) -> None:
    """Where the folder is on a disk."""
    path = Path("/var/tmp" if os.path.ismount("/tmp") else tmp_path, f"hightide-{os.getpid()}")
    try:
        with open(path, "w+b") as file:
            file.write(os.urandom(1 << 20))
            file.flush()
            filesystem.await_written(file.fileno(), 0, 1 << 20)
            filesystem.let_go(file.fileno(), 0, 1 << 20)
            assert not filesystem._sync_file_range or filesystem._sync_file_range(-1, 0, 1, 7) == -1
    finally:
        path.unlink()


def test_space_is_set_aside(file: int) -> None:
    filesystem.set_aside(file, 1 << 20)
    status = os.fstat(file)
    assert status.st_size == 1 << 20 and status.st_blocks * 512 >= 1 << 20


def test_a_disk_is_not_filled_up_in_vain(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "free_bytes", lambda _: (1 << 20) - 1)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            filesystem.set_aside(file, 1 << 20)
    assert os.fstat(file).st_blocks == 0

    def full(descriptor: int, *_: int) -> int:
        os.posix_fallocate(descriptor, 0, 1 << 19)  # some of it
        filesystem.ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(filesystem, "_fallocate", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        filesystem.set_aside(file, 1 << 20)
    assert os.fstat(file).st_blocks == 0


@pytest.mark.parametrize("numbers", [[errno.EOPNOTSUPP], [errno.EINTR, errno.EINTR, 0]])
def test_space_that_cannot_be_set_aside(numbers: list[int], file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fallocate(*_: int) -> int:
        number = numbers.pop(0)
        filesystem.ctypes.set_errno(number)
        return -1 if number else 0

    monkeypatch.setattr(filesystem, "_fallocate", fallocate)
    filesystem.set_aside(file, 1 << 20)
    assert numbers == []


def test_links_and_existing_files_are_not_opened(folder: int, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("as it was")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "linked").symlink_to(tmp_path / "folder")
    for call, name in [
        (filesystem.create, "link"), (filesystem.create, "dangling"), (filesystem.create, "target"),
        (filesystem.open_existing, "link"), (filesystem.open_below, "linked"),
    ]:  # fmt: skip
        with pytest.raises(OSError):
            call(name, folder)
    assert (tmp_path / "target").read_text() == "as it was" and not (tmp_path / "nothing").exists()


def test_new_folders_are_on_the_disk_before_what_is_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    make, sync = filesystem.make_folder, filesystem.sync
    monkeypatch.setattr(filesystem, "make_folder", lambda name, fd: (calls.append(("make", name)), make(name, fd)))
    monkeypatch.setattr(
        filesystem, "sync", lambda fd: (calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).name)), sync(fd))
    )
    filesystem.make_folders(tmp_path / "a" / "b")
    assert calls == [("make", "a"), ("sync", tmp_path.name), ("make", "b"), ("sync", "a")]


def test_a_lock_is_anothers(folder: int, file: int) -> None:
    assert filesystem.lock(file) is True
    again = filesystem.open_existing("file", folder)
    assert filesystem.lock(again) is False
    os.close(again)
