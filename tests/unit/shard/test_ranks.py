"""Ranks in groups."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hightide.shard import ranks as ranks_module
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


@pytest.mark.parametrize(("backend", "has_failed"), [("nccl", True), ("nccl", False), ("gloo", True)])
def test_at_exit_after_an_exception_nothing_is_waited_for(
    backend: str, has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are told first; what NCCL has under way they may never come to."""
    done: list[str] = []
    registered: list[Any] = []
    monkeypatch.setattr(ranks_module.atexit, "register", registered.append)
    monkeypatch.setattr(sys, "last_value", KeyError("a bad batch") if has_failed else None, raising=False)
    watchman: Any = SimpleNamespace(
        end_of_program=lambda: done.append("tell"), break_off=lambda: done.append("break off")
    )
    ranks = Ranks(0, 2, torch.device("cpu"), backend, (0, 0), watchman, {}, lambda: done.append("close"))
    ranks.ends_first(lambda: done.append("lanes"))
    (at_exit,) = registered
    at_exit()
    at_exit()
    before = {("nccl", True): ["tell", "break off"], ("gloo", True): ["tell"]}.get((backend, has_failed), [])
    assert done[: len(before) + 2] == [*before, "lanes", "close"] and done.count("close") == 1
