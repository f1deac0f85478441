"""What ranks do in the tests of the Trainer: see started_ranks.py."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

import hightide
from hightide import plan_again, wrapping
from trainers import arguments, data, full, logs

torch.set_num_threads(1)


def train(
    rank: int, world: int, folder: str, wrapped: bool, lengths: list[int], given: dict[str, Any], **options: Any
) -> Any:
    kind: Any = hightide.Trainer if wrapped else transformers.Trainer
    trainer = kind(full(), arguments(Path(folder), **options), **data(lengths), **given)
    trainer.train()
    calls = trainer._calls if wrapped else None
    weights = trainer.model.state_dict()
    if wrapped:
        assert trainer.model_wrapped is trainer.model, "no DDP"
    return {
        "logs": logs(trainer),
        "calls": calls,
        "weights": {name: value.double().sum().item() for name, value in weights.items()} if rank == 0 else None,
    }


def resume(
    rank: int, world: int, folder: str, wrapped: bool, lengths: list[int], given: dict[str, Any], **options: Any
) -> Any:
    """Trains in one go, then once more from the middle."""
    made = []
    for name in ("straight", "resumed"):
        where = Path(folder) / name
        if name == "resumed" and rank == 0:
            shutil.copytree(Path(folder) / "straight" / "checkpoint-2", where / "checkpoint-2")
        torch.distributed.barrier() if torch.distributed.is_initialized() else None
        trainer = hightide.Trainer(full(), arguments(where, **options), **data(lengths), **given)
        trainer.train(resume_from_checkpoint=name == "resumed")
        trainer.save_model()
        made.append(logs(trainer))
        hightide.unwrap(trainer.model)
    return made


def resume_plans(rank: int, world: int, folder: str, refuses: int | None, given: dict[str, Any], **options: Any) -> Any:
    """Trains, then once more from the middle, where rank `refuses` finds no room for the plan. Returns the plans of
    both, how often this rank has searched the second time, and what it warned of."""

    def full_up(*_: Any) -> None:
        raise ValueError("no room")

    digests, searches, search = [], [], wrapping._searched
    wrapping._searched = lambda *args: searches.append(rank) or search(*args)
    for name in ("checkpoint-2", None):
        if name is None and rank == refuses:
            plan_again.check_still_fits = full_up
        where = Path(folder) / ("second" if name is None else "first")
        if name is None and rank == 0:
            shutil.copytree(Path(folder) / "first" / "checkpoint-2", where / "checkpoint-2")
        torch.distributed.barrier() if torch.distributed.is_initialized() else None
        searches.clear()
        trainer = hightide.Trainer(full(), arguments(where, **options), **data(), **given)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.train(resume_from_checkpoint=name is None)
        digests.append(hightide.stats(trainer.model).plan.digest)
        hightide.unwrap(trainer.model)
    lines = [str(one.message) for one in told if "another is made" in str(one.message)]
    return {"digests": digests, "searches": len(searches), "told": lines}
