"""By what a checkpoint is known for one of this run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hightide.cli.train.config import (
    DataConfig,
    EvalConfig,
    LimitsConfig,
    ModelConfig,
    OptimizerConfig,
    SaveConfig,
    TrainConfig,
)
from hightide.cli.train.run_state import RunState, changes, deciding, difference, placing

SUMS = {"model": 7, "data": 8}
CONFIG = TrainConfig()


def state() -> RunState:
    losses = torch.tensor([3.5, 2.5], dtype=torch.float64)
    return RunState(deciding(CONFIG, SUMS), placing(CONFIG), losses, losses[:0], 1.5, {"taken": 32})


def test_a_state_comes_back_as_it_was() -> None:
    extra = state().to_extra()
    assert extra["loss"] == 2.5
    again = RunState.from_extra(extra, 2)
    assert again.losses.tolist() == [3.5, 2.5] and again.deciding == deciding(CONFIG, SUMS) and again.train_s == 1.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"losses": [3.5, 2.5]}, "its losses are"),
        ({"losses": torch.ones(2)}, "its losses are"),
        ({"light_shares": torch.ones(2, 2, dtype=torch.float64)}, "its light_shares are"),
        ({"losses": torch.ones(3, dtype=torch.float64)}, "is of step 2 and has 3 losses"),
        ({"train_s": "long"}, "its train_s is"),
        ({"train_s": float("nan")}, "its train_s is"),
        ({"more": 1}, "not saved by `hightide train`"),
    ],
)
def test_what_is_no_state_is_refused(change: dict[str, Any], message: str) -> None:
    extra = state().to_extra()
    extra["train"] |= change
    with pytest.raises(ValueError, match=message):
        RunState.from_extra(extra, 2)


@pytest.mark.parametrize("extra", [None, {}, [], {"train": None}, {"train": {}}, {"train": {"losses": 1}}])
def test_extra_of_other_programs_is_refused(extra: object) -> None:
    with pytest.raises(ValueError, match="not saved by `hightide train`"):
        RunState.from_extra(extra, 2)


def test_model_data_and_seed_decide_and_nothing_else_does() -> None:
    now = deciding(CONFIG, SUMS)
    for other in (
        replace(CONFIG, steps=7, out="elsewhere", name="other", log_every=1, device="cpu", micro_batch=1, compile=True),
        replace(CONFIG, limits=LimitsConfig(gpu="1GiB"), save=SaveConfig(every=3), resume=True),
        replace(CONFIG, data=DataConfig(path="/elsewhere"), calls=2),
        replace(CONFIG, model=ModelConfig(path="/there"), data=DataConfig(path="/elsewhere")),
        replace(CONFIG, data=DataConfig(date="2026-11-18"), optimizer=OptimizerConfig(lr=0.5, betas=(0.9, 0.99))),
    ):
        assert difference(deciding(other, SUMS), now) is None
    for other, message in (
        (replace(CONFIG, seed=3), "seed was 3 and is 0"),
        (replace(CONFIG, model=ModelConfig(layers=7)), "model.layers was 7 and is 6"),
        (replace(CONFIG, lora="8"), "lora was '8' and is None"),
        (replace(CONFIG, data=DataConfig(completions_only=True)), "data.completions_only was True and is False"),
        (replace(CONFIG, data=DataConfig(sequences=3)), "data.sequences was 3 and is 16"),
    ):
        assert difference(deciding(other, SUMS), now) == message


def test_other_data_and_models_are_told_by_their_settings_or_by_where_they_are() -> None:
    path = __file__
    config = replace(CONFIG, model=ModelConfig(path="hub/name"), data=DataConfig(path=path, column="a"))
    before = deciding(config, SUMS)
    sums = {"model": 7, "data": 9}

    def told(changed: TrainConfig, sums: dict[str, int] = sums, before: dict[str, Any] = before) -> str | None:
        return difference(before, deciding(changed, sums))

    assert told(config) == f"the data in {path} (or the model's tokenizer) changed since it was saved"
    other = replace(config, data=DataConfig(path="/no/such", column="b"), eval=EvalConfig(share=0.5))
    assert told(other) == (
        f"other data: data.path was '{path}' and is '/no/such', data.column was 'a' and is 'b', eval.share was None "
        "and is 0.5"
    )
    other = replace(config, model=ModelConfig(path="hub/other"))
    assert told(other, {"model": 9, "data": 8}) == "another model: model.path was 'hub/name' and is 'hub/other'"
    assert told(config, {"model": 9, "data": 8}) == "the model in hub/name changed since it was saved"
    older = {name: value for name, value in before.items() if name not in ("data.path", "data.column", "eval.share")}
    assert told(config, before=older) == told(config)  # of a time when paths were not noted
    assert told(config, SUMS, older) is None


def test_changed_optimizer_settings_are_told() -> None:
    other = replace(CONFIG, optimizer=OptimizerConfig(lr=0.5, betas=(0.9, 0.99)), steps=3)
    assert changes(deciding(CONFIG, SUMS), deciding(other, SUMS)) == [
        "optimizer.lr was None and is 0.5",
        "optimizer.betas was [0.9, 0.95] and is [0.9, 0.99]",
    ]
    assert changes(deciding(CONFIG, SUMS), deciding(CONFIG, SUMS)) == []


@pytest.mark.parametrize("before", [None, [], "text", {}, {"seed": 0, "\x1b[2J": 1}])
def test_settings_of_strangers_differ_in_words(before: object) -> None:
    text = difference(before, deciding(CONFIG, SUMS))
    assert text is not None and "\x1b" not in text and len(text) < 500


def test_limits_decide_about_the_plan() -> None:
    assert placing(CONFIG) == placing(replace(CONFIG, steps=7, seed=1, out="elsewhere"))
    assert placing(CONFIG) != placing(replace(CONFIG, limits=LimitsConfig(gpu="1GiB")))
    assert placing(CONFIG) != placing(replace(CONFIG, micro_batch=1))
    assert placing(CONFIG) != placing(CONFIG, 2)
