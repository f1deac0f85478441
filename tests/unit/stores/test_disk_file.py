"""A file without a name: where it can be, how it is opened, and transfers that end early."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from hightide.stores import disk_file
from hightide.stores.disk_file import TRIES, DiskFile, PageBuffer, open_disk_file

SECTOR = 4096


def fails(number: int) -> Any:
    def call(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture(params=[True, False], ids=["direct", "through the cache"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    file = open_disk_file(tmp_path, 8 * SECTOR, direct=request.param)
    if request.param and not file.is_direct:
        file.close()
        pytest.skip("the file system of the tests has no direct transfers")
    assert file.is_direct is request.param
    yield file
    file.close()


@pytest.mark.parametrize("can_be_unnamed", [True, False])
def test_it_has_no_name_and_its_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_be_unnamed: bool) -> None:
    opened: list[tuple[Any, int, int]] = []
    real = os.open

    def watched(path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE and not can_be_unnamed:
            raise OSError(errno.EOPNOTSUPP, "no such files here")
        opened.append((path, flags, mode))
        return real(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", watched)
    file = open_disk_file(tmp_path, 100 * SECTOR)
    assert list(tmp_path.iterdir()) == []
    found = os.fstat(file._descriptor)
    assert (found.st_nlink, found.st_size, stat.S_IMODE(found.st_mode)) == (0, 100 * SECTOR, 0o600)
    assert found.st_blocks * 512 >= 100 * SECTOR
    path, flags, mode = opened[-1]
    assert flags & os.O_EXCL and mode == 0o600
    assert can_be_unnamed or (flags & os.O_NOFOLLOW and flags & os.O_CREAT and str(path).startswith(".hightide-"))
    file.close()
    file.close()


def test_a_name_that_is_taken_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", 0)  # then "." cannot be opened for writing
    monkeypatch.setattr(disk_file, "_NO_UNNAMED", (errno.EISDIR, errno.EEXIST, errno.EINVAL))
    monkeypatch.setattr(disk_file.secrets, "token_hex", lambda _: "0")
    outside = tmp_path / "outside"
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / ".hightide-0").symlink_to(outside)
    with pytest.raises(ValueError, match="no file can be made"):
        open_disk_file(tmp_path / "scratch", SECTOR)
    assert not outside.exists() and (tmp_path / "scratch" / ".hightide-0").is_symlink()


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ValueError, match=r"missing: there is no such folder; make it"):
        open_disk_file(tmp_path / "missing", SECTOR)
    with pytest.raises(ValueError, match=r"file is no folder; name one"):
        open_disk_file(tmp_path / "file", SECTOR)
    with pytest.raises(ValueError, match=r"link is a symbolic link.*name the folder itself, .*real"):
        open_disk_file(tmp_path / "link", SECTOR)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
def test_a_folder_where_nothing_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(disk_file, "_open_unnamed", fails(number))
    with pytest.raises(ValueError, match=f"{tmp_path}: no file can be made.*{os.strerror(number)}.*name another"):
        open_disk_file(tmp_path, SECTOR)


def test_too_little_room_is_told_before_the_disk_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fails(errno.EIO))  # it does not come to this
    num_bytes = 1 << 60
    with pytest.raises(ValueError, match=rf"{num_bytes} bytes .*TiB\) cannot be set aside, \d+ bytes .*are free"):
        open_disk_file(tmp_path, num_bytes)


def test_a_file_system_that_does_not_say_how_much_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of users say 0 of 0."""
    says_nothing = os.statvfs_result((4096, 4096, *[0] * 9))
    monkeypatch.setattr(os, "fstatvfs", lambda _: says_nothing)
    open_disk_file(tmp_path, SECTOR).close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_room_that_is_not_there_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", fails(number))
    with pytest.raises(ValueError, match=rf"{8 * SECTOR} bytes.*free: .*{os.strerror(number)}.*ask for less"):
        open_disk_file(tmp_path, 8 * SECTOR)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_system_that_sets_nothing_aside_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fails(errno.EOPNOTSUPP))
    monkeypatch.setattr(disk_file, "_ZERO_BYTES", 3 * SECTOR)
    file = open_disk_file(tmp_path, 8 * SECTOR)
    found = os.fstat(file._descriptor)
    assert found.st_size == 8 * SECTOR <= found.st_blocks * 512
    file.close()


