"""AdamW on the host, as the cpu lane does it, on arrays that no cache holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hightide.ir.machine import UPDATE_BYTES
from hightide.optim.adam import AdamWHyper, AdamWRule
from hightide.optim.host import HostUpdate
from hightide.optim.operands import Operands
from hightide.runtime.sharing import Sharers

HYPER = AdamWHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, maximize=False)
NOISE_NUMEL = 1 << 20

Allocate = Callable[[int, torch.dtype], Tensor]  # of so many elements


class UpdateArrays:
    """What one update reads and writes. All pages are touched."""

    def __init__(self, numel: int, allocate: Allocate, param_dtype: torch.dtype = torch.bfloat16) -> None:
        """`param_dtype` of parameter and gradient; with float32 the master is the parameter."""
        master, first, second = (allocate(numel, torch.float32).zero_() for _ in range(3))
        grad = allocate(numel, param_dtype)
        param = None if param_dtype == torch.float32 else allocate(numel, param_dtype)
        noise = torch.randn(min(numel, NOISE_NUMEL))
        for start in range(0, numel, len(noise)):
            part = noise[: numel - start]
            for target in (master, grad, *([] if param is None else [param])):
                target[start : start + len(part)] = part
        self.operands = Operands(master, grad, (first, second), param)


class UpdateWork:
    """Updates all of the arrays at each call. Both kinds of arrays have 16 bytes per parameter, of which 28 cross the
    memory: 12 are read and written, 2 or 4 read, 2 or none only written."""

    def __init__(
        self, arrays: UpdateArrays, sharers: Sharers, kernel: str | None = None, tile_numel: int | None = None
    ) -> None:
        self._operands = arrays.operands
        self._update = HostUpdate(AdamWRule(), sharers, kernel, tile_numel)
        self.num_updates = 0

    @property
    def kernel(self) -> str:
        return self._update.kernel

    def __call__(self) -> int:
        self.num_updates += 1
        self._update.update(self._operands, self.num_updates, HYPER)
        return len(self._operands) * UPDATE_BYTES
