"""A run that was ended and goes on is the run that was not: the same losses to the bit, every step once."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import hightide
from hightide import plan_again, wrapping
from hightide.checkpoint.files import filesystem
from hightide.checkpoint.training import read_training
from hightide.cli.main import app
from hightide.cli.train import training_run as train_module
from hightide.cli.train.readings import Moment, Readings
from hightide.cli.train.training_run import TrainingRun
from tiny_folders import tiny_folder

pytest.importorskip("transformers")

SETTINGS = f"""
name: tiny
device: cpu
steps: 9
log_every: 3
limits: {{gpu: 4MiB, host: 1GiB}}
micro_batch: 1
model: {{path: FOLDER, dtype: float32}}
data: {{sequences: 3, length: 16, path: {__file__}}}
optimizer: {{lr: 2e-3, warmup_steps: 3}}
save: {{every: 4}}
"""
DISK = "limits: {{gpu: 400KiB, host: 250KiB, disk: '{folder}:8MiB'}}"
ALWAYS_SAME = ("step", "loss", "lr", "grad_norm")


class Tiny:
    """A settings file, and the command on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "runs"
        self.settings = folder / "tiny.yaml"
        self.settings.write_text(SETTINGS.replace("FOLDER", str(tiny_folder())))

    def train(self, *options: str) -> Result:
        command = ["train", str(self.settings), "--out", str(self.out), *options]
        return CliRunner().invoke(app, command, env={"COLUMNS": "80"})

    def change(self, before: str, after: str) -> None:
        text = self.settings.read_text()
        assert before in text
        self.settings.write_text(text.replace(before, after))

    def run(self, number: int = 1) -> Path:
        return self.out / f"tiny-{number:03d}"

    def saved(self) -> list[str]:
        return sorted(path.name for path in (self.run() / "checkpoints").iterdir())

    def metrics(self, number: int = 1) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run(number) / "metrics.jsonl").read_text().splitlines()]


