"""The anchor: what leads autograd from a block's output to parameters that it does not see.

[Note: backward of some inputs] See [Note: the block function]: backward asks the engine whether the anchor, a leaf, is
reached, and adds to gradients of parameters if it is. With `backward(inputs=...)` and `torch.autograd.grad` the engine
goes only where it was asked to. Parameters whose values are elsewhere refuse to be asked for; those that are on the GPU
are ordinary, and nothing would lead to them: backward would do nothing, without a word. So blocks get, instead of the
leaf, the result of a function of the leaf and all of these. Where the engine goes to the function and not to the leaf,
somebody has asked for parameters. That costs 3 us for each of them, so it is done in the first pass and in every
16th: a loop that asks does so from its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hightide.ir.refusal import Refused

OF_PARAMETERS = (
    "backward(inputs=...) or torch.autograd.grad asks for gradients of parameters: hightide adds to the gradients of "
    "all of them or of none. Call loss.backward() and take them from p.grad; gradients of other tensors are no problem"
)


EVERY = 16


class Anchor:
    def __init__(self, device: torch.device) -> None:
        self._leaf = torch.empty(0, device=device, requires_grad=True)
        self._leaf_node = get_gradient_edge(self._leaf).node
        self.tensor = self._leaf  # what blocks have as an input
        self._num_passes = 0

    def begin_pass(self, parameters: Sequence[Tensor]) -> None:
        """`parameters`: the trained ones that anybody may name, because their values are here."""
        is_asking = bool(parameters) and self._num_passes % EVERY == 0
        self._num_passes += 1
        with torch.enable_grad():
            self.tensor = _Leads.apply(self._leaf, *parameters) if is_asking else self._leaf

    def is_reached(self) -> bool:
        """Whether the present backward adds to gradients of parameters."""
        if torch._C._will_engine_execute_node(self._leaf_node):
            return True
        if self.tensor is not self._leaf and torch._C._will_engine_execute_node(self.tensor.grad_fn):  # type: ignore[arg-type]
            raise Refused(OF_PARAMETERS)
        return False


class _Leads(torch.autograd.Function):
    """To the leaf and to the parameters. It has nothing to give them."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_inputs = 1 + len(parameters)
        return torch.empty_like(leaf)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        return (None,) * ctx.num_inputs
