"""Code that torch.compile is to leave alone, with whatever it calls."""

from __future__ import annotations

from typing import Any

import torch

_eval_frame: Any = torch._C._dynamo.eval_frame
CAN_BE_LEFT_ALONE = hasattr(_eval_frame, "set_code_exec_strategy")


def leave_alone(function: Any) -> None:
    """As torch.compiler.disable, but the function stays as it is: nothing is wrapped around it that takes time in each
    call, and torch's compiler need not be imported, which takes a second."""
    if CAN_BE_LEFT_ALONE:
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
