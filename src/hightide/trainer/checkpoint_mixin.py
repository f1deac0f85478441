"""Checkpoints of a Trainer; the rest of it is in mixin.py.

- A checkpoint is written beside training. `checkpoint-N` is there when all of it is; who looks at it in `on_save`, or
  uploads it, waits for it. Old ones are removed once it is there.
- What it loads into the model and the optimizer when it resumes comes after wrapping: nothing exists twice. The plan
  is that of the checkpoint, if it may be: see [Note: a plan goes on].
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from hightide.checkpoint.files.names import trainer_name
from hightide.checkpoint.load import load
from hightide.checkpoint.save import save_for_trainer
from hightide.checkpoint.saving import Saving
from hightide.checkpoint.training import read_training
from hightide.data.buckets import INPUT_IDS
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of
from hightide.trainer.earlier_plan import extra_of
from hightide.trainer.first_batches import kept_generators
from hightide.trainer.trainer_files import files_of, is_ours

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
