"""Ranks in groups."""

from __future__ import annotations

import pytest
import torch

from hightide.shard.ranks import Ranks


@pytest.mark.parametrize(
    ("nodes", "replicas", "groups"),
    [
        ((0, 0, 1, 1), 2, [(0, 1), (2, 3)]),
        ((0, 1, 0, 1), 2, [(0, 2), (1, 3)]),
        ((0, 0, 1, 1), 1, [(0, 1, 2, 3)]),
        ((0, 0, 0, 0), 4, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_groups_are_of_one_node_each(nodes: tuple[int, ...], replicas: int, groups: list[tuple[int, ...]]) -> None:
    ranks = Ranks(0, 4, torch.device("cpu"), "alone", nodes, None, {}, lambda: None)
    assert ranks.divided(replicas) == groups
    with pytest.raises(ValueError, match="cannot be divided into 3 equal groups"):
        ranks.divided(3)
