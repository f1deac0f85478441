"""Which checkpoint a folder stands for, and what is told of those that are passed over."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from hightide.checkpoint.choosing import chosen, latest
from small_checkpoints import write


def test_newer_ones_that_are_damaged_are_told(tmp_path: Path) -> None:
    """Who asks for the newest one to decide whether to begin anew must not do so without a word."""
    for step in (1, 2, 3):
        write(tmp_path, step, numel=2)
    (tmp_path / "step-9.tmp").mkdir()  # a save that was cut off is no loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(tmp_path) == tmp_path / "step-3"
    os.truncate(tmp_path / "step-3" / "model.safetensors", 5)
    with pytest.warns(UserWarning, match=r"step-3 is damaged: model.safetensors has 5 bytes.*step-2 is taken") as told:
        assert latest(tmp_path) == tmp_path / "step-2"
    assert len(told) == 1 and told[0].filename == __file__
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "manifest.json").unlink()
    with pytest.warns(UserWarning) as told:
        assert latest(tmp_path) is None
    assert len(told) == 3
    assert all("there is no whole checkpoint beside it" in str(one.message) for one in told)


def test_a_folder_above_names_the_one_that_has_some(tmp_path: Path) -> None:
    """As of a run of `hightide train`."""
    write(tmp_path / "run" / "checkpoints", 1, numel=2)
    (tmp_path / "run" / "another").mkdir()
    with pytest.raises(
        ValueError, match=r"no whole checkpoint in .*run; name the folder that has some, .*/checkpoints"
    ):
        chosen(tmp_path / "run")
    with pytest.raises(ValueError, match=r"name a folder in which hightide\.save has saved"):
        chosen(tmp_path)