@pytest.mark.parametrize("fault", ["open", "write", "read", "short", "other bytes"])
def test_direct_transfers_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    refused = fails(errno.EINVAL)
    real_open, real_read = os.open, os.preadv

    def odd_open(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        return refused() if flags & os.O_DIRECT else real_open(path, flags, *rest, **more)

    def other_bytes(descriptor: int, buffers: Any, offset: int) -> int:
        count = real_read(descriptor, buffers, offset)
        buffers[0][100] ^= 1
        return count

    name, call = {
        "open": ("open", odd_open),
        "write": ("pwritev", refused),
        "read": ("preadv", refused),
        "short": ("pwritev", lambda *_: 512),
        "other bytes": ("preadv", other_bytes),
    }[fault]
    with monkeypatch.context() as patch:
        patch.setattr(os, name, call)
        file = open_disk_file(tmp_path, SECTOR)
    assert not file.is_direct and file.refusal
    assert round_trip(file)
    file.close()


def round_trip(file: DiskFile) -> bool:
    written, found = PageBuffer(SECTOR), PageBuffer(SECTOR)
    written.memory[:] = os.urandom(SECTOR)
    file.transfer(written.address, 0, SECTOR, is_write=True)
    file.transfer(found.address, 0, SECTOR, is_write=False)
    return found.memory[:] == written.memory[:]


@pytest.mark.parametrize("sizes", [(SECTOR,), (1000, 5000, 0, 3 * SECTOR + 1), (0, 0, 0)])
def test_short_transfers_go_on_at_a_sector(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    real = {name: getattr(os, name) for name in ("preadv", "pwritev")}
    written, found = PageBuffer(8 * SECTOR), PageBuffer(8 * SECTOR)
    written.memory[:] = os.urandom(8 * SECTOR)
    for is_write, buffer in ((True, written), (False, found)):
        left = list(sizes)
        name = "pwritev" if is_write else "preadv"
        offsets: list[int] = []

        def call(descriptor: int, buffers: Any, offset: int, name: str = name, left: list[int] = left) -> int:
            offsets.append(offset)  # noqa: B023
            whole = -(-left[0] // SECTOR) * SECTOR if left else len(buffers[0])
            real[name](descriptor, [buffers[0][:whole]], offset)
            return left.pop(0) if left else len(buffers[0])

        monkeypatch.setattr(os, name, call)
        moved_bytes = file.transfer(buffer.address, 0, 8 * SECTOR, is_write)
        assert moved_bytes >= 8 * SECTOR and len(offsets) == len(sizes) + 1
        assert all(offset % SECTOR == 0 for offset in offsets)
    assert found.memory[:] == written.memory[:]


@pytest.mark.parametrize("is_write", [True, False])
def test_transfers_that_move_nothing_end(file: DiskFile, monkeypatch: pytest.MonkeyPatch, is_write: bool) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "pwritev" if is_write else "preadv", lambda *_: calls.append(1) or 0)
    with pytest.raises(OSError, match=rf"{8 * SECTOR} bytes at 0 ended after 0") as caught:
        file.transfer(PageBuffer(8 * SECTOR).address, 0, 8 * SECTOR, is_write)
    assert caught.value.errno == errno.EIO and len(calls) == TRIES and str(file.folder) in str(caught.value)


def test_an_error_is_itself_and_says_where(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EDQUOT, "Quota exceeded")
    real, calls, source = os.pwritev, [], PageBuffer(4 * SECTOR)

    def call(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise error
        return real(descriptor, [buffers[0][:SECTOR]], offset)

    monkeypatch.setattr(os, "pwritev", call)
    with pytest.raises(OSError) as caught:
        file.transfer(source.address, 2 * SECTOR, 4 * SECTOR, is_write=True)
    assert caught.value is error and error.errno == errno.EDQUOT
    where = f"{4 * SECTOR} bytes at {2 * SECTOR} ended after {SECTOR}"
    for words in ("Quota exceeded", where, str(file.folder), "go on from the last checkpoint"):
        assert words in str(error)
