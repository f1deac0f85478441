"""hightide.Trainer that has nothing to train on evaluates as transformers' own, with a model that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from harness import assert_close_weights
from test_trainer_mixin import ReadOn

import hightide
import models
from trainers import LENGTHS, assert_same_logs, data, fresh_accelerate, logs, plain_trainer, rows, trainer

SMALL = hightide.Limits(gpu="120KiB", host="64MiB")  # of a model of 160 KiB


def deep() -> Any:
    return models.llama(num_layers=5)[0]


def adapted() -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(deep(), config)


LABELS = {"label_names": ["labels"]}


@pytest.fixture(autouse=True)
def _fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with fresh_accelerate():
        yield


def mean(found: Any) -> dict[str, float]:
    return {"mean": float(abs(found.predictions).mean())}


def both(folder: Path, build: Any = deep, limits: Any = SMALL, **options: Any) -> tuple[Any, Any]:
    """Plain and wrapped, without a training dataset."""
    plain = plain_trainer(folder / "plain", build, LENGTHS, **options)
    wrapped = trainer(folder / "wrapped", build, LENGTHS, given={"limits": limits}, **options)
    for one in (plain, wrapped):
        one.train_dataset, one.compute_metrics = None, mean
    return plain, wrapped


def assert_same_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    timed = ("runtime", "per_second", "preparation_time")
    kept = {name: value for name, value in expected.items() if not name.endswith(timed)}
    assert {name for name in found if not name.endswith(timed)} == kept.keys() and len(kept) > 1
    for name, value in kept.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("build", [deep, pytest.param(adapted, marks=pytest.mark.long)])
def test_it_evaluates_predicts_and_trains_later_as_the_plain_one(build: Any, tmp_path: Path) -> None:
    plain, wrapped = both(tmp_path, build, eval_accumulation_steps=1, max_steps=2, eval_strategy="no", **LABELS)
    assert sum(param.nbytes for param in wrapped.model.parameters()) > SMALL.gpu_bytes
    trained = [name for name, param in wrapped.model.named_parameters() if param.requires_grad]
    for _ in range(2):
        assert_same_metrics(wrapped.evaluate(), plain.evaluate())
    sets = {"short": rows(3, 7), "long": rows(5, 9)}
    assert_same_metrics(wrapped.evaluate(sets), plain.evaluate(sets))
    found, expected = wrapped.predict(rows(5, 50)), plain.predict(rows(5, 50))
    assert abs(found.predictions - expected.predictions).max() < 1e-5 and found.label_ids.shape == (5, 10)
    bare = [{"input_ids": row["input_ids"], "labels": None} for row in rows(4, 60)]
    for one in (plain, wrapped):
        one.data_collator = lambda some: {"input_ids": torch.stack([row["input_ids"] for row in some])}
    assert abs(wrapped.predict(bare).predictions - plain.predict(bare).predictions).max() < 1e-5
    assert hightide.stats(wrapped.model).peak_bytes["gpu"] <= SMALL.gpu_bytes
    collate = data()["data_collator"]
    for one in (plain, wrapped):
        one.train_dataset, one.data_collator = rows(24, 1), collate
    wrapped._wrap_options["limits"] = hightide.Limits(gpu="300KiB", host="64MiB")
    plain.train()
    wrapped.train()
    assert [name for name, param in wrapped.model.named_parameters() if param.requires_grad] == trained
    assert_same_logs(logs(wrapped), logs(plain))
    assert_close_weights(plain.model.state_dict(), wrapped.model.state_dict())


def test_nothing_is_missing_from_a_stream_that_is_evaluated(tmp_path: Path) -> None:
    plain, wrapped = both(tmp_path, **LABELS)
    for one in (plain, wrapped):
        one.eval_dataset = ReadOn()
    found, expected = wrapped.evaluate(), plain.evaluate()
    assert_same_metrics(found, expected)
    assert found["eval_samples_per_second"] and wrapped.eval_dataset.__class__ is ReadOn


def test_a_model_that_was_never_loaded_is_evaluated(tmp_path: Path) -> None:
    deep().save_pretrained(tmp_path / "model")
    plain = plain_trainer(tmp_path / "plain", deep, LENGTHS)
    given = {"limits": SMALL, "train_dataset": None, "compute_metrics": mean}
    wrapped = trainer(tmp_path / "wrapped", lambda: hightide.from_pretrained(tmp_path / "model"), LENGTHS, given=given)
    plain.compute_metrics = mean
    assert_same_metrics(wrapped.evaluate(), plain.evaluate())


def test_what_cannot_be_evaluated_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    _, wrapped = both(tmp_path, limits=hightide.Limits(gpu="2KiB", host="64MiB"))
    with pytest.raises(ValueError, match="no plan fits 2048 bytes"):
        wrapped.evaluate()
    assert all(param.requires_grad for param in wrapped.model.parameters()) and wrapped.model.training
    wrapped.eval_dataset = []
    with pytest.raises(ValueError, match="the evaluation dataset gives no batch"):
        wrapped.evaluate()