def same(metrics: list[dict[str, Any]]) -> list[list[Any]]:
    """What does not depend on the clock."""
    return [[line[key] for key in ALWAYS_SAME] for line in metrics]


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Without any checkpoint."""
    tiny = Tiny(tmp_path_factory.mktemp("uninterrupted"))
    tiny.change("save: {every: 4}", "")
    assert tiny.train().exit_code == 0
    assert not (tiny.run() / "checkpoints").exists() and not (tiny.run() / "lock").exists()
    return same(tiny.metrics())


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Signals that come in the middle of a step."""
    step = TrainingRun.step

    def arrange(at_step: int, *numbers: signal.Signals) -> None:
        def signalled(self: TrainingRun, number: int, *rest: Any) -> None:
            if number == at_step:
                for one in numbers:
                    signal.raise_signal(one)
            step(self, number, *rest)

        monkeypatch.setattr(TrainingRun, "step", signalled)

    return arrange


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was ended by SIGTERM in step 6."""
    tiny = Tiny(tmp_path_factory.mktemp("stopped"))
    with pytest.MonkeyPatch.context() as patch:
        step = TrainingRun.step

        def signalled(self: TrainingRun, number: int, *rest: Any) -> None:
            if number == 6:
                signal.raise_signal(signal.SIGTERM)
            step(self, number, *rest)

        patch.setattr(TrainingRun, "step", signalled)
        result = tiny.train()
    assert result.exit_code == 128 + signal.SIGTERM, result.output
    assert "interrupted after step 6 of 9\nstep 6 is saved: the same command resumes from there" in result.output
    lines = [
        line for line in result.output.splitlines() if re.match(r"step \d saved: .*iB in .* s, training waited", line)
    ]
    assert [line.split()[1] for line in lines] == ["4", "6"]
    return tiny.folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Tiny:
    """A copy of it."""
    shutil.copytree(stopped_once / "runs", tmp_path / "runs")
    return Tiny(tmp_path)


# -- the same run ------------------------------------------------------------------------------------------------------


def test_a_run_that_was_ended_goes_on_by_itself_and_is_the_one_that_was_not(
    stopped: Tiny, uninterrupted: list[list[Any]]
) -> None:
    assert stopped.saved() == ["step-4", "step-6"]
    assert len(stopped.metrics()) == 6
    result = stopped.train()
    assert result.exit_code == 0, result.output
    assert "resuming from step 6 of 9: " in result.output
    assert same(stopped.metrics()) == uninterrupted
    assert stopped.saved() == ["step-8", "step-9"]  # the newest two
    summary = json.loads((stopped.run() / "summary.json").read_text())
    assert summary["steps"] == 9 and summary["first_loss"] == uninterrupted[0][1]
    assert f"loss {uninterrupted[0][1]:.2f} -> {uninterrupted[-1][1]:.2f} in 9 steps" in result.output
    assert "saved 2 times, last at step 9; training waited " in result.output
    assert not stopped.run(2).exists()
    assert read_training(stopped.run() / "checkpoints" / "step-9").extra["loss"] == uninterrupted[-1][1]
    lines = [
        line for line in result.output.splitlines() if not line.startswith(("run folder", "resuming", "trained: "))
    ]
    assert all(len(line) <= 80 for line in lines)

    again = stopped.train()
    assert (
        again.exit_code == 0 and "nothing to do: " in again.output and "has done 9 steps, all of them" in again.output
    )
    fewer = stopped.train("--steps", "7")
    assert fewer.exit_code == 0 and "has done 9 steps, 7 asked for" in fewer.output
    assert same(stopped.metrics()) == uninterrupted and (stopped.run() / "summary.json").exists()


def test_a_run_may_become_longer_and_follows_the_curve_of_its_new_length(stopped: Tiny, tmp_path: Path) -> None:
    (tmp_path / "longer").mkdir()
    longer = Tiny(tmp_path / "longer")
    assert longer.train("--steps", "11").exit_code == 0
    assert stopped.train().exit_code == 0
    result = stopped.train("--steps", "11")
    assert result.exit_code == 0 and "resuming from step 9 of 11" in result.output
    lines, whole = stopped.metrics(), longer.metrics()
    assert [line["step"] for line in lines] == list(range(1, 12))
    assert [line["lr"] for line in lines[9:]] == [line["lr"] for line in whole[9:]]
    assert json.loads((stopped.run() / "summary.json").read_text())["steps"] == 11
    assert "11" in (stopped.run() / "config.yaml").read_text()


def test_a_disk_and_updates_in_backward_go_on_to_the_bit(tiny: Tiny, signals: Callable[..., None]) -> None:
    tiny.change("limits: {gpu: 4MiB, host: 1GiB}", DISK.format(folder=tiny.folder))
    tiny.change("warmup_steps: 3}", "warmup_steps: 3, clip_norm: 0}\nupdate: in_backward")
    whole = tiny.train("--no-resume", "--name", "whole")
    assert whole.exit_code == 0, whole.output
    signals(5, signal.SIGINT)
    assert tiny.train().exit_code == 130
    signals(0)
    result = tiny.train()
    assert result.exit_code == 0 and "resuming from step 5" in result.output
    lines = [json.loads(line) for line in (tiny.out / "whole-001" / "metrics.jsonl").read_text().splitlines()]
    assert same(tiny.metrics()) == same(lines)


def test_limits_and_other_places_may_change(stopped: Tiny, uninterrupted: list[list[Any]]) -> None:
    """With the same micro-batches the bits stay, under any plan."""
    stopped.change("gpu: 4MiB", "gpu: 380KiB")
    stopped.change("log_every: 3", "log_every: 1\ngradients: param")
    result = stopped.train()
    assert result.exit_code == 0, result.output
    assert "limits: accelerator 380 KiB" in result.output and same(stopped.metrics()) == uninterrupted


def test_a_plan_that_cannot_be_used_again_is_made_anew(
    stopped: Tiny, uninterrupted: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    searches, searched = [], wrapping._searched

    def counted(*args: Any) -> Any:
        searches.append(args)
        return searched(*args)

    def refuse(*_: Any) -> None:
        raise ValueError("too little")

    monkeypatch.setattr(wrapping, "_searched", counted)
    monkeypatch.setattr(plan_again, "check_still_fits", refuse)
    with pytest.warns(UserWarning, match="too little"):
        result = stopped.train()
    assert result.exit_code == 0, result.output
    assert len(searches) == 1
    assert same(stopped.metrics()) == uninterrupted


def test_a_plan_that_is_as_it_was_is_not_searched_for(
    stopped: Tiny, uninterrupted: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapping, "_searched", lambda *_: pytest.fail("a plan was searched for"))
    result = stopped.train()
    assert result.exit_code == 0, result.output
    assert same(stopped.metrics()) == uninterrupted


class LateMoment(Moment):
    """Passes when it was asked for a third time, as the work of a GPU does."""

    num_asked = 0

    def passed(self) -> bool:
        self.num_asked += 1
        return self.num_asked >= 3


def test_a_checkpoint_has_the_loss_of_its_step_although_losses_come_late(
    tiny: Tiny, uninterrupted: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "Readings", lambda device, **_: Readings(device, lambda: LateMoment(device)))
    assert tiny.train("--keep", "0").exit_code == 0
    assert tiny.saved() == ["step-4", "step-8", "step-9"]
    for step in (4, 8, 9):
        extra = read_training(tiny.run() / "checkpoints" / f"step-{step}").extra
        assert extra["loss"] == uninterrupted[step - 1][1]
        assert extra["train"]["losses"].tolist() == [line[1] for line in uninterrupted[:step]]


def test_every_mth_stays_beside_the_newest(tiny: Tiny) -> None:
    assert tiny.train("--save-every", "2", "--keep", "1", "--keep-every", "4").exit_code == 0
    assert tiny.saved() == ["step-4", "step-8", "step-9"]


def test_a_run_that_was_ended_before_its_summary_is_concluded(stopped: Tiny, uninterrupted: list[list[Any]]) -> None:
    assert stopped.train().exit_code == 0
    (stopped.run() / "summary.json").unlink()
    result = stopped.train()
    assert result.exit_code == 0, result.output
    assert json.loads((stopped.run() / "summary.json").read_text())["steps"] == 9
    assert same(stopped.metrics()) == uninterrupted


def test_steps_behind_the_checkpoint_are_done_again_and_lines_that_are_lost_are_told(
    stopped: Tiny, uninterrupted: list[list[Any]]
) -> None:
    shutil.copy(__file__, stopped.folder / "moved.py")
    stopped.change(__file__, str(stopped.folder / "moved.py"))  # the same text elsewhere
    lines = (stopped.run() / "metrics.jsonl").read_text().splitlines(keepends=True)
    later = json.dumps({"step": 7, "loss": 0.0}) + "\n"
    (stopped.run() / "metrics.jsonl").write_text("".join(lines[2:]) + later + later[:9])
    result = stopped.train()
    assert result.exit_code == 0 and "warning: metrics.jsonl lacks 2 of the first 6 steps" in result.output
    assert same(stopped.metrics()) == uninterrupted[2:]
    summary = json.loads((stopped.run() / "summary.json").read_text())
    assert summary["first_loss"] == uninterrupted[0][1]  # the checkpoint has them too


# -- another run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("steps: 9", "steps: 9\nseed: 1", "seed was 0 and is 1;"),
        ("dtype: float32", "dtype: bfloat16", "model.dtype was 'float32' and is 'bfloat16';"),
        (f"path: {__file__}", "path: text.txt", f"other data: data.path was '{__file__}' and is '"),
        ("save: {every: 4}", "", "nothing to resume: "),
    ],
    ids=["seed", "model", "text", "nothing there"],
)
def test_what_decides_about_the_values_must_be_as_it_was(stopped: Tiny, before: str, after: str, message: str) -> None:
    (stopped.folder / "text.txt").write_bytes(b"other " * 10_000)
    stopped.change(before, after.replace("path: text.txt", f"path: {stopped.folder / 'text.txt'}"))
    if not after:
        shutil.rmtree(stopped.out)
    held = sorted(stopped.folder.rglob("*"))
    result = stopped.train("--resume")
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert "--no-resume" in result.stderr or "leave --resume out" in result.stderr
    assert sorted(stopped.folder.rglob("*")) == held


def test_another_learning_rate_is_told_and_goes_on_along_its_own_curve(stopped: Tiny, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Tiny(tmp_path / "other")
    for one in (other, stopped):
        one.change("lr: 2e-3, warmup_steps: 3", "lr: 1e-2, warmup_steps: 3, weight_decay: 0.5, schedule: linear")
    groups: list[dict[str, Any]] = []
    begin = TrainingRun.begin

    def seen(self: TrainingRun, resumed: Any) -> None:
        begin(self, resumed)
        groups.extend(dict(group) for group in self.optimizer.param_groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "begin", seen)
        result = stopped.train()
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("resuming with changed settings: ")]
    assert lines == [
        "resuming with changed settings: optimizer.lr was 0.002 and is 0.01, "
        "optimizer.weight_decay was 0.01 and is 0.5, optimizer.schedule was 'cosine' and is 'linear'"
    ]
    assert [group["weight_decay"] for group in groups] == [0.5] * len(groups) and groups
    assert other.train().exit_code == 0
    rates = [line["lr"] for line in stopped.metrics()]
    assert rates[6:] == [line["lr"] for line in other.metrics()][6:]
    assert max(rates[:6]) == 2e-3  # of the steps before


def test_a_fresh_run_has_a_folder_of_its_own(stopped: Tiny, uninterrupted: list[list[Any]]) -> None:
    before = sorted(stopped.run().rglob("*"))
    result = stopped.train("--no-resume")
    assert result.exit_code == 0 and same(stopped.metrics(2)) == uninterrupted
    assert sorted(stopped.run().rglob("*")) == before
    stopped.run(3).mkdir()  # of a run that does not save
    assert "tiny-002 has done 9 steps" in stopped.train().output


def test_a_run_that_was_ended_before_its_first_save_begins_anew(tiny: Tiny, signals: Callable[..., None]) -> None:
    signals(2, signal.SIGINT, signal.SIGINT)
    assert tiny.train().exit_code == 130
    assert tiny.saved() == []
    assert tiny.train("--resume").exit_code == 2
    signals(0)
    assert tiny.train("--steps", "2").exit_code == 0 and tiny.run(2).exists()


# -- hostile folders ---------------------------------------------------------------------------------------------------


def test_two_runs_in_one_folder_are_refused(stopped: Tiny) -> None:
    script = (
        "import fcntl, os, sys; fcntl.lockf(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX); print(); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", script, str(stopped.run() / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        result = stopped.train()
    finally:
        holder.kill()
        holder.communicate()
    assert result.exit_code == 2 and f"another process trains in {stopped.run()}" in result.stderr
    assert stopped.saved() == ["step-4", "step-6"] and len(stopped.metrics()) == 6


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("file", ["model.safetensors", "training.json", "manifest.json", None])
def test_where_the_newest_is_damaged_the_one_before_is_taken(
    stopped: Tiny, file: str | None, uninterrupted: list[list[Any]]
) -> None:
    newest = stopped.run() / "checkpoints" / "step-6"
    if file is None:
        next(newest.glob("optimizer*")).unlink()
    else:
        flip(newest / file)
    result = stopped.train()
    assert result.exit_code == 0, result.output
    assert f"warning: {newest} is damaged: " in result.output and "resuming from step 4 of 9" in result.output
    assert same(stopped.metrics()) == uninterrupted


def test_where_none_is_whole_nothing_is_done(stopped: Tiny) -> None:
    for path in (stopped.run() / "checkpoints").iterdir():
        flip(path / "manifest.json")
    result = stopped.train()
    assert result.exit_code == 2
    newest = stopped.run() / "checkpoints" / "step-6"
    assert f"cannot resume {stopped.run()}: {newest} is damaged" in result.stderr and "--no-resume" in result.stderr
    assert len(stopped.metrics()) == 6 and not stopped.run(2).exists()


@pytest.mark.parametrize(
    "what", ["file", "link", "broken link", "metrics link", "settings link", "lock link", "summary folder"]
)
def test_what_was_put_in_the_place_of_ours_is_not_followed(stopped: Tiny, what: str) -> None:
    run, elsewhere = stopped.run(), stopped.folder / "elsewhere"
    elsewhere.write_text("mine")
    if what in ("file", "link", "broken link"):
        (run / "checkpoints").rename(stopped.folder / "moved")
    if what == "file":
        (run / "checkpoints").touch()
    elif what == "link":
        (run / "checkpoints").symlink_to(stopped.folder / "moved")
    elif what == "broken link":
        (run / "checkpoints").symlink_to("gone")
    elif what == "summary folder":
        (run / "summary.json").mkdir()
    else:
        name = {"metrics link": "metrics.jsonl", "settings link": "config.yaml", "lock link": "lock"}[what]
        (run / name).unlink()
        (run / name).symlink_to(elsewhere)
    result = stopped.train()
    assert result.exit_code in (2, 3), result.output
    assert result.stderr.startswith("error: ") and "fault of hightide" not in result.stderr
    assert elsewhere.read_text() == "mine" and not stopped.run(2).exists()


def test_checkpoints_of_others_are_refused(stopped: Tiny, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    shutil.rmtree(stopped.run() / "checkpoints")
    hightide.save(model, optimizer, stopped.run() / "checkpoints", step=7, wait=True)
    result = stopped.train()
    assert result.exit_code == 2 and "step-7: it was not saved by `hightide train`" in result.stderr
    assert not stopped.run(2).exists()


# -- saves that fail ---------------------------------------------------------------------------------------------------


def fill_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No room for the checkpoint of this name."""
    rename = filesystem.rename

    def failing(source: str, target: str, *rest: Any) -> None:
        if target == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, target, *rest)

    monkeypatch.setattr(filesystem, "rename", failing)


