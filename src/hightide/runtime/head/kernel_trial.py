"""Kernels of our own: launched where their tensors are, and tried before they are used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hightide.process.system import KERNELS_SWITCH


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def passes(which: str, device: torch.device, attempt: Callable[[], str | None]) -> bool:
    """Whether an attempt, which says what was wrong, finds nothing. It may wait for the GPU. Else torch's operations
    are to be used, and the user is told."""
    waiting = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if waiting:
        torch.cuda.set_sync_debug_mode(0)
    try:
        problem = attempt()
    except Exception as failure:  # whatever a compiler may raise: there is another way
        problem = f"{type(failure).__name__}: {failure}"
    finally:
        if waiting:
            torch.cuda.set_sync_debug_mode(waiting)
    if problem is not None:
        warnings.warn(
            f"the Triton kernels {which} are not used on {device} ({problem}); torch's operations are: slower, same "
            f"results. {KERNELS_SWITCH}=0 silences this",
            RuntimeWarning,
            stacklevel=3,
        )
    return problem is None
