"""A file is as before or as it was to be; a link stays a link; permissions are kept."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hightide.process import files

SOURCE = Path(files.__file__).parents[2]
NEW = "the new one\n"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.json"
    path.write_text("the old one\n")
    return path


def assert_nothing_else_in(folder: Path, *names: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(
    call: str, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if call == "write":
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4, limit[1]))
    else:
        monkeypatch.setattr(files.os, call, fail)
    try:
        with pytest.raises(OSError) as raised:
            files.write_text(old, NEW)
    finally:
        if call == "write":
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert raised.value.filename == str(old)
    assert old.read_text() == "the old one\n"
    assert_nothing_else_in(old.parent, "old.json")


def test_an_interrupt_leaves_nothing_beside_it(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_text(old, NEW)
    assert old.read_text() == "the old one\n"
    assert_nothing_else_in(old.parent, "old.json")


@pytest.mark.parametrize("umask", [0o022, 0o077, 0])
def test_a_new_file_has_the_permissions_of_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        files.write_text(tmp_path / "new", NEW)
    finally:
        os.umask(before)
    assert mode(tmp_path / "new") == 0o666 & ~umask


def test_an_old_file_keeps_its_permissions(old: Path) -> None:
    old.chmod(0o640)
    files.write_text(old, NEW)
    assert mode(old) == 0o640 and old.read_text() == NEW


@pytest.mark.parametrize("target", ["old.json", "missing.json", "folder/there.json"])
def test_a_link_stays_a_link_and_its_target_is_written(target: str, old: Path) -> None:
    (old.parent / "folder").mkdir()
    link = old.parent / "link"
    link.symlink_to(target)
    files.write_text(link, NEW)
    assert link.is_symlink() and (old.parent / target).read_text() == NEW


def test_a_link_to_itself_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        files.write_text(tmp_path / "loop", NEW)
    assert (tmp_path / "loop").is_symlink()


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    thread = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    thread.start()
    files.write_text(tmp_path / "pipe", NEW)
    thread.join(10)
    assert read == [NEW]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "out.txt"])
def test_standard_output_in_a_file_stays_the_file_that_the_shell_has_opened(name: str, tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from hightide.process import files; "
        f"files.write_text({name!r}, 'x')"
    )
    with (tmp_path / "out.txt").open("w") as out:
        inode = os.fstat(out.fileno()).st_ino
        subprocess.run([sys.executable, "-c", script], stdout=out, cwd=tmp_path, check=True, timeout=30)
    assert (tmp_path / "out.txt").stat().st_ino == inode and (tmp_path / "out.txt").read_text() == "x"


def test_a_file_that_may_not_be_written_is_not_replaced(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "access", lambda path, how: False)  # root may write everything
    with pytest.raises(PermissionError, match=r"old\.json"):
        files.write_text(old, NEW)
    assert old.read_text() == "the old one\n"


@pytest.mark.parametrize(("call", "number"), [("open", 13), ("replace", 16)])
def test_where_nothing_can_be_renamed_the_file_is_written_in_place(
    call: str, number: int, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder where nothing new may be made; a file that is mounted into a container."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, call, fail)
    files.write_text(old, NEW)
    monkeypatch.undo()
    assert old.read_text() == NEW
    assert_nothing_else_in(old.parent, "old.json")


def test_long_names_leave_room_for_the_one_beside_it(tmp_path: Path) -> None:
    files.write_text(tmp_path / ("n" * 255), NEW)
    with pytest.raises(OSError, match="too long"):
        files.write_text(tmp_path / ("n" * 256), NEW)
    assert len(list(tmp_path.iterdir())) == 1
