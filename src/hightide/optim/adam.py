"""Adam and AdamW on contiguous ranges: by torch's own fused kernels, or on the host by a C kernel that gives the same
bits."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hightide.ir.state_spec import ADAM_STATES, StateSpecs
from hightide.optim import c_kernel
from hightide.optim.rule import Rule


@dataclass(frozen=True)
class AdamHyper:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    decoupled: bool = False  # the decay shrinks the parameter itself, not by way of the gradient


@dataclass(frozen=True)
class AdamWHyper(AdamHyper):
    decoupled: bool = True


@dataclass(frozen=True)
class AdamRule(Rule):
    name: ClassVar = "adam"
    optimizer: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    hyper: ClassVar[type[AdamHyper]] = AdamHyper
    refused: ClassVar = {
        "amsgrad": "it needs a third moment",
        "differentiable": "updates run outside of autograd",
        "capturable": "updates run on the host, or by hightide's own schedule, not inside a CUDA graph",
    }

    @property
    def states(self) -> StateSpecs:
        return ADAM_STATES

    def read(self, group: Mapping[str, Any]) -> AdamHyper:
        beta1, beta2 = group["betas"]
        return self.hyper(
            lr=float(group["lr"]),  # float() also of a tensor
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
            decoupled=bool(group.get("decoupled_weight_decay", self.hyper.decoupled)),
        )

    def apply(self, master: Tensor, grad: Tensor, states: tuple[Tensor, ...], step: int, hyper: AdamHyper) -> None:
        first, second = states
        update = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
        update(
            [master],
            [grad],
            [first],
            [second],
            [],
            [torch.full((), float(step), device=master.device)],
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=hyper.maximize,
        )

    def has_parts(self, hyper: AdamHyper) -> bool:
        """A decay that is added to the gradient reads the parameter of before."""
        return hyper.decoupled or hyper.weight_decay == 0.0

    def kernel(self) -> c_kernel.CKernel | None:
        return c_kernel.load("adam", _numbers)


@dataclass(frozen=True)
class AdamWRule(AdamRule):
    name: ClassVar = "adamw"
    optimizer: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    hyper: ClassVar[type[AdamHyper]] = AdamWHyper


_Numbers = c_kernel.numbers_type(
    "decay", "lerp", "from_grad", "beta2", "square", "correction", "inverse", "eps", "step_size", "scale", "coupled"
)


def _numbers(step: int, hyper: AdamHyper, scale: float) -> ctypes.Structure:
    """As in kernels/adam.c. Computed in double precision and rounded once, as torch does."""
    weight = ctypes.c_float(1 - hyper.beta1).value
    is_small = weight < 0.5  # torch's lerp starts from the nearer end
    correction = ctypes.c_float(math.sqrt(1 - hyper.beta2**step)).value
    return _Numbers(
        decay=1 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0,
        lerp=weight if is_small else weight - 1,
        from_grad=0.0 if is_small else 1.0,
        beta2=hyper.beta2,
        square=1 - hyper.beta2,
        correction=correction,
        inverse=1 / correction if correction else math.inf,
        eps=hyper.eps,
        step_size=-(hyper.lr / (1 - hyper.beta1**step)),
        scale=-scale if hyper.maximize else scale,
        coupled=0.0 if hyper.decoupled else hyper.weight_decay,
    )
