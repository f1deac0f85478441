"""`hightide.Trainer`: transformers' Trainer, for models that are bigger than the GPU."""

from __future__ import annotations

import transformers

from hightide.trainer.mixin import TrainerMixin


class Trainer(TrainerMixin, transformers.Trainer):
    __doc__ = TrainerMixin.__doc__
