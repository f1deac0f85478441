"""Another optimizer over the parameters of a wrapped model than the one that wrap returned: told by who calls, where an
operation is refused anyway. transformers' Trainer makes one if it is given a wrapped model alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import torch

from hightide.ir.refusal import Refused

_FOLDERS = (Path(__file__).parents[1], Path(torch.__file__).parent)  # of the runtime, and of torch
_BETWEEN = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
REFUSAL = (
    "step() of another {kind} than the optimizer that hightide.wrap returned, which has the states and updates the "
    "parameters where they are: use that one. With transformers' Trainer pass both, Trainer(model, ..., "
    "optimizers=(optimizer, None)); or pass the model to hightide.Trainer (or to a class MyTrainer("
    "hightide.TrainerMixin, Trainer)) before it is wrapped, which wraps it itself"
)


def refuse_other_optimizer() -> None:
    """Raises if what is about to be refused is done by an optimizer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.optim.Optimizer):
            raise Refused(REFUSAL.format(kind=type(caller).__name__))
        if not frame.f_code.co_filename.startswith(_BETWEEN):
            return
        frame = frame.f_back
