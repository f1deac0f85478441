"""Transforms of whole programs, which cannot be done to one whose parameters come and go: refused, with what works."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hightide.ir.refusal import Refused

PLAIN = "make the model plain first, with hightide.unwrap(model)"
FUNCTIONAL = (
    "torch.func (vmap, grad, vjp, jvp, jacrev, hessian) and gradients of several vectors at once cannot go through a "
    f"wrapped model: its blocks bring their parameters in while they run, and not for a transform. {PLAIN}; gradients "
    "of inputs alone also come from torch.autograd.grad(loss, inputs)"
)
TRACED = (
    f"a wrapped model cannot be traced or exported: what it returns would have its parameters of this moment; {PLAIN}"
)
FORWARD_MODE = f"forward-mode derivatives of a wrapped model cannot be had in training; use torch.no_grad(), or {PLAIN}"
TWICE = (
    "gradients of gradients (create_graph=True) cannot go through a wrapped model: its blocks compute a first "
    f"derivative and keep no graph of it; {PLAIN}"
)


def refuse_transforms(training: bool) -> None:
    """Asked before a pass begins."""
    if is_transformed():
        raise Refused(FUNCTIONAL)
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        raise Refused(TRACED)
    if training and forward_ad._current_level >= 0:
        raise Refused(FORWARD_MODE)


def is_transformed() -> bool:
    """Whether a transform of torch.func is under way, in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _is_batched(grad: Tensor | None) -> bool:
    """As with is_grads_batched=True, which sends several gradients through at once."""
    return grad is not None and not torch._C._has_storage(grad)


Backward = Callable[..., tuple[Tensor | None, ...]]


def once(adds_to_parameters: Callable[[Any], bool]) -> Callable[[Backward], Backward]:
    """For the backward of an autograd function, instead of torch's once_differentiable. That one lets gradients of
    gradients pass as zero if the gradient that came in is a constant, as that of a sum. And the gradients of
    parameters, which backward adds to as `adds_to_parameters` tells of its context, are sums without a graph."""

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def differentiated(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            if is_transformed() or any(_is_batched(grad) for grad in grads):
                raise Refused(FUNCTIONAL)
            if not torch.is_grad_enabled():  # the rule: nobody asks for a graph of the backward
                return backward(ctx, *grads)
            if adds_to_parameters(ctx):
                raise Refused(TWICE)
            with torch.no_grad():
                results = backward(ctx, *grads)
            asked = torch.empty(0, requires_grad=True)
            return tuple(None if value is None else _NotTwice.apply(asked, value) for value in results)

        return differentiated

    return decorate


class _NotTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, asked: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise Refused(TWICE)
