"""What a crash leaves is removed by the next save, if it is ours and nobody is at it; nothing else ever is."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hightide.checkpoint.choosing import latest
from hightide.checkpoint.files import filesystem, leftovers
from hightide.checkpoint.files.folder import damages
from hightide.checkpoint.files.manifest import MARKER
from hightide.checkpoint.files.writer import CheckpointWriter
from small_checkpoints import content, write


def unfinished(folder: Path, step: int) -> Path:
    """As a killed process leaves it."""
    path = folder / f"step-{step}.tmp"
    path.mkdir()
    path.joinpath(MARKER).touch()
    path.joinpath("model.safetensors").write_bytes(b"half of it")
    return path


def test_an_unfinished_one_of_a_dead_process_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        unfinished(tmp_path, step)
    write(tmp_path, 2)
    assert os.listdir(tmp_path) == ["step-2"]


def test_one_of_a_living_process_stays(tmp_path: Path) -> None:
    path = unfinished(tmp_path, 1)
    program = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX)"
    program += "; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program, path / MARKER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        write(tmp_path, 2)
        assert sorted(os.listdir(path)) == [MARKER, "model.safetensors"]
        with pytest.raises(ValueError, match=r"step-1.tmp is there: another process writes it"):
            write(tmp_path, 1)
        process.kill()
    write(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_nothing_can_be_locked_the_marker_names_its_process(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with CheckpointWriter(tmp_path, 1) as living:
        marker = tmp_path / "step-1.tmp" / MARKER
        host, number_of_process = marker.read_text().split(" ")
        assert number_of_process == str(os.getpid())
        write(tmp_path, 2)
        assert marker.exists()
        living.bytes("training.json", b"{}")
        living.commit({})
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    path = unfinished(tmp_path, 3)
    for owner, stays in ((f"elsewhere {process.pid}", True), ("", True), (f"{host} {process.pid}", False)):
        (path / MARKER).write_text(owner)
        write(tmp_path, 4)
        assert path.exists() == stays


@pytest.mark.parametrize("kind", ["no marker", "marker is a link", "has a folder", "has a link", "marker is a pipe"])
def test_what_is_not_ours_stays(kind: str, tmp_path: Path) -> None:
    path = unfinished(tmp_path, 1)
    if "marker" in kind:
        path.joinpath(MARKER).unlink()
    if kind == "marker is a link":
        path.joinpath(MARKER).symlink_to(path / "model.safetensors")
    if kind == "marker is a pipe":
        os.mkfifo(path / MARKER)
    if kind == "has a folder":
        path.joinpath("mine").mkdir()
    if kind == "has a link":
        path.joinpath("mine").symlink_to(tmp_path)
    before = sorted(path.iterdir())
    write(tmp_path, 2)
    assert sorted(path.iterdir()) == before
    with pytest.raises(ValueError, match=r"step-1\.tmp is there"):
        write(tmp_path, 1)
    assert sorted(path.iterdir()) == before


def test_empty_ones_go(tmp_path: Path) -> None:
    """A crash between the making of a folder and its mark, or between the end of its last file and its own."""
    for name in ("step-1.tmp", "step-2.tmp", "step-3.gone", "step-4.old", "step-5", "other.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-6.tmp").symlink_to("step-5")
    write(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == ["other.tmp", "step-1", "step-4.old", "step-5", "step-6.tmp"]


def test_an_empty_one_that_goes_while_it_is_claimed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = filesystem.open_below, []

    def open_below(name: str, folder: int) -> int:
        if name == "step-1.tmp" and len(calls) < 2:
            calls.append(name)
            descriptor = real(name, folder)
            os.rmdir(tmp_path / name)
            if len(calls) == 2:
                return descriptor
            os.close(descriptor)
        return real(name, folder)

    monkeypatch.setattr(filesystem, "open_below", open_below)
    write(tmp_path, 1)
    assert len(calls) == 2 and os.listdir(tmp_path) == ["step-1"]


def test_other_names_are_never_looked_at(tmp_path: Path) -> None:
    for name in ("step-01.tmp", "step-1.tmp2", "step--1.tmp", "best.tmp", "step-1.old2"):
        unfinished(tmp_path, 1).rename(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    write(tmp_path, 2)
    assert [path for path in sorted(tmp_path.rglob("*")) if "step-2" not in path.parts] == before


def test_a_claim_that_is_taken_for_left_over_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save may come between the marker and its lock."""
    real, calls = filesystem.lock, []

    def lock(file: int) -> bool | None:
        if not calls:
            calls.append(file)
            parent = os.open(tmp_path, os.O_RDONLY)
            leftovers.clear(parent, tmp_path)
            os.close(parent)
            assert os.listdir(tmp_path) == []
        return real(file)

    monkeypatch.setattr(filesystem, "lock", lock)
    write(tmp_path, 1)
    assert os.listdir(tmp_path) == ["step-1"] and latest(tmp_path, verify=True)


# -- exchanges and removals that were cut off ------------------------------------------------------------------------


