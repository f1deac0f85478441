"""A buffer that a loop changes between forward and backward: equal to plain PyTorch, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
from hightide.ir.activation import Activation

WIDTH = 16


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("alpha", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(
            self.linear(x) * self.alpha.clone()
        )  # a clone: plain PyTorch does not look at its version


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def wrapped(activation: str) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(4, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    plan = hightide.plan(model, optimizer, x, limits=hightide.Limits(gpu="8MiB", host="8MiB"), micro_batch=2)
    blocks = tuple(replace(block, activation=Activation(activation)) for block in plan.blocks)
    return *hightide.wrap(model, optimizer, x, plan=replace(plan, blocks=blocks)), x


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_it_is_refused_where_the_block_runs_again(how: str) -> None:
    model, optimizer, x = wrapped("recompute")
    for _ in range(2):
        loss = model(x)
        loss.backward()
        model.layers[1].alpha.mul_(0.9)  # after backward: whoever runs next sees it, as in plain PyTorch
        optimizer.step()
        optimizer.zero_grad()
    loss = model(x)
    if how == "in place":
        model.layers[1].alpha.mul_(0.9)
    else:
        model.layers[1].alpha = torch.full((1,), 0.5)
    with pytest.raises(hightide.Refused, match=r"a buffer of block .layers\.1. was changed"):
        loss.backward()
    optimizer.zero_grad()
    model(x).backward()  # and the loop may go on


def test_it_is_right_where_everything_is_kept() -> None:
    model, _, x = wrapped("keep")
    loss = model(x)
    model.layers[1].alpha.mul_(0.9)
    loss.backward()
    torch.manual_seed(0)
    plain = Stack()
    plain(torch.randn(4, WIDTH)).backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None and other.grad is not None
        assert torch.allclose(param.grad, other.grad, rtol=1e-4, atol=1e-6), name


def test_a_buffer_that_only_a_hook_uses_may_change() -> None:
    """An average of what the block returns, which its hook takes after the forward."""

    def average(layer: Any, _: Any, result: Tensor) -> None:
        layer.average.lerp_(result.detach().mean(0), 0.1)

    def watch(model: Stack) -> None:
        for layer in model.layers:
            layer.register_buffer("average", torch.zeros(WIDTH))
            layer.register_forward_hook(average)

    def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
        model(x).backward()
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    torch.manual_seed(0)
    plain, x = Stack(), torch.randn(4, WIDTH)
    model = Stack()
    model.load_state_dict(plain.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for one in (plain, model):
        watch(one)
    plan = hightide.plan(model, optimizer, x, limits=hightide.Limits(gpu="8MiB", host="8MiB"), micro_batch=2)
    blocks = tuple(replace(block, activation=Activation.RECOMPUTE) for block in plan.blocks)
    model, _ = hightide.wrap(model, optimizer, x, plan=replace(plan, blocks=blocks))
    for one, two in zip(gradients(plain, x), gradients(model, x), strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-6)
    for one, two in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.allclose(one, two)
