"""What is told about a folder of checkpoints, whoever made it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hightide.checkpoint.files.writer import CheckpointWriter
from hightide.cli.main import app

FACTS = {"parameters": 8_030_261_248, "loss": 2.5, "plan": "24.0 GiB GPU, 96.0 GiB host, 4 samples"}


def save(folder: Path, step: int, facts: dict[str, Any] = FACTS) -> Path:
    with CheckpointWriter(folder, step) as writer:
        writer.bytes("model.safetensors", bytes(1000 * step))
        writer.bytes("training.json", b"{}")
        return writer.commit(facts)


def listed(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["checkpoints", str(folder), *options], env={"COLUMNS": "80"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (100, 20, 40):
        save(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run"


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_run_and_its_checkpoints_are_listed_by_step(run: Path, below: str) -> None:
    result = listed(run / below)
    assert result.exit_code == 0, result.output
    heading, *rows = result.stdout.splitlines()
    assert heading.split() == ["step", "loss", "size", "params", "age", "state", "plan"]
    assert [row.split()[0] for row in rows] == ["20", "40", "100"]
    assert rows[0].split()[1:5] == ["2.5", "19.5", "KiB", "8.03B"]
    assert all("  whole  24.0 GiB GPU, 96.0 GiB host, 4 samples" in row for row in rows)
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_one_checkpoint_is_listed_alone_under_any_name(run: Path) -> None:
    path = run / "checkpoints" / "step-40"
    _, row, *files = listed(path).stdout.splitlines()
    assert "whole" in row and [line.split()[-1] for line in files] == ["model.safetensors", "training.json"]
    path.rename(run / "good")
    row = listed(run / "good", "--verify").stdout.splitlines()[1]
    assert row.split()[0] == "40" and "verified" in row


def test_sums_are_checked_where_asked_and_a_damaged_piece_is_named(run: Path) -> None:
    file = run / "checkpoints" / "step-40" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[123] ^= 1
    file.write_bytes(content)
    assert listed(run).exit_code == 0  # sizes are right
    result = listed(run, "--verify")
    assert result.exit_code == 1
    assert [line.split()[7] for line in result.stdout.splitlines()[1:4]] == ["verified", "damaged", "verified"]
    assert "step-40: model.safetensors, piece 1 of 1" in result.stdout


@pytest.mark.parametrize("harm", ["short", "missing", "no manifest", "link", "pipe"])
def test_what_is_not_whole_is_told_without_reading_it(run: Path, harm: str) -> None:
    folder = run / "checkpoints" / "step-40"
    file = folder / "model.safetensors"
    if harm == "short":
        file.write_bytes(b"")
    elif harm == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        file.unlink()
    if harm == "link":
        file.symlink_to("/dev/zero")
    elif harm == "pipe":
        os.mkfifo(file)
    for options in ((), ("--verify",)):
        result = listed(run, *options)
        assert result.exit_code == 1
        assert "damaged" in result.stdout.splitlines()[2] and "step-40: " in result.stdout
    assert listed(folder).exit_code == 1


def test_an_unfinished_save_is_no_damage(run: Path) -> None:
    writer = CheckpointWriter(run / "checkpoints", 120)
    try:
        result = listed(run, "--verify")
    finally:
        writer.abandon()
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].split() == ["120", "-", "-", "-", "-", "unfinished", "-"]


def test_json_has_everything(run: Path) -> None:
    result = listed(run, "--verify", "--json")
    reports = json.loads(result.stdout)
    assert [report["step"] for report in reports] == [20, 40, 100]
    report = reports[2]
    assert report["path"] == str(run / "checkpoints" / "step-100")
    assert (report["state"], report["problems"], report["num_bytes"]) == ("verified", [], 100_002)
    assert (report["parameters"], report["loss"], report["plan"]) == tuple(FACTS.values())
    assert abs(report["time"] - time.time()) < 100
    assert [(file["name"], file["num_bytes"]) for file in report["files"]] == [
        ("model.safetensors", 100_000),
        ("training.json", 2),
    ]


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"parameters": "many", "loss": "low", "plan": 7},
        {"parameters": True, "loss": True, "plan": ["a"]},
        {"parameters": 10**30, "loss": 1e300, "plan": "\x1b[2J[red]" + "x" * 10_000},
        {"parameters": -1, "loss": -1.0, "plan": "[/]"},
        {"parameters": None, "loss": None, "plan": "line\nline"},
    ],
)
def test_facts_of_strangers_are_shown_in_short_or_not_at_all(tmp_path: Path, facts: dict[str, Any]) -> None:
    save(tmp_path, 20, facts)
    result = listed(tmp_path, "--verify")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout and len(result.stdout) < 1500
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert json.loads(listed(tmp_path, "--json").stdout)[0]["step"] == 20


@pytest.mark.parametrize(
    ("ago_s", "age"),
    [
        (0.0, "0 s"),
        (100.0, "100 s"),
        (150.0, "2 min"),
        (5 * 3600.0, "5 h"),
        (9e5, "10 d"),
        (-7300.0, "in 2 h"),
        (1e12, "11574074 d"),
    ],
)
def test_ages(run: Path, ago_s: float, age: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative one is of a clock that was set back."""
    now_s = time.time() + ago_s
    monkeypatch.setattr(time, "time", lambda: now_s)
    assert f" {age} " in listed(run / "checkpoints" / "step-20").stdout.splitlines()[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent", "does not exist"), ("file", "is no folder"), ("linked", "is a link"), ("gone", "is no folder")],
)
def test_what_is_no_folder_of_checkpoints_is_one_message(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "checkpoints").symlink_to(tmp_path)
    result = listed(tmp_path / name)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and message in result.stderr


def test_a_folder_of_runs_names_one_of_them(run: Path) -> None:
    result = listed(run.parent)
    assert (result.exit_code, result.stdout) == (0, f"no checkpoints in {run.parent}; name a run, such as {run}\n")


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    result = listed(tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"no checkpoints in {tmp_path}\n")
    assert json.loads(listed(tmp_path, "--json").stdout) == []
