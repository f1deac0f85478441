"""An update rule: arithmetic on a range of elements, apart from where the range lies and when it happens.

Kernels work element by element. Torch's have vectors with a scalar tail, and the two may round differently. Ranges are
therefore cut only at multiples of ALIGN_NUMEL elements, a multiple of every vector length: then no cut makes a tail,
and results are the same bits however a chunk is cut into tiles, lanes or ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hightide.ir.chunk import ALIGN_NUMEL, UPDATE_TILE_NUMEL
from hightide.ir.state_spec import StateSpecs
from hightide.optim.c_kernel import CKernel
from hightide.optim.operands import Operands
from hightide.runtime.chunks.remainder import join, split

TILE_NUMEL = UPDATE_TILE_NUMEL  # without a given scratch, an fp32 copy of so many gradients exists at a time
assert TILE_NUMEL % ALIGN_NUMEL == 0


class Rule(ABC):
    """One optimizer's arithmetic and state layout. Its hyper-parameters are a frozen dataclass of the rule's own, read
    at step(): a deferred update runs when a scheduler may already have changed the group.

    A new rule is a file with a subclass and a line in registry.py; see docs/optimizers.md."""

    name: ClassVar[str]
    optimizer: ClassVar[type[torch.optim.Optimizer]]
    refused: ClassVar[Mapping[str, str]] = {}  # options of a group that must not be set, with the reason
    step_name: ClassVar[str | None] = "step"  # what the plain optimizer calls its count of updates; None: it has none

    @property
    @abstractmethod
    def states(self) -> StateSpecs:
        """What it keeps of each parameter, in the order in which `apply` takes them."""

    @abstractmethod
    def read(self, group: Mapping[str, Any]) -> Any:
        """The group's hyper-parameters of this moment, by value."""

    @abstractmethod
    def apply(self, master: Tensor, grad: Tensor, states: tuple[Tensor, ...], step: int, hyper: Any) -> None:
        """Updates ranges in place, on any device. Master and gradient are fp32; `grad` is only read. `step` counts
        from 1. Of ranges on the GPU it may copy each state that is not fp32 to fp32, and nothing else of that size."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Rule:
        """The rule for this optimizer. Its states may depend on the options of all groups."""
        return cls()

    def complaint(self, group: Mapping[str, Any]) -> str | None:
        """What is wrong with the group's options for this rule, and what to do; None if nothing is."""
        for option, reason in self.refused.items():
            if group.get(option):
                return (
                    f"{self.optimizer.__name__}({option}=True) is not supported ({reason}); make the optimizer with "
                    f"{option}=False"
                )
        return None

    def check(self, group: Mapping[str, Any]) -> None:
        """ValueError for a complaint."""
        if (complaint := self.complaint(group)) is not None:
            raise ValueError(complaint)

    def keeps_states(self, hyper: Any) -> bool:
        """Whether an update with these hyper-parameters uses the states: only such updates are counted."""
        return True

    def has_parts(self, hyper: Any) -> bool:
        """Whether new states follow from the old ones, the gradient and these hyper-parameters alone, and the kernel in
        C can write them after the parameters: see [Note: states later] in chunk_updates.py."""
        return False

    def kernel(self) -> CKernel | None:
        """The same arithmetic in C, for ranges on the host, if there is one and it can be used here."""
        return None

    def update(
        self,
        operands: Operands,
        step: int,
        hyper: Any,
        scale: float | Tensor = 1.0,
        scratch: Tensor | None = None,
    ) -> None:
        """Updates ranges in place with `grad * scale`. `scratch`: fp32 elements to work in, two for each element of a
        master in two parts, else one; without it they are allocated."""
        as_it_is = operands.grad.dtype == torch.float32 and isinstance(scale, float) and scale == 1.0
        widens = any(state.dtype != torch.float32 for state in operands.states)
        if as_it_is and operands.master is not None and not widens:
            self._apply(operands, operands.master, operands.grad, step, hyper)
            return
        num_arrays = 1 if operands.remainder is None else 2
        if scratch is None:
            numel = num_arrays * min(len(operands), TILE_NUMEL)
            scratch = torch.empty(numel, dtype=torch.float32, device=operands.grad.device)
        tile_numel = len(scratch) // num_arrays
        for start in range(0, len(operands), tile_numel):
            tile = operands[start : start + tile_numel]
            room = scratch[: len(tile)]
            grad = tile.grad if as_it_is else _scaled(tile.grad, scale, room)
            if tile.master is not None:
                self._apply(tile, tile.master, grad, step, hyper)
                continue
            assert tile.param is not None and tile.remainder is not None
            master = join(tile.param, tile.remainder, scratch[tile_numel : tile_numel + len(tile)])
            self._apply(replace(tile, param=None, master=master, remainder=None), master, grad, step, hyper)
            split(master, tile.param, tile.remainder, room)

    def _apply(self, operands: Operands, master: Tensor, grad: Tensor, step: int, hyper: Any) -> None:
        with torch.no_grad():
            self.apply(master, grad, operands.states, step, hyper)
            if operands.param is not None:
                operands.param.copy_(master)


def _scaled(grad: Tensor, scale: float | Tensor, scratch: Tensor) -> Tensor:
    """Not by torch's grad_scale: that divides, and writes the scaled gradient back. The product is taken in fp32."""
    if isinstance(scale, float) and scale == 0.0:
        return scratch.zero_()  # not a product: zero times infinity is NaN
    if grad.dtype == torch.float32:
        return torch.mul(grad, scale, out=scratch)
    scratch.copy_(grad)
    return scratch if isinstance(scale, float) and scale == 1.0 else scratch.mul_(scale)
