"""Chat templates that write today's date: a run keeps the date on which it began."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hightide.cli.main import app
from hightide.cli.train import train_command
from tiny_folders import tiny_folder

pytest.importorskip("transformers")
from transformers.utils import chat_template_utils

TEMPLATE = (
    "{% set today = strftime_now('%d %b %Y') if strftime_now is defined else '?' %}{% macro said(turn) %}"
    "<{{ turn.role }} {{ strftime_now('%Y-%m-%d') }}>{{ turn.content }}{% endmacro %}"
    "Today: {{ today }}{% for message in messages %}{{ said(message) }}{% endfor %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(tiny_folder(), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    turns = [{"role": "user", "content": "high"}, {"role": "assistant", "content": "tide"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return tmp_path


def train(folder: Path, *options: str) -> Result:
    command = ["train", "--model", str(folder / "model"), "--data", str(folder / "chat.jsonl"), "--out", str(folder)]
    command += ["--dtype", "float32", "--length", "64", "--sequences", "1", "--save-every", "1", "--device", "cpu"]
    command += ["--gpu", "32MiB", "--host", "1GiB", *options]
    return CliRunner().invoke(app, command, env={"COLUMNS": "80"})


def pretend(patch: pytest.MonkeyPatch, day: int) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime(2026, 2, day, 23, 59)

    patch.setattr(train_command, "datetime", Clock)
    patch.setattr(chat_template_utils, "datetime", Clock)


def test_a_run_goes_on_after_midnight_with_the_data_of_the_day_it_began(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 3)
    assert train(folder, "--steps", "1").exit_code == 0
    assert "date: '2026-02-03'" in (folder / "train-001" / "config.yaml").read_text()
    pretend(monkeypatch, 4)
    again = train(folder, "--steps", "2")
    assert again.exit_code == 0 and "resuming from step 1 of 2" in again.output, again.output
    assert "date: '2026-02-03'" in (folder / "train-001" / "config.yaml").read_text()
    (folder / "dated.yaml").write_text("data: {date: 2026-02-04}\n")
    refused = train(folder, "--steps", "3", "--config", str(folder / "dated.yaml"))
    assert refused.exit_code == 2
    assert "other data: data.date was '2026-02-03' and is '2026-02-04'" in refused.stderr
    assert train(folder, "--no-resume", "--steps", "1").exit_code == 0
    assert "date: '2026-02-04'" in (folder / "train-002" / "config.yaml").read_text()
