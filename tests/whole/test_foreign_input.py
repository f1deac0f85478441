"""The command and files of strangers, or functions that misbehave: bad input is exit code 2, and one message."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hightide
import models
from forked import run_file
from hightide.cli import plan_command as plan_module
from hightide.cli.main import app
from hightide.cli.train.options import TrainOptions, load_config
from hightide.ir.plan import PLAN_VERSION, Plan
from unit.runtime.steps import adamw

SOURCE = """
import sys
import torch
from torch import nn

class Talking(nn.Module):
    def __init__(self, leave=False):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        self.leave = leave

    def forward(self, x):
        print("in forward")
        if self.leave:
            sys.exit(0)
        return self.layers(x).sum()

def talks():
    print("made")
    return Talking(), {"x": torch.randn(4, 8)}

def leaves():
    sys.exit(0)

def leaves_later():
    return Talking(leave=True), {"x": torch.randn(4, 8)}

def fails():
    return {}["absent"]
"""
LIMITS = ("--machine", "h200", "--gpu", "2GiB", "--host", "8GiB")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "ANSWER_S", 0.0)
    monkeypatch.setattr(plan_module, "HELP_S", 0.0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    return tmp_path / "mine.py"


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


# -- functions -----------------------------------------------------------------------------------------------------


def test_what_a_function_prints_is_not_in_the_answer(source: Path) -> None:
    result = run("plan", f"{source}:talks", *LIMITS, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["fits"]
    assert "made" in result.stderr and "in forward" in result.stderr


@pytest.mark.parametrize("target", ["mine.py:leaves", "mine.py:leaves_later", "leaving.py:any"])
@pytest.mark.parametrize("command", ["plan", "verify"])
def test_a_function_that_ends_the_program_is_no_answer(source: Path, target: str, command: str) -> None:
    result = run(command, source.parent / target, *(LIMITS if command == "plan" else ()))
    assert result.exit_code == 2, result.output
    assert "ended the program (sys.exit, 0)" in " ".join(result.stderr.split())


def test_the_traceback_is_of_the_function(source: Path) -> None:
    result = run("plan", f"{source}:fails", *LIMITS)
    assert result.exit_code == 2
    assert 'return {}["absent"]' in result.stderr and "workload.py" not in result.stderr
    assert "mine.py:fails raised KeyError: 'absent'" in result.stderr and "fault of hightide" not in result.stderr


# -- plans ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    model, batch = models.hand_written(num_layers=2)
    limits = hightide.Limits(gpu="90KiB", host="8MiB")
    hightide.plan(model, adamw(model), batch, limits=limits).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 2_000_000_000}, "2000000000 num_slots; at most 4096"),
        ({"num_grad_slots": 2_000_000_000}, "2000000000 num_grad_slots; at most 4096"),
        ({"num_state_buffers": 10**12}, "1000000000000 num_state_buffers"),
        ({"num_samples": 10**9, "micro_batch": 1}, "1000000000 micro-batches; at most 65536"),
        ({"num_samples": 10**18, "micro_batch": 10**18}, "samples; at most 2147483648"),
        ({"num_slots": 10**30}, "num_slots is"),
        ({"num_slots": 1e9}, "num_slots is 1000000000.0; it must be of type int"),
        ({"version": 2}, f"made by version 2, this is version {PLAN_VERSION}"),
        ({"version": 99}, f"made by version 99, this is version {PLAN_VERSION}"),
        ({"version": "\x1b[2J" + "x" * 10**6}, "made by version"),
        ({"explanation": "\x1b[2J"}, "without control characters"),
        ({"forecast": None}, "forecast must be a mapping"),
    ],
)
def test_plans_are_bounded_before_anything_is_made_of_them(
    plan_file: Path, changes: dict[str, object], message: str
) -> None:
    plan_file.write_text(json.dumps({**json.loads(plan_file.read_text()), **changes}))
    result = run("simulate", plan_file, "--machine", "h200")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert len(result.output) < 2000 and "\x1b" not in result.output


@pytest.mark.parametrize(
    ("where", "field", "value"),
    [
        ("params", "dtype", "complex64"),
        ("params", "names", []),
        ("params", "shape", [2**40, 2**40]),
        ("blocks", "index", 7),
        ("blocks", "params", ["absent"]),
        ("blocks", "params", []),
        ("calls", "block", 99),
        ("calls", "kind", 10**9),
        ("calls", "outputs", {"fixed": -1, "per_sample": 0}),
    ],
)
def test_a_profile_that_is_of_no_model(plan_file: Path, where: str, field: str, value: object) -> None:
    data = json.loads(plan_file.read_text())
    data["profile"][where][0][field] = value
    plan_file.write_text(json.dumps(data))
    result = run("simulate", plan_file, "--machine", "h200")
    assert result.exit_code == 2, result.output


def test_a_plan_with_too_many_slots_is_refused_by_wrap(plan_file: Path) -> None:
    plan_file.write_text(json.dumps({**json.loads(plan_file.read_text()), "num_slots": 2_000_000_000}))
    model, batch = models.hand_written(num_layers=2)
    with pytest.raises(ValueError, match="2000000000 num_slots"):
        hightide.wrap(model, adamw(model), batch, plan=Plan.load(plan_file))


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: &a [x, x]\nb: [*a, *a]\n", "line 2: an alias"),
        (b"name: &a {b: *a}\n", "an alias"),
        (b"[" * 60_000, "nested deeper"),
        (b"{a: " * 400 + b"1" + b"}" * 400, "nested deeper|not YAML"),
        (b"name: \xff", "not UTF-8"),
        (b"name: 'a\0b'", "not YAML"),
        (b'name: "\\e[31m"', "settings.yaml: name is|names a folder"),
        (b'out: "\\e[31m"', "without control characters"),
        (b"name: !!python/object/apply:os.system [true]", "not YAML"),
        (b"name: !!timestamp 2001-99-99", "not YAML"),
        (b"steps: " + b"9" * 5000, "not YAML"),
        (b"steps: " + b"9" * 400, "an integer of"),
        (b"steps: " + b"1:" * 30_000 + b"1", "steps is"),
        (b"? [a, b]\n: 1", "not YAML"),
        (b"optimizer: {lr: 1e999}", "lr is inf; it must be finite"),
        (b"optimizer: {lr: -1}", "lr=-1.0 must be at least 0"),
        (b"optimizer: {betas: [1.0, 2.0]}", "betas"),
        (b"model: {layers: 1000000000}", "layers=1000000000 must be at most 2048"),
        (b"model: {hidden: 1000000000000}", "hidden=1000000000000 must be at most"),
        (b"data: {sequences: 1000000000}", "must be at most"),
        (b"sample: {tokens: 1000000000000}", "must be at most"),
        (b"limits: {gpu: 1e999GiB}", "is not a size"),
        (b"name: 1e5/x", "name='1e5/x' names a folder"),
        (b"limits: {gpu: '" + b"9" * 400 + b"GiB'}", "must be at most"),
        (b"seed: -1", "seed=-1 must be at least 0"),
        (b"x" * 300_000, "has 300000 bytes; one may have 65536"),
    ],
)
def test_settings_that_are_none(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "settings.yaml").write_bytes(data)
    with pytest.raises(ValueError, match=message) as refused:
        load_config(tmp_path / "settings.yaml", TrainOptions())
    assert len(str(refused.value)) < 3000


def test_a_pipe_as_settings_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "settings.yaml")
    result = run("train", tmp_path / "settings.yaml")
    assert result.exit_code == 2 and "no regular file" in result.output


def test_too_many_tokens_are_not_made() -> None:
    result = run("plan", "tiny", "--sequences", 10**12, *LIMITS)
    assert result.exit_code == 2 and "are more than 268435456 tokens" in " ".join(result.output.split())


# -- all of it -----------------------------------------------------------------------------------------------------


def test_damaged_files_are_refused_or_read_as_they_are() -> None:
    """A little of what `bench/bad_files.py` does at length."""
    repository = Path(__file__).parents[2]
    done = run_file(repository, "bench/bad_files.py", "--seed", "11", "--count", "15")
    assert done.status == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "15 files" in done.stdout
