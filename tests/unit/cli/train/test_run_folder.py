"""A run never writes into another run's folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hightide.cli.train.config import TrainConfig
from hightide.cli.train.options import TrainOptions, load_config
from hightide.cli.train.run_folder import RunFolder, check_place


def test_folders_are_numbered_per_name_and_gaps_are_not_refilled(tmp_path: Path) -> None:
    config = TrainConfig(out=str(tmp_path / "runs"), name="demo")
    names = []
    for _ in range(2):
        with RunFolder(config) as folder:
            names.append(folder.path.name)
    (tmp_path / "runs" / "demo-041").mkdir()
    (tmp_path / "runs" / "demo-notes").mkdir()
    with RunFolder(config) as folder:
        names.append(folder.path.name)
    with RunFolder(replace(config, name="other")) as folder:
        names.append(folder.path.name)
    assert names == ["demo-001", "demo-002", "demo-042", "other-001"]


def test_metrics_are_on_disk_after_each_line_and_settings_read_back(tmp_path: Path) -> None:
    config = TrainConfig(out=str(tmp_path), steps=3)
    with RunFolder(config) as folder:
        for step in (1, 2):
            folder.log({"step": step, "loss": 1.5})
            lines = folder.metrics_path.read_text().splitlines()  # still open: a killed run keeps its metrics
            assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))
    assert load_config(folder.path / "config.yaml", TrainOptions()) == config


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot create the run folder .*file.*choose another --out"):
        RunFolder(TrainConfig(out=str(tmp_path / "file")))


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        ("dangling", "link to nothing"),
        ("dangling/below", "link to nothing|No such file|File exists|is no folder"),
        ("loop", "symbolic links|link to nothing"),
        ("file", "is no folder"),
        ("file/below", "Not a directory"),
        ("n" * 300, "too long"),
        ("nul\0", "null"),
    ],
)
def test_an_output_that_cannot_be_is_refused_at_once(
    out: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"cannot create the run folder .*({problem}).*choose another --out"):
        RunFolder(TrainConfig(out=out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "loop"]


@pytest.mark.parametrize("out", ["dangling/below", "file", "file/below"])
def test_an_output_that_cannot_be_is_known_before_a_model_is_read(out: str, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "file").touch()
    check_place(tmp_path / "new" / "deeper")
    with pytest.raises(ValueError, match=r"cannot create the run folder in .*(dangling|file): it is .*another --out"):
        check_place(tmp_path / out)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_known_before_a_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(ValueError, match=r"cannot be written; choose another --out"):
        check_place(tmp_path / "new")


def test_what_else_is_in_the_folder_stays_and_names_are_no_patterns(tmp_path: Path) -> None:
    (tmp_path / "foreign.txt").write_text("mine")
    (tmp_path / "demo-001").symlink_to("gone")
    (tmp_path / "xdemo-007").mkdir()
    with RunFolder(TrainConfig(out=str(tmp_path), name="demo")) as folder:
        assert folder.path.name == "demo-002"
    assert (tmp_path / "foreign.txt").read_text() == "mine"
