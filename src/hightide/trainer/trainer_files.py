"""Files of a Trainer's checkpoint beside weights and states: as the Trainer itself writes them, taken at once."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState

from hightide.checkpoint.files.folder import refusal
from hightide.checkpoint.files.manifest import NAME
from hightide.checkpoint.training import TRAINING


def is_ours(checkpoint: str | Path) -> bool:
    """ValueError for one of ours that was copied in part: as one of the plain Trainer it would have weights alone, and
    training would begin anew with them."""
    path = Path(checkpoint)
    if not (path / NAME).is_file() and (path / TRAINING).is_file():
        raise refusal(path, f"it has no {NAME}")
    return (path / NAME).is_file()


def files_of(trainer: Any) -> dict[str, bytes]:
    """By name; of several ranks all call it, and what is in files of their own is among them."""
    with TemporaryDirectory() as folder:
        own = {} if trainer.args.save_only_model else _of_ranks(trainer, folder)
        if not trainer.args.should_save:
            return {}
        if not trainer.args.save_only_model:
            torch.save(trainer.lr_scheduler.state_dict(), Path(folder) / SCHEDULER_NAME)
            trainer._save_scaler(folder)
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(trainer.args, Path(folder) / TRAINING_ARGS_NAME)
        _note_callbacks(trainer)
        trainer.state.save_to_json(str(Path(folder) / TRAINER_STATE_NAME))
        found = (one for one in Path(folder).rglob("*") if one.is_file())  # tokenizers may have a folder of templates
        return own | {str(one.relative_to(folder)): one.read_bytes() for one in found}


def _of_ranks(trainer: Any, folder: str) -> dict[str, bytes]:
    """Random numbers, which each has for itself."""
    trainer._save_rng_state(folder)
    own = {one.name: one.read_bytes() for one in Path(folder).iterdir()}
    told: list[dict[str, bytes]] = [own] * trainer.args.world_size
    if trainer.args.world_size > 1:
        torch.distributed.all_gather_object(told, own)
    return {name: content for one in told for name, content in one.items()}


def _note_callbacks(trainer: Any) -> None:
    """The state of those that have one, into that of the trainer."""
    known = trainer.state.stateful_callbacks
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name = type(callback).__name__
            if isinstance(known[name], list):
                known[name].append(callback.state())
            else:
                known[name] = callback.state()
