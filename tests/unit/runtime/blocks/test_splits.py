"""Ways of calling a block that are met while the model trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hightide
from unit.runtime.steps import twins

WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor, negated: bool = False) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return x - y if negated else x + y


class Checkpointed(nn.Module):
    """By its own code, in which hightide's blocks are called."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.options = {"use_reentrant": False, **options}

    def forward(self, x: Tensor, negated: bool = False) -> dict[str, Tensor]:
        for layer in self.layers:
            x = checkpoint(layer, x, negated=negated, **self.options)
        return {"loss": self.head(x).square().mean()}


def products_kept() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


@pytest.mark.parametrize("options", [{}, {"context_fn": products_kept}], ids=["all", "selective"])
def test_a_new_way_of_calling_inside_of_a_checkpoint(options: dict[str, Callable[[], Any]]) -> None:
    """What looks at it saves tensors and computes: the checkpoint must not take these for the block's."""
    torch.manual_seed(0)
    pair = twins(Checkpointed(options), {"x": torch.randn(4, WIDTH)})
    for negated in (True, False, True):
        pair.assert_equal(*pair.step(batch={"x": torch.randn(4, WIDTH), "negated": negated}))
    pair.close()


class WithMore(nn.Module):
    """An embedding that the example does not call, and that writes its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.more = nn.Embedding(20, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> dict[str, Tensor]:
        x = x if ids is None else x + self.more(ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def test_what_would_be_lost_is_refused_at_the_first_call() -> None:
    model, x = WithMore(), torch.randn(4, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limits = hightide.Limits(gpu="4MiB", host="4MiB")
    model, optimizer = hightide.wrap(model, optimizer, {"x": x}, limits=limits)
    model(x)["loss"].backward()
    optimizer.step()
    with pytest.raises(
        hightide.Refused, match=r"'more', which the example did not call, gives the parameter 'more\.wei"
    ):
        model(x, torch.arange(4))
    hightide.unwrap(model)