def test_one_that_was_about_to_be_replaced_gets_its_name_back(tmp_path: Path) -> None:
    old = content(write(tmp_path, 1))
    (tmp_path / "step-1").rename(tmp_path / "step-1.old")
    assert latest(tmp_path) == tmp_path / "step-1.old"
    write(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"] and content(tmp_path / "step-1") == old


def test_one_that_was_replaced_goes(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "step-1.old")
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere", 1, numel=5).rename(tmp_path / "step-1")
    assert latest(tmp_path) == tmp_path / "step-1"
    write(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "step-1", "step-2"]


def test_an_old_one_stays_while_what_is_in_its_place_is_none(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "step-1.old")
    (tmp_path / "step-1").mkdir()
    write(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-1.old", "step-2"]


def test_a_removal_goes_on(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "step-1.gone")
    (tmp_path / "step-1.gone" / "model.safetensors").unlink()
    (tmp_path / "step-5.gone").mkdir()
    (tmp_path / "step-5.gone" / "mine").touch()
    assert latest(tmp_path) is None
    write(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-5.gone"]


def remove(folder: Path, name: str) -> None:
    parent = os.open(folder, os.O_RDONLY)
    try:
        leftovers.remove_checkpoint(name, parent, folder)
    finally:
        os.close(parent)


def test_files_of_others_in_a_checkpoint_stay_where_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "notes.txt").write_text("mine")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(tmp_path / "target")
    (tmp_path / "target").touch()
    remove(tmp_path, "step-1")
    assert sorted(os.listdir(path)) == ["model.safetensors", "notes.txt"] and (tmp_path / "target").exists()
    with pytest.raises(ValueError, match="manifest"):
        remove(tmp_path, "step-1")


def test_folders_of_a_checkpoint_go_with_it_and_those_of_others_stay(tmp_path: Path) -> None:
    path = write(tmp_path, 1, below="judge")
    assert sorted(os.listdir(path / "judge")) == ["adapter_config.json"] and not damages(path)
    remove(tmp_path, "step-1")
    assert os.listdir(tmp_path) == []
    path = write(tmp_path, 2, below="judge")
    (path / "judge" / "notes.txt").write_text("mine")
    (path / "mine").mkdir()
    remove(tmp_path, "step-2")
    assert [str(one.relative_to(path)) for one in sorted(path.rglob("*"))] == ["judge", "judge/notes.txt", "mine"]


def test_an_unfinished_one_goes_with_the_folders_that_it_has_made_itself(tmp_path: Path) -> None:
    for step, named in ((1, "judge"), (2, "mine")):
        path = unfinished(tmp_path, step)
        for name in ("judge", named):
            path.joinpath(name).mkdir(exist_ok=True)
            path.joinpath(name, "adapter_config.json").write_text("half of it")
        path.joinpath(MARKER).write_text("\njudge")
    unfinished(tmp_path, 3).joinpath(MARKER).write_text("\njudge")  # noted, and not made yet
    write(tmp_path, 4, below="judge")
    assert sorted(os.listdir(tmp_path)) == ["step-2.tmp", "step-4"]


def test_a_save_that_is_given_up_leaves_no_folder_and_what_it_makes_is_noted_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    make = filesystem.make_folder

    def making(name: str, folder: int) -> None:
        if name == "judge":
            noted.append((tmp_path / "step-1.tmp" / MARKER).read_text().splitlines()[-1])
        make(name, folder)

    monkeypatch.setattr(filesystem, "make_folder", making)
    with CheckpointWriter(tmp_path, 1) as writer:
        writer.bytes("judge/adapter_config.json", b"{}")
        writer.bytes("judge/README.md", b"")
    assert noted == ["judge"] and os.listdir(tmp_path) == []


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    path = write(tmp_path, 1, below="judge")
    (path / "judge").rename(tmp_path / "elsewhere")
    (path / "judge").symlink_to(tmp_path / "elsewhere")
    assert "judge/adapter_config.json" in damages(path)[0]
    remove(tmp_path, "step-1")
    assert os.listdir(tmp_path / "elsewhere") == ["adapter_config.json"] and os.listdir(path) == ["judge"]


def test_what_is_no_checkpoint_is_not_removed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-2").symlink_to("step-1")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-1").rename(tmp_path / "step-4")
    before = sorted(tmp_path.rglob("*"))
    for name, message in (("step-2", "a link"), ("step-3", "manifest"), ("step-4", "the manifest of step 1")):
        with pytest.raises(ValueError, match=message):
            remove(tmp_path, name)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_removal_makes_it_no_checkpoint_first_and_its_manifest_goes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    gone: list[str] = []
    real = filesystem.unlink

    def unlink(name: str, folder: int) -> None:
        assert os.listdir(tmp_path) == ["step-1.gone"] and latest(tmp_path) is None
        gone.append(name)
        real(name, folder)

    monkeypatch.setattr(filesystem, "unlink", unlink)
    remove(tmp_path, "step-1")
    assert len(gone) == 4 and gone[-1] == "manifest.json" and os.listdir(tmp_path) == []


def test_two_may_remove_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    real: Any = filesystem.unlink
    calls: list[str] = []

    def unlink(name: str, folder: int) -> None:
        calls.append(name)
        if len(calls) == 1:
            remove(tmp_path, "step-1.gone")
            assert os.listdir(tmp_path) == []
        real(name, folder)

    monkeypatch.setattr(filesystem, "unlink", unlink)
    remove(tmp_path, "step-1")
    assert os.listdir(tmp_path) == []


def test_an_error_while_clearing_does_not_stop_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = unfinished(tmp_path, 1)
    real: Any = filesystem.unlink

    def unlink(name: str, folder: int) -> None:
        if name == "model.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(name, folder)

    monkeypatch.setattr(filesystem, "unlink", unlink)
    write(tmp_path, 2)
    assert sorted(os.listdir(path)) == [MARKER, "model.safetensors"]
