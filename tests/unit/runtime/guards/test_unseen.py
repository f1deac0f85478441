"""Tensors that need a gradient and that a block uses without being called with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
from hightide.ir.refusal import Refused

WIDTH = 8
ROOM = hightide.Limits(gpu="4MiB", host="4MiB")
LOST = r"'blocks\.0' uses a tensor that needs a gradient.*would be lost.*as an argument"


class Scaled(nn.Module):
    """By an attribute: a tensor of whoever calls, or a parameter."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale


class Net(nn.Module):
    """`trains`: names of what trains. With `shared` one parameter scales in the blocks and between them."""

    def __init__(self, *trains: str, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        if shared:
            self.scale = nn.Parameter(torch.rand(WIDTH))
        self.blocks = nn.ModuleList([Scaled(self.scale if shared else torch.ones(WIDTH)) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)
        self.is_shared = shared
        for name, param in self.named_parameters():
            param.requires_grad_(name.startswith(trains))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.is_shared:
            h = h * self.scale
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def wrapped(model: nn.Module, micro_batch: int = 6) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    x = torch.randn(6, WIDTH)
    return hightide.wrap(model, optimizer, x, limits=ROOM, device="cpu", micro_batch=micro_batch)


@pytest.mark.parametrize("trains", ["head", "first"])
def test_a_frozen_block_that_loses_a_gradient_is_refused(trains: str) -> None:
    """Before it nothing trains, so it has no backward; or something does, and its backward ends there."""
    model, _ = wrapped(Net(trains))
    model(torch.randn(6, WIDTH)).sum().backward()
    model.blocks[0].scale = torch.ones(WIDTH, requires_grad=True) * 2
    with pytest.raises(Refused, match=LOST):
        model(torch.randn(6, WIDTH))
    model.blocks[0].scale = model.blocks[0].scale.detach()
    model(torch.randn(6, WIDTH)).sum().backward()
    hightide.unwrap(model)


def test_what_two_blocks_use_and_neither_is_called_with_is_told() -> None:
    model, _ = wrapped(Net("first", "blocks"))
    made = torch.ones(WIDTH, requires_grad=True).exp()
    for block in model.blocks:
        block.scale = made
    with pytest.raises(Refused, match=r"'blocks\.0' uses a tensor.*second time.*as an argument"):
        model(torch.randn(6, WIDTH)).sum().backward()
    hightide.unwrap(model)


def test_a_parameter_that_is_used_between_blocks_trains_in_frozen_ones_too() -> None:
    plain = Net("scale", shared=True)
    x = torch.randn(6, WIDTH)
    model, _ = wrapped(copy.deepcopy(plain), micro_batch=2)
    for one in (plain, model):
        one(x).square().mean().backward()
    assert torch.allclose(model.scale.grad, plain.scale.grad, atol=1e-6)
    hightide.unwrap(model)
