"""What is in a folder: the newest whole one by number, and what is wrong with the others, file and piece."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hightide.checkpoint.choosing import latest
from hightide.checkpoint.files import folder, manifest
from hightide.checkpoint.files.folder import GoneCheckpoint, damages, found, held, newest_whole, verify
from small_checkpoints import write


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "PIECE_BYTES", 4096)


def test_order_is_by_number(tmp_path: Path) -> None:
    for step in (20, 100, 3):
        write(tmp_path, step)
    assert [one.step for one in found(tmp_path)] == [3, 20, 100]
    assert latest(tmp_path) == tmp_path / "step-100" and latest(str(tmp_path)) == tmp_path / "step-100"


def test_nothing_there(tmp_path: Path) -> None:
    assert latest(tmp_path) is None and latest(tmp_path / "nowhere") is None and found(tmp_path / "nowhere") == []
    tmp_path.joinpath("file").touch()
    with pytest.raises(ValueError, match="cannot be looked into"):
        latest(tmp_path / "file")


def test_what_is_found_says_why_it_is_not_whole(tmp_path: Path) -> None:
    for step in range(1, 8):
        write(tmp_path, step)
    os.truncate(tmp_path / "step-2" / "model.safetensors", 5)
    (tmp_path / "step-3" / "training.json").unlink()
    (tmp_path / "step-4" / "manifest.json").unlink()
    (tmp_path / "step-5").rename(tmp_path / "elsewhere")
    (tmp_path / "step-5").symlink_to("elsewhere")
    (tmp_path / "step-6" / "training.json").rename(tmp_path / "training.json")
    (tmp_path / "step-6" / "training.json").symlink_to("../training.json")
    (tmp_path / "step-7").rename(tmp_path / "step-8")
    (tmp_path / "step-9.tmp").mkdir()
    (tmp_path / "step-10.gone").mkdir()
    (tmp_path / "step-011").mkdir()
    problems = {one.step: one.problem for one in found(tmp_path)}
    assert problems.pop(1) is None
    for step, message in {
        2: "model.safetensors has 5 bytes, it must have 12",
        3: "training.json is missing",
        4: "manifest",
        5: "a link",
        6: "links are not followed",
        8: "the manifest of step 7",
        9: "a save that is under way",
        10: "a removal that is under way",
    }.items():
        assert message in str(problems.pop(step))
    assert not problems and newest_whole(tmp_path)[0] == tmp_path / "step-1"


def test_one_that_went_while_it_was_read_is_not_called_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    with (
        pytest.raises(GoneCheckpoint, match="step-1 was removed, or replaced by another save"),
        held(tmp_path / "step-1"),
    ):
        write(tmp_path, 1)
        raise ValueError("sums")
    with pytest.raises(GoneCheckpoint, match="step-2 was removed"), held(tmp_path / "step-2"):
        shutil.rmtree(tmp_path / "step-2")
        raise FileNotFoundError
    with pytest.raises(GoneCheckpoint), held(tmp_path / "step-2"):
        pytest.fail("it is not there")
    with pytest.raises(ValueError, match="sums"), held(tmp_path / "step-1"):
        raise ValueError("sums")


def test_what_a_save_renames_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is saved again is there at every moment, under one of two names."""
    write(tmp_path, 5)
    (tmp_path / "step-5").rename(tmp_path / "step-5.old")
    look_at = folder._look_at

    def rename(*args: Any) -> folder.Found:
        if (tmp_path / "step-5.old").exists():
            (tmp_path / "step-5.old").rename(tmp_path / "step-5")
        return look_at(*args)

    monkeypatch.setattr(folder, "_look_at", rename)
    assert [(one.path.name, one.is_whole) for one in found(tmp_path)] == [("step-5", True)]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 16
    path.write_bytes(data)


def test_a_changed_bit_names_its_file_and_piece_and_the_newest_whole_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    flip(tmp_path / "step-3" / "optimizer.safetensors", 5000)
    flip(tmp_path / "step-2" / "training.json", 3)
    assert latest(tmp_path) == tmp_path / "step-3"  # sizes do not tell
    assert newest_whole(tmp_path, verify=True)[0] == tmp_path / "step-1"
    with pytest.raises(ValueError) as raised:
        verify(tmp_path / "step-3")
    text = str(raised.value)
    assert "optimizer.safetensors, piece 2 of 4 (bytes 4096 to 8192) has the sum" in text
    assert f"the newest whole checkpoint is {tmp_path / 'step-1'}" in text
    with pytest.raises(ValueError, match=r"training\.json, piece 1 of 1"):
        verify(tmp_path / "step-2")


def test_all_that_is_damaged_is_listed_and_progress_told(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    counts: list[int] = []
    assert damages(path, counts.append) == [] and sum(counts) == verify(path).num_bytes
    for offset in (1, 9000):
        flip(path / "model.safetensors", offset)
    flip(path / "optimizer.safetensors", 4096)
    assert [text.split(" of")[0] for text in damages(path)] == [
        "model.safetensors, piece 1", "model.safetensors, piece 3", "optimizer.safetensors, piece 2",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"\(and 2 more\); there is no whole checkpoint beside it"):
        verify(path)


def test_other_damages(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    os.truncate(path / "model.safetensors", 4000)
    with pytest.raises(ValueError, match=r"model.safetensors has 4000 bytes, .*step-1"):
        verify(path)
    flip(path / "manifest.json", 40)
    with pytest.raises(ValueError, match=r"manifest.json.*the newest whole checkpoint is .*step-1"):
        verify(path)
    with pytest.raises(ValueError, match="no checkpoint"):
        verify(tmp_path / "step-3")
