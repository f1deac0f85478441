"""What is said of memory when graphs of several forwards are alive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hightide
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.runtime.several_graphs import SEVERAL_GRAPHS
from hightide.runtime.surgery import run_of
from hightide.stores.store import OutOfMemory

WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def wrapped(num_samples: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """As tight as a plan can be."""
    model = nn.Sequential(*[Layer() for _ in range(4)])
    optimizer, batch, gpu_bytes = torch.optim.SGD(model.parameters(), lr=0.1), samples(num_samples), 1
    for _ in range(6):
        try:
            return hightide.wrap(model, optimizer, batch, limits=hightide.Limits(gpu=gpu_bytes, host="8MiB"))
        except InfeasiblePlan as refusal:
            gpu_bytes = refusal.num_bytes
    raise AssertionError(f"no plan at {gpu_bytes} bytes, which a refusal named")


def samples(count: int) -> Tensor:
    return torch.ones(count, WIDTH)


def test_two_forwards_before_a_backward_are_named_where_they_do_not_fit() -> None:
    """What the model's own code has saved is in no block's hands."""
    model, _ = wrapped(16)
    wide = torch.ones(16, WIDTH, requires_grad=True)
    losses = [sum(model(samples(16) + wide.exp().sin()).square().mean() for _ in range(1))]
    with pytest.raises(OutOfMemory) as raised:
        for _ in range(12):  # inputs, which the graph of the loop holds
            losses.append(model(samples(16) * wide.exp()).square().mean())
        sum(losses).backward()
    assert raised.value.__notes__ == [SEVERAL_GRAPHS]
    hightide.unwrap(model)


def test_an_example_with_the_samples_of_both_makes_room() -> None:
    model, optimizer = wrapped(32)
    for _ in range(3):
        (model(samples(16)).mean() + model(samples(16)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    hightide.unwrap(model)


def test_a_loss_that_is_still_there_after_its_backward_is_none_of_them() -> None:
    model, optimizer = wrapped(16)
    kept = []
    for _ in range(3):
        kept.append(model(samples(16)).mean())
        kept[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    model(samples(16))
    run, error = run_of(model), OutOfMemory(Tier.GPU, "activations", 1, 1, 1, {})
    assert run is not None and not run.passes.graphs.explain(error)
    hightide.unwrap(model)
