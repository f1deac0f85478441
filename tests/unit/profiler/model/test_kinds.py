"""Blocks are of one kind only if nothing tells them apart but their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hightide.profiler.model.block_finder import FoundBlock
from hightide.profiler.model.kinds import are_alike, is_plain_linear, kinds_of


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.index, self.heads, self.scale = index, 2, 0.5
        self.options: Any = {"mix": False}
        self.act: Any = torch.tanh
        self.rule: Any = partial(torch.add, alpha=1)


def blocks(count: int = 4) -> list[FoundBlock]:
    return [FoundBlock(f"layers.{index}", Layer(index)) for index in range(count)]


def test_an_index_does_not_tell_blocks_apart() -> None:
    assert len(set(kinds_of(blocks()))) == 1
    two = blocks(3)
    assert are_alike(two[1], two[2])


def test_a_path_to_its_own_part_does_not_tell_a_block_apart() -> None:
    named = [FoundBlock(f"base.model.layers.{index}", Layer(index)) for index in range(12)]
    for index, block in enumerate(named):
        block.module.options = {"target": f"model.layers.{index}.linear"}
    assert len(set(kinds_of(named))) == 1
    named[1].module.options = {"target": "model.layers.11.linear"}  # of another
    assert len(set(kinds_of(named))) == 2


DIFFERENCES: dict[str, Callable[[Layer], Any]] = {
    "a flag": lambda layer: setattr(layer, "mix", True),
    "a number": lambda layer: setattr(layer, "heads", 4),
    "a number that others have as index": lambda layer: setattr(layer, "index", 0),
    "an entry": lambda layer: layer.options.update(mix=True),
    "a function": lambda layer: setattr(layer, "act", lambda x: x - x.mean(0)),
    "a partial": lambda layer: setattr(layer, "rule", partial(torch.add, alpha=2)),
    "a mode inside": lambda layer: layer.linear.eval(),
    "a buffer": lambda layer: layer.register_buffer("table", torch.zeros(2)),
    "a frozen weight": lambda layer: layer.linear.weight.requires_grad_(False),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_is_another_kind(name: str) -> None:
    found = blocks()
    DIFFERENCES[name](found[2].module)
    kinds = kinds_of(found)
    assert kinds[2] != kinds[3]


def test_a_plain_linear_layer_is_known() -> None:
    class Mixing(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input - input.mean(0))

    assert is_plain_linear(nn.Linear(2, 2)) and not is_plain_linear(Mixing(2, 2))
    assert not is_plain_linear(torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
