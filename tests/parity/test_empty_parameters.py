"""Parameters without elements train as in plain PyTorch, which means that they are carried along."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hightide

EMPTY = {"a vector": (0,), "a matrix": (0, 16)}


class Net(nn.Module):
    def __init__(self, where: str, shape: tuple[int, ...], trainable: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.empty = nn.Parameter(torch.empty(shape), requires_grad=trainable) if where == "loose" else None
        if where == "in blocks":
            for layer in self.layers:
                layer.empty = nn.Parameter(torch.empty(shape), requires_grad=trainable)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x if self.empty is None else x + self.empty.sum()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("where", ["loose", "in blocks"])
def test_empty_parameters_are_carried_along(
    where: str, shape: tuple[int, ...], trainable: bool, optimizer: type[torch.optim.Optimizer]
) -> None:
    torch.manual_seed(0)
    plain = Net(where, shape, trainable)
    wrapped, inputs, targets = copy.deepcopy(plain), torch.randn(8, 16), torch.randn(8, 16)
    pairs = [(model, optimizer(model.parameters(), lr=1e-2)) for model in (plain, wrapped)]
    limits = hightide.Limits(gpu="1MiB", host="64MiB")
    pairs[1] = hightide.wrap(*pairs[1], inputs, limits=limits, micro_batch=4, device="cpu")
    for model, stepper in pairs:
        for _ in range(3):
            (model(inputs) - targets).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            stepper.step()
            stepper.zero_grad()
    states = [model.state_dict() for model, _ in pairs]
    assert list(states[0]) == list(states[1])
    for key in states[0]:
        torch.testing.assert_close(states[1][key], states[0][key])
    kept = [stepper.state_dict()["state"] for _, stepper in pairs]
    assert [sorted(state) for state in kept[:1]] == [sorted(state) for state in kept[1:]]
    pairs[1][1].load_state_dict(pairs[0][1].state_dict())
    model = hightide.unwrap(pairs[1][0])
    assert [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in plain.parameters()]