def test_a_save_that_fails_is_one_warning_and_training_goes_on(
    tiny: Tiny, uninterrupted: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, "step-4")
    result = tiny.train()
    assert result.exit_code == 0, result.output
    assert result.output.count("warning: step 4 is not saved (no step is): ") == 1
    assert "No space left on device" in result.output.replace("\n", " ")
    assert tiny.saved() == ["step-8", "step-9"] and same(tiny.metrics()) == uninterrupted
    assert "Traceback" not in result.output and "saved 2 times" in result.output


def test_a_last_step_that_cannot_be_saved_is_no_success(
    stopped: Tiny, uninterrupted: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fill_disk(patch, "step-9")
        result = stopped.train()
    assert result.exit_code == 3
    assert "warning: step 9 is not saved (step 8 is): " in result.stdout and "step 9, the last one" in result.stderr
    again = stopped.train()
    assert again.exit_code == 0 and "resuming from step 8 of 9" in again.output
    assert same(stopped.metrics()) == uninterrupted and stopped.saved() == ["step-8", "step-9"]


def test_a_save_that_fails_ends_the_run_where_that_is_asked_for(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch, "step-4")
    result = tiny.train("--on-save-error", "stop")
    assert result.exit_code == 3
    assert "error: step 4 is not saved (no step is): " in result.stderr
    assert tiny.saved() == [] and 4 <= len(tiny.metrics()) < 9
