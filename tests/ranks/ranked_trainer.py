"""What ranks do in the tests of the Trainer: see started_ranks.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

import hightide
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
