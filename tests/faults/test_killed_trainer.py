"""examples/run_clm.py is killed, in a step and in a save, and goes on as if it had not been."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from started_ranks import StartedRanks

WITHIN_S = 100.0
LOGGED = ("loss", "grad_norm", "eval_loss", "learning_rate")
OPTIONS = [
    *("--max_steps", "6", "--save_steps", "2", "--logging_steps", "1", "--eval_strategy", "steps", "--eval_steps", "3"),
    *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--block_size", "32"),
    *("--max_train_samples", "40", "--max_eval_samples", "8", "--save_total_limit", "2", "--disable_tqdm", "True"),
]


@pytest.fixture(scope="module")
def runs() -> Iterator[StartedRanks]:
    started = StartedRanks("clm_runs", Path(__file__).parent, quick_end=True)
    yield started
    started.close()


def logged(runs: StartedRanks, folder: Path, model: Path, **options: Any) -> list[tuple[str, float]]:
    argv = [*OPTIONS, "--model_name_or_path", str(model), "--gpu", "4MiB"]
    (ended,) = runs.run("run", 1, WITHIN_S, folder=str(folder), argv=argv, **options)
    if options.get("kill"):
        assert ended.status == -signal.SIGKILL, ended.stderr
        return []
    return [(name, entry[name]) for entry in ended.result for name in LOGGED if name in entry]


@pytest.fixture(scope="module")
def straight(runs: StartedRanks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, float]]]:
    folder = tmp_path_factory.mktemp("straight")
    (ended,) = runs.run("tiny_model", 1, WITHIN_S, folder=str(folder / "model"))
    assert ended.status == 0, ended.stderr
    found = logged(runs, folder / "run", folder / "model")
    assert {name for name, _ in found} == set(LOGGED)
    return folder / "model", found


@pytest.mark.parametrize(
    ("kills", "there"),
    [
        (["rename 2", "step 5"], {"checkpoint-2"}),
        pytest.param(["step 1"], set(), marks=pytest.mark.long),
        pytest.param(["step 3", "rename 1", "rename 1"], set(), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_killed_and_resumed(
    kills: list[str], there: set[str], runs: StartedRanks, straight: tuple[Path, Any], tmp_path: Path
) -> None:
    model, expected = straight
    for kill in kills:
        logged(runs, tmp_path / "run", model, kill=kill)
    names = {one.name for one in (tmp_path / "run").glob("checkpoint-*") if not one.suffix}
    assert there <= names, "more are there only if they were written before the kill"
    assert logged(runs, tmp_path / "run", model) == expected
    assert sorted(one.name for one in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.long
def test_two_lines_taken_back(runs: StartedRanks, straight: tuple[Path, Any], tmp_path: Path) -> None:
    found = logged(runs, tmp_path / "run", straight[0], plain=True)
    for (name, value), (other, expected) in zip(found, straight[1], strict=True):
        assert name == other and value == pytest.approx(expected, rel=1e-5)
