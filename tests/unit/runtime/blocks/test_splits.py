"""Ways of calling a block that are met while the model trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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
