"""Models that ask for values of what they compute, so that they do not run on tensors without values: `wrap` runs them
once, block by block, on values, and keeps what it has promised after that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import Trained, assert_parity, train
from torch import Tensor, nn
from torch.nn import functional as F

import models

NUM_SAMPLES = 7
TIMINGS: dict[str, dict[str, Any]] = {"deferred": {"clip": "torch"}, "in_backward": {}}


class Branching(nn.Module):
    """Takes the way that its values tell: `.item()` inside a block, and a wider one for some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(models.HIDDEN)
        self.up, self.down = nn.Linear(models.HIDDEN, 96), nn.Linear(96, models.HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        if y.detach().sum().item() > 0:
            y = torch.sin(y) * torch.tanh(y) + torch.cos(y)
        return x + self.down(y)


class Gathering(nn.Module):
    """Computes with the rows that are large: `nonzero`, whose result has a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inner = nn.Linear(models.HIDDEN, 1), nn.Linear(models.HIDDEN, models.HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = (self.gate(x).squeeze(-1) > 0).nonzero().squeeze(-1)
        return x.index_add(0, rows, torch.tanh(self.inner(x[rows])))


class Asking(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(models.HIDDEN, models.HIDDEN)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(models.HIDDEN, 8)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.mse_loss(self.head(x), labels)}


class Ordered(Asking):
    """The order of its blocks, and which of them it calls, depend on what the first one makes."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for index in x.detach().mean(0)[: len(self.layers)].argsort().tolist():
            if index or bool(x.detach().sum() > 0):
                x = self.layers[index](x)
        return {"loss": F.mse_loss(self.head(x), labels)}


def asking(model: type[Asking], layer: type[nn.Module], **batch: Any) -> models.Pair:
    torch.manual_seed(0)
    return model(layer).train(), models.vector_batch(**batch)


Build = Callable[..., models.Pair]
SUBJECTS: dict[str, tuple[Build, Callable[..., Any]]] = {
    "autoformer": (models.autoformer, models.series_batch),
    "switch_transformers": (models.switch_transformers, models.translation_batch),
    "nllb_moe": (models.nllb_moe, models.translation_batch),
    "branching": (partial(asking, Asking, Branching), models.vector_batch),
    "gathering": (partial(asking, Asking, Gathering), models.vector_batch),
}


def trained(name: str, wrap: dict[str, Any] | None, num_steps: int = 5, **loop: Any) -> Trained:
    build, batch = SUBJECTS[name]
    batches = [batch(seed=10 + step, num_samples=NUM_SAMPLES) for step in range(num_steps)]
    return train(build(num_samples=NUM_SAMPLES), batches, wrap=wrap, **loop)


def within_limits(run: Trained) -> None:
    assert run.stats is not None
    assert run.stats.peak_bytes["gpu"] <= run.stats.plan.gpu_limit_bytes
    assert run.stats.peak_bytes["host"] <= run.stats.plan.host_limit_bytes


@pytest.mark.filterwarnings("ignore:the model could not be probed")
@pytest.mark.parametrize("update", TIMINGS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_the_tightest_limit_that_is_accepted_is_kept(name: str, update: str) -> None:
    plain = trained(name, None, **TIMINGS[update])
    wrapped = trained(name, {"update": update}, **TIMINGS[update])
    assert_parity(plain, wrapped)
    within_limits(wrapped)
    assert wrapped.stats is not None and wrapped.stats.evictions > 0
