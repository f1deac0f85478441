"""What reports of a run are given by hightide.Trainer: what they are given by transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from trainers import assert_same_scalars, plain_trainer, shown_scalars, trainer
from trainers import fresh_accelerate as fresh


@pytest.fixture(autouse=True)
def _fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with fresh():
        yield


class Noted(transformers.TrainerCallback):
    """Each event with its step; of a log, its names and the types of its values."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.events.append((state.global_step, {name: type(value).__name__ for name, value in logs.items()}))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.events.append(("begins", args.to_json_string() != "", model.config.to_json_string()))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.events.append((state.global_step, sorted(metrics)))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append((state.global_step, state.max_steps))


def test_callbacks_are_given_what_those_of_the_plain_trainer_are(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_steps": 4, "eval_steps": 2, "logging_steps": 2}
    plain, wrapped = plain_trainer(tmp_path / "plain", **options), trainer(tmp_path / "wrapped", **options)
    notes = [Noted(), Noted()]
    for one, note in zip((plain, wrapped), notes, strict=True):
        one.add_callback(note)
        one.train()
    assert notes[1].events == notes[0].events
    logged = [event[1] for event in notes[0].events if isinstance(event[1], dict)]
    assert any("train_runtime" in one for one in logged) and any("loss" in one for one in logged)


def test_tensorboard_shows_what_it_shows_of_the_plain_trainer(tmp_path: Path) -> None:
    """CI has none; on the GPU machine tests/gpu/test_cuda_trainer_mixin.py asks the same."""
    pytest.importorskip("tensorboard")
    options = {"report_to": "tensorboard", "max_steps": 4, "eval_steps": 2}
    plain_trainer(tmp_path / "plain", **options).train()
    trainer(tmp_path / "wrapped", **options).train()
    assert_same_scalars(shown_scalars(tmp_path / "wrapped"), shown_scalars(tmp_path / "plain"))


@pytest.mark.long
def test_a_learning_rate_that_was_changed_before_it_resumes_counts_as_in_the_plain_trainer(tmp_path: Path) -> None:
    """Which takes it from the checkpoint."""
    first = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "eval_strategy": "no"}
    rates = []
    for make, name in ((plain_trainer, "plain"), (trainer, "wrapped")):
        make(tmp_path / name, **first).train()
        again = make(tmp_path / name, **{**first, "max_steps": 4, "learning_rate": 1e-4, "weight_decay": 0.5})
        again.train(resume_from_checkpoint=True)
        rates.append([entry["learning_rate"] for entry in again.state.log_history if "learning_rate" in entry])
    assert rates[1] == rates[0] and len(rates[0]) == 4
