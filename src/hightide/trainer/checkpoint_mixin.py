"""Checkpoints of a Trainer; the rest of it is in mixin.py.

- A checkpoint is written beside training. `checkpoint-N` is there when all of it is; who looks at it in `on_save`, or
  uploads it, waits for it. Old ones are removed once it is there.
- What it loads into the model and the optimizer when it resumes comes after wrapping: nothing exists twice. The plan
  is that of the checkpoint, if it may be: see [Note: a plan goes on].
- Beside weights and states it has files as the Trainer itself writes them, taken at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from hightide.checkpoint.files.folder import refusal
from hightide.checkpoint.files.manifest import NAME
from hightide.checkpoint.files.names import trainer_name
from hightide.checkpoint.load import load
from hightide.checkpoint.save import save_for_trainer
from hightide.checkpoint.saving import Saving
from hightide.checkpoint.training import TRAINING, read_training
from hightide.data.buckets import INPUT_IDS
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of
from hightide.trainer.earlier_plan import extra_of
from hightide.trainer.first_batches import kept_generators

Base: Any = transformers.Trainer if TYPE_CHECKING else object


class CheckpointMixin(Base):
    model: Any
    optimizer: Any
    args: Any
    state: Any
    _saving: tuple[Saving, str] | None = None  # under way, and the folder in which old ones are removed
    _is_owed = False  # a model whose values are loaded after wrapping
    _resumes_from: str | None = None  # a checkpoint of ours, before the model is wrapped
    _asked: dict[str, Any] | None = None  # what the plan was made for; None: it is the user's

    @property
    def _run(self) -> Run | None:
        return run_of(self.model)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint that an interrupted run has begun is there before anybody looks for one to go on from."""
        self.finish_saving()
        return super().train(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self._run is None:
            return super()._save_checkpoint(model, trial)
        self.finish_saving()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        folder, step = self._get_output_dir(trial=trial), self.state.global_step
        best = self.state.best_global_step
        if best and (best == step or os.path.exists(os.path.join(folder, trainer_name(best)))):
            self.state.best_model_checkpoint = os.path.join(folder, trainer_name(best))
        optimizer = None if self.args.save_only_model else without_accelerate(self.optimizer)
        batches = self._run.batches
        extra = extra_of(self._asked, 0 if batches is None else batches.longest(INPUT_IDS))
        saving = save_for_trainer(self.model, optimizer, folder, step, files_of(self), extra, wait=False)
        self._saving = saving, folder
        if self.args.push_to_hub or any(map(_looks_at_checkpoints, self.callback_handler.callbacks)):
            self.finish_saving()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(saving.path))

    def finish_saving(self) -> None:
        """Waits until the checkpoint that was begun last is on the disk; raises if it could not be written."""
        if self._saving is None:
            return
        (saving, folder), self._saving = self._saving, None
        saving.wait()
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=folder,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._run is None or self.args.world_size == 1:
            super().save_model(output_dir, _internal_call)
            return
        values = self.model.state_dict()  # of all ranks, who all come here
        if self.args.should_save:
            self._save(output_dir, state_dict=values)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.finish_saving()
        return super()._finalize_training(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """After wrapping, where it is ours, or the model has no values so far."""
        if is_ours(resume_from_checkpoint):
            read_training(resume_from_checkpoint)  # one that is damaged is told before anybody plans
        has_values = not any(param.is_meta for param in self.model.parameters())
        self._resumes_from = resume_from_checkpoint if is_ours(resume_from_checkpoint) and self._run is None else None
        self._is_owed = not is_ours(resume_from_checkpoint) and self._run is None and not has_values
        if not is_ours(resume_from_checkpoint) and not self._is_owed:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not is_ours(checkpoint):
            if self._is_owed:
                self._load_from_checkpoint(checkpoint)
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        has_states = read_training(checkpoint).optimizer is not None
        with kept_generators():  # the Trainer has its own moment for them
            load(self.model, without_accelerate(self.optimizer) if has_states else None, checkpoint)
        scheduler = os.path.join(checkpoint, SCHEDULER_NAME)
        if has_states and os.path.isfile(scheduler):
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if not is_ours(best):
            super()._load_best_model()
            return
        with kept_generators():
            load(self.model, None, best)


def without_accelerate(optimizer: Any) -> Any:
    """Accelerate has put its own around it."""
    return getattr(optimizer, "optimizer", optimizer)


def _looks_at_checkpoints(callback: Any) -> bool:
    return type(callback).on_save is not TrainerCallback.on_save


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
