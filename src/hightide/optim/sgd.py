"""SGD on contiguous ranges, with momentum or without: by torch's own fused kernel, or on the host in C."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hightide.ir.state_spec import StateSpec, StateSpecs
from hightide.optim import c_kernel
from hightide.optim.rule import Rule


@dataclass(frozen=True)
class SGDHyper:
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


@dataclass(frozen=True)
class SGDRule(Rule):
    """Torch makes a momentum buffer in the first update with momentum, out of the gradient alone. Counting such
    updates says which one is the first; they have no count in the plain optimizer's state."""

    has_momentum: bool = True  # of any group
    name: ClassVar = "sgd"
    optimizer: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD
    step_name: ClassVar[str | None] = None
    refused: ClassVar = {"differentiable": "updates run outside of autograd"}

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> SGDRule:
        buffers = [state.get("momentum_buffer") for state in optimizer.state.values()]  # of earlier training
        momenta = [group["momentum"] for group in optimizer.param_groups]
        return cls(any(momenta) or any(buffer is not None for buffer in buffers))

    @property
    def states(self) -> StateSpecs:
        return (StateSpec("momentum_buffer", "float32"),) if self.has_momentum else ()

    def complaint(self, group: Mapping[str, Any]) -> str | None:
        if group["momentum"] != 0 and not self.has_momentum:
            return (
                f"momentum={group['momentum']}, but it was 0 in all groups when the model was wrapped, so there is no "
                "room for momentum buffers; call hightide.unwrap(model) and wrap again with momentum"
            )
        return super().complaint(group)

    def read(self, group: Mapping[str, Any]) -> SGDHyper:
        return SGDHyper(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
        )

    def keeps_states(self, hyper: SGDHyper) -> bool:
        return hyper.momentum != 0

    def apply(self, master: Tensor, grad: Tensor, states: tuple[Tensor, ...], step: int, hyper: SGDHyper) -> None:
        torch._fused_sgd_(
            [master],
            [grad],
            list(states) if hyper.momentum else [],
            weight_decay=hyper.weight_decay,
            momentum=hyper.momentum,
            lr=hyper.lr,
            dampening=hyper.dampening,
            nesterov=hyper.nesterov,
            maximize=hyper.maximize,
            is_first_step=step == 1,
        )

    def kernel(self) -> c_kernel.CKernel | None:
        return c_kernel.load("sgd", _numbers)


_Numbers = c_kernel.numbers_type("scale", "decay", "momentum", "damped", "rate", "is_first", "nesterov")


def _numbers(step: int, hyper: SGDHyper, scale: float) -> ctypes.Structure:
    """As in kernels/sgd.c."""
    return _Numbers(
        scale=-scale if hyper.maximize else scale,
        decay=hyper.weight_decay,
        momentum=hyper.momentum,
        damped=1 - hyper.dampening,
        rate=-hyper.lr,
        is_first=float(step == 1),
        nesterov=float(hyper.nesterov),
    )
