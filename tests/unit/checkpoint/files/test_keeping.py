"""The last few and every so many steps one stay; only checkpoints of ours go, and never the one just written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hightide.checkpoint.files import keeping
from hightide.checkpoint.files.folder import found, held, verify
from hightide.checkpoint.files.keeping import check_keeping, keep_only
from small_checkpoints import write


def steps(folder: Path) -> list[int]:
    return sorted(int(name.removeprefix("step-")) for name in os.listdir(folder) if name.startswith("step-"))


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [
        (None, None, [0, 5, 10, 15, 20, 25, 30]), (1, None, [30]), (3, None, [20, 25, 30]),
        (9, None, [0, 5, 10, 15, 20, 25, 30]), (1, 10, [0, 10, 20, 30]), (2, 15, [0, 15, 25, 30]), (2, 7, [0, 25, 30]),
    ],
)  # fmt: skip
def test_the_last_and_every_so_many(keep: int | None, every: int | None, left: list[int], tmp_path: Path) -> None:
    for step in range(0, 35, 5):
        write(tmp_path, step, numel=2)
    removed = keep_only(tmp_path, keep, every, written_step=30)
    assert steps(tmp_path) == left
    assert removed == [tmp_path / f"step-{step}" for step in range(0, 35, 5) if step not in left]


def test_the_one_just_written_stays_where_later_ones_are(tmp_path: Path) -> None:
    """A run that went back."""
    for step in (10, 40, 60, 20):
        write(tmp_path, step, numel=2)
    keep_only(tmp_path, 2, None, written_step=20)
    assert steps(tmp_path) == [20, 40, 60]


def test_those_that_are_not_whole_do_not_count(tmp_path: Path) -> None:
    for step in range(1, 7):
        write(tmp_path, step, numel=2)
    for step in (1, 5):
        os.truncate(tmp_path / f"step-{step}" / "model.safetensors", 3)
    keep_only(tmp_path, 2, None, written_step=6)
    assert steps(tmp_path) == [4, 5, 6]


def test_one_that_is_read_goes_after_a_later_save(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, numel=2)
    with held(tmp_path / "step-1"):
        assert keep_only(tmp_path, 1, None, written_step=3) == [tmp_path / "step-2"]
        verify(tmp_path / "step-1")
    assert keep_only(tmp_path, 1, None, written_step=3) == [tmp_path / "step-1"]


def test_one_that_another_process_has_removed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, numel=2)
    there = found(tmp_path)
    monkeypatch.setattr(keeping, "found", lambda _: there)
    shutil.rmtree(tmp_path / "step-1")
    assert keep_only(tmp_path, 1, None, written_step=3) == [tmp_path / "step-2"]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    for step in (1, 2, 9):
        write(tmp_path, step, numel=2)
    (tmp_path / "step-1").rename(tmp_path / "elsewhere")
    (tmp_path / "step-1").symlink_to("elsewhere")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-4").write_text("mine")
    (tmp_path / "step-02").mkdir()
    keep_only(tmp_path, 1, None, written_step=9)
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "step-02", "step-1", "step-3", "step-4", "step-9"]
    assert len(os.listdir(tmp_path / "elsewhere")) == 4


@pytest.mark.parametrize(("keep", "every"), [(0, None), (-1, None), (True, None), (1.5, None), (1, 0), (None, 3)])
def test_numbers_that_keep_nothing(keep: Any, every: Any) -> None:
    with pytest.raises(ValueError, match="keep"):
        check_keeping(keep, every)
