"""A function that is run again in backward gives the gradients of one whose graph was kept, and keeps nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hightide.ir.refusal import Refused
from hightide.runtime.blocks.recomputation import Recomputed

Function = Callable[[Tensor], Tensor]


class Counted(nn.Module):
    """Counts its products. The result of the last one is not needed by backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.num_products = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(F.silu(x))
            self.num_products += 1
        return x


def once_more(function: Function, x: Tensor, stops_early: bool = True) -> Tensor:
    result: Tensor = Recomputed(lambda: function(x), nullcontext(), nullcontext(), stops_early).forward()
    return result


def inner_checkpoint(model: Counted) -> Function:
    return lambda x: checkpoint(model, x.tanh(), use_reentrant=False).exp()


def inner_gradient(model: Counted) -> Function:
    """With its own graph, so that backward goes through a derivative."""

    def function(x: Tensor) -> Tensor:
        y = model(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y * slope

    return function


@pytest.mark.parametrize("stops_early", [True, False])
@pytest.mark.parametrize("made", [lambda model: model, inner_checkpoint, inner_gradient])
def test_gradients_are_those_of_a_kept_graph(made: Callable[[Counted], Function], stops_early: bool) -> None:
    model = Counted()
    x = torch.randn(3, 4, requires_grad=True)
    results = []
    for run in (lambda function: function(x), lambda function: once_more(function, x, stops_early)):
        model.zero_grad()
        x.grad = None
        out = run(made(model))
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(param.grad for param in model.parameters())])
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


def test_it_ends_with_the_last_tensor_that_is_needed() -> None:
    model, x = Counted(), torch.randn(3, 4, requires_grad=True)
    out = once_more(model, x)
    assert model.num_products == 3
    out.sum().backward()
    assert model.num_products == 5  # the last product ends it, before it is counted
    once_more(model, x, stops_early=False).sum().backward()
    assert model.num_products == 11


def test_nothing_stays() -> None:
    """What is made on the way is gone without the garbage collector, after forward and after backward."""
    alive: list[Any] = []

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        alive.append(weakref.ref(y.untyped_storage()))
        return y.sigmoid().tanh()

    gc.disable()
    try:
        x = torch.randn(8, requires_grad=True)
        out = once_more(function, x)
        assert [one() for one in alive] == [None]
        out.sum().backward()
        assert [one() for one in alive] == [None, None]
    finally:
        gc.enable()


def test_a_function_that_computes_something_else_is_refused() -> None:
    widths = iter((4, 5, 4))

    def function(x: Tensor) -> Tensor:
        return (x[:, : next(widths)].exp() * 2.0).tanh()

    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(Refused, match=r"\(3, 5\) torch.float32 on cpu"):
        once_more(function, x).sum().backward()
    counts = iter((2, 1))

    def fewer(x: Tensor) -> Tensor:
        for _ in range(next(counts)):
            x = x.exp()
        return x

    with pytest.raises(Refused, match="it saves 1 tensors, not 2"):
        once_more(fewer, x).sum().backward()


class AsksTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0] + ctx.saved_tensors[0]


def test_a_tensor_is_given_once() -> None:
    with pytest.raises(Refused, match="asked for a second time"):
        once_more(AsksTwice.apply, torch.randn(3, requires_grad=True)).sum().backward()


def test_a_device_that_was_set_in_forward_counts_in_backward() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * (1.0 if torch.empty(1).device.type == "meta" else 3.0)).exp()

    x = torch.randn(3, requires_grad=True)
    with torch.device("meta"):
        out = once_more(function, x)
    out.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())
