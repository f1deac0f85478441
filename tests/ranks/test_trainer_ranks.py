"""Several ranks with hightide.Trainer train as transformers' own Trainer does with DDP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from started_ranks import StartedRanks

WITHIN_S = 100.0


@pytest.fixture(scope="module")
def started_trainers() -> Iterator[StartedRanks]:
    ranks = StartedRanks("ranked_trainer", Path(__file__).parent, quick_end=True)
    yield ranks
    ranks.close()


def trained(started: StartedRanks, folder: Path, wrapped: bool, **options: Any) -> list[Any]:
    given = (
        {"limits": {"gpu": "400KiB", "host": "64MiB"}, "lengths": [6, 10], **options.pop("given", {})}
        if wrapped
        else {}
    )
    folder = folder / str(wrapped)
    options = {"lengths": [10, 6, 3, 8], **options}
    ranks = started.run("train", 2, WITHIN_S, folder=str(folder), wrapped=wrapped, given=given, **options)
    return [rank.result for rank in ranks]


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
        pytest.param({"average_tokens_across_devices": False}, marks=pytest.mark.long),
        pytest.param({"max_grad_norm": 0.0, "given": {"update": "in_backward"}}, marks=pytest.mark.long),
        pytest.param(
            {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 4}, marks=pytest.mark.long
        ),
    ],
    ids=["accumulated and clipped", "tokens of each rank", "in backward", "epochs that end early"],
)
def test_ranks_train_as_with_ddp(options: dict[str, Any], started_trainers: StartedRanks, tmp_path: Path) -> None:
    expected = trained(
        started_trainers, tmp_path, False, **{key: one for key, one in options.items() if key != "given"}
    )
    found = trained(started_trainers, tmp_path, True, **options)
    assert found[0]["calls"] is not None
    for one, other in zip(found, expected, strict=True):
        assert [name for name, _ in one["logs"]] == [name for name, _ in other["logs"]]
        for (name, value), (_, plain) in zip(one["logs"], other["logs"], strict=True):
            assert value == pytest.approx(plain, rel=1e-5), name
    for name, value in expected[0]["weights"].items():
        assert found[0]["weights"][name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


def test_checkpoints(started_trainers: StartedRanks, tmp_path: Path) -> None:
    """Written by all ranks together, with the random numbers of each; a run that goes on has the losses of one that
    never stopped."""
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": 4, "eval_steps": 2}
    given = {"limits": {"gpu": "400KiB", "host": "64MiB"}, "lengths": 10}
    arguments = {"folder": str(tmp_path), "wrapped": True, "lengths": [10, 6, 3, 8], "given": given, **options}
    for rank in started_trainers.run("resume", 2, WITHIN_S, **arguments):
        straight, resumed = rank.result
        assert len(straight) > 8 and resumed == straight
    names = {one.name for one in (tmp_path / "resumed" / "checkpoint-4").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json", "scheduler.pt", "manifest.json"} <= names
    found = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / one) for one in ("straight", "resumed")]
    for one, other in zip(*(model.parameters() for model in found), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("refuses", [None, 0, 1])
def test_the_plan_of_a_checkpoint(refuses: int | None, started_trainers: StartedRanks, tmp_path: Path) -> None:
    """All ranks go on with it, or none does, and the first one says why."""
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "eval_strategy": "no"}
    given = {"limits": {"gpu": "400KiB", "host": "64MiB"}}
    ranks = started_trainers.run(
        "resume_plans", 2, WITHIN_S, folder=str(tmp_path), refuses=refuses, given=given, **options
    )
    first, second = (rank.result for rank in ranks)
    assert first["digests"] == second["digests"]
    assert first["searches"] == (refuses is not None) and not second["searches"] and not second["told"]
    assert len(first["told"]) == (refuses is not None) and all("no room" in line for line in first["told"])
    if refuses is None:
        assert first["digests"][0] == first["digests"][1]
