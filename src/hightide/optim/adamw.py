"""AdamW on contiguous ranges, by torch's own fused kernel.

The kernel works element by element, in vectors with a scalar tail, and the two may round differently. Ranges are
therefore cut only at multiples of ALIGN_NUMEL elements, a multiple of every vector length: then no cut makes a tail,
and results are the same bits however a chunk is cut into tiles, lanes or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hightide.ir.chunk import ALIGN_NUMEL, UPDATE_TILE_NUMEL

TILE_NUMEL = UPDATE_TILE_NUMEL  # a scaled copy of the gradient exists for this many elements at a time
assert TILE_NUMEL % ALIGN_NUMEL == 0

_REFUSED = {
    "amsgrad": "it needs a third moment",
    "differentiable": "updates run outside of autograd",
    "capturable": "updates run on the host, or by hightide's own schedule, not inside a CUDA graph",
}


@dataclass(frozen=True)
class AdamWHyper:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


@dataclass(frozen=True)
class AdamWRule:
    name: str = "adamw"
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    moment_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    @property
    def num_moments(self) -> int:
        return len(self.moment_names)

    def check(self, group: Mapping[str, Any]) -> None:
        for option, reason in _REFUSED.items():
            if group.get(option):
                raise ValueError(
                    f"AdamW({option}=True) is not supported ({reason}); make the optimizer with {option}=False"
                )

    def read(self, group: Mapping[str, Any]) -> AdamWHyper:
        beta1, beta2 = group["betas"]
        return AdamWHyper(
            lr=float(group["lr"]),  # float() also of a tensor
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )

    def update(
        self,
        param: Tensor,
        grad: Tensor,
        moments: Sequence[Tensor],
        step: int,
        hyper: AdamWHyper,
        scale: float | Tensor = 1.0,
        scratch: Tensor | None = None,
    ) -> None:
        first, second = moments
        for tensor in (param, grad, first, second):
            assert tensor.dim() == 1 and tensor.dtype == torch.float32 and len(tensor) == len(param), tensor.shape
        steps = torch.full((), float(step), device=param.device)
        if isinstance(scale, float) and scale == 1.0:
            _fused(param, grad, first, second, steps, hyper)
            return
        # Not by the kernel's grad_scale: it divides, and writes the scaled gradient back.
        if scratch is None:
            scratch = torch.empty(min(len(param), TILE_NUMEL), dtype=torch.float32, device=param.device)
        for start in range(0, len(param), TILE_NUMEL):
            tile = slice(start, min(start + TILE_NUMEL, len(param)))
            scaled = scratch[: tile.stop - tile.start]
            if isinstance(scale, float) and scale == 0.0:
                scaled.zero_()  # not a product: zero times infinity is NaN
            else:
                torch.mul(grad[tile], scale, out=scaled)
            _fused(param[tile], scaled, first[tile], second[tile], steps, hyper)


def _fused(param: Tensor, grad: Tensor, first: Tensor, second: Tensor, steps: Tensor, hyper: AdamWHyper) -> None:
    with torch.no_grad():
        torch._fused_adamw_(
            [param],
            [grad],
            [first],
            [second],
            [],
            [steps],
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=hyper.maximize,
        )
