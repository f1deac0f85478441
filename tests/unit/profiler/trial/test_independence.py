"""A trial finds what must not be split, says why, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hightide.profiler.model.block_finder import find_blocks
from hightide.profiler.probe.probe import probe
from hightide.profiler.probe.probe_result import ProbeResult


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


class Largest(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h / h.detach().abs().max().clamp_min(50.0)  # only an extreme sample shows it


class Positions(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table[: len(x)]


class CentredGradient(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h.register_hook(lambda grad: grad - grad.mean(0))
        return h


class Counts(Layer):
    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        return h, (h.detach() > 0).sum(0)


class OneDraw(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.rand(())


class Mixup(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[torch.randperm(len(x))])


class Statistics(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.linear(x)


class Mean(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.linear(x).mean(0), x


SEEN: list[int] = []


class Global(Layer):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(1)
        return self.linear(x) * len(SEEN)


class Cached(Layer):
    """Harmless: every part leaves the same."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = x.shape[1]
        return F.dropout(self.linear(x), 0.1)


BATCH = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
PLACE = 1  # of the layer, behind another one


def found(layer: Layer) -> ProbeResult:
    model = nn.Sequential(nn.Linear(8, 8), layer)
    return probe(model, find_blocks(model).blocks, BATCH)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Largest, "extreme values"),
        (Positions, "split, its output 0"),
        (CentredGradient, "gradient changes"),
        (Counts, "output 1"),
        (OneDraw, "random numbers for the batch as a whole"),
        (Mixup, ""),
        (Statistics, "what it keeps (mean)"),
        (Mean, "output 0"),
    ],
)
def test_what_must_not_be_split_says_why(layer: type[Layer], words: str) -> None:
    result = found(layer())
    split = result.calls[PLACE].split
    assert not split.splittable and words in split.note, split.note
    assert not result.refusals


@pytest.mark.parametrize("layer", [Layer, Cached])
def test_what_may_be_split_is(layer: type[Layer]) -> None:
    result = found(layer())
    assert result.calls[PLACE].split.splittable, result.calls[PLACE].split.note
    assert not result.keeps and not result.refusals


def test_hidden_state_is_a_refusal() -> None:
    assert "gives other results" in found(Global()).refusals[PLACE]


def test_a_trial_leaves_nothing_behind() -> None:
    layer = Statistics()
    state = torch.get_rng_state()
    weight = layer.linear.weight
    value = weight.detach().clone()
    model = nn.Sequential(layer.linear, layer)
    probe(model, find_blocks(model).blocks, BATCH)
    assert layer.linear.weight is weight and torch.equal(weight, value) and weight.grad is None
    assert torch.equal(layer.mean, torch.zeros(8)) and torch.equal(torch.get_rng_state(), state)
