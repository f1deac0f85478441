"""AdamW on the host, as the cpu lane does it, on arrays that no cache holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hightide.ir.machine import UPDATE_BYTES
from hightide.optim.adam import AdamWHyper, AdamWRule
from hightide.optim.host_update import HostUpdate
from hightide.optim.operands import Operands, Part
from hightide.runtime.lanes.update_threads import UpdateThreads

HYPER = AdamWHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, maximize=False)
NOISE_NUMEL = 1 << 20

Allocate = Callable[[int, torch.dtype], Tensor]  # of so many elements


def update_arrays(numel: int, allocate: Allocate, param_dtype: torch.dtype = torch.bfloat16) -> Operands:
    """What one update reads and writes. All pages are touched. `param_dtype` of parameter and gradient: float32, where
    the master is the parameter, or bfloat16, where it is in two parts."""
    in_parts = param_dtype == torch.bfloat16
    first, second = (allocate(numel, torch.float32).zero_() for _ in range(2))
    master = None if in_parts else allocate(numel, torch.float32)
    remainder = allocate(numel, torch.int16).zero_() if in_parts else None
    grad = allocate(numel, param_dtype)
    param = allocate(numel, param_dtype) if in_parts else None
    noise = torch.randn(min(numel, NOISE_NUMEL))
    for start in range(0, numel, len(noise)):
        part = noise[: numel - start]
        for target in (master, grad, param):
            if target is not None:
                target[start : start + len(part)] = part
    return Operands(master, grad, (first, second), param, remainder)


class UpdateWork:
    """Updates all of the arrays at each call. Those of bf16 have UPDATE_BYTES per parameter, of which
    UPDATE_TRAFFIC_BYTES cross the memory: all are read, and all but the gradient written."""

    def __init__(
        self,
        operands: Operands,
        update_threads: UpdateThreads,
        kernel: str | None = None,
        tile_numel: int | None = None,
        part: Part = Part.WHOLE,
    ) -> None:
        self._operands, self._part = operands, part
        self._update = HostUpdate(AdamWRule(), update_threads, kernel, tile_numel)
        self.num_updates = 0

    @property
    def kernel(self) -> str:
        return self._update.kernel

    def __call__(self) -> int:
        self.num_updates += 1
        self._update.update(self._operands, self.num_updates, HYPER, part=self._part)
        return len(self._operands) * UPDATE_BYTES
