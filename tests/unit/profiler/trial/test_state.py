"""What modules keep is seen when it changes, and comes back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hightide.profiler.trial.state import GlobalRandom, ModuleState, contents, same_contents


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(3)
        self.number, self.flag, self.text = 0, False, "a"
        self.tensor = torch.zeros(2)
        self.items, self.queue, self.seen = [1, [2]], deque([1], maxlen=3), {1}
        self.table = {"a": {"b": [torch.zeros(1)]}}
        self.slotted, self.array = Slotted(), np.zeros(2)
        self.generator, self.own, self.drawer = torch.Generator(), random.Random(0), np.random.default_rng(0)


CHANGES: dict[str, Callable[[Keeper], Any]] = {
    "a number": lambda keeper: setattr(keeper, "number", 1),
    "a flag": lambda keeper: setattr(keeper, "flag", True),
    "a new attribute": lambda keeper: setattr(keeper, "new", 1),
    "an attribute that goes": lambda keeper: delattr(keeper, "text"),
    "a tensor in place": lambda keeper: keeper.tensor.add_(1),
    "another tensor": lambda keeper: setattr(keeper, "tensor", torch.ones(2)),
    "a list that grows": lambda keeper: keeper.items.append(3),
    "a list in a list": lambda keeper: keeper.items[1].append(3),
    "a deque": lambda keeper: keeper.queue.append(2),
    "a set": lambda keeper: keeper.seen.add(2),
    "a tensor in a list in dicts": lambda keeper: keeper.table["a"]["b"][0].add_(1),
    "slots": lambda keeper: setattr(keeper.slotted, "count", 1),
    "an array": lambda keeper: keeper.array.__setitem__(0, 1.0),
    "a generator of torch": lambda keeper: torch.rand(1, generator=keeper.generator),
    "a generator of Python": lambda keeper: keeper.own.random(),
    "a generator of numpy": lambda keeper: keeper.drawer.random(),
    "a buffer by batch normalisation": lambda keeper: keeper.inner(torch.randn(4, 3)),
    "a buffer that is replaced": lambda keeper: keeper.inner.register_buffer("running_mean", torch.ones(3)),
    "a buffer that is new": lambda keeper: keeper.register_buffer("late", torch.ones(1)),
    "the mode": lambda keeper: keeper.eval(),
    "Python's numbers": lambda _: random.random(),
    "numpy's numbers": lambda _: np.random.rand(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_undone(change: str) -> None:
    keeper = Keeper()
    before, there = ModuleState(keeper, shared_random=True), contents(keeper)
    assert before.changes() == [] and same_contents(there, contents(keeper))
    CHANGES[change](keeper)
    assert before.changes() and not same_contents(there, contents(keeper))
    before.restore()
    assert same_contents(there, contents(keeper))
    CHANGES[change](keeper)  # and again, from the same state
    before.restore()
    assert same_contents(there, contents(keeper))


def test_a_buffer_that_is_written_with_what_was_there_is_changed() -> None:
    """Another call may write something else."""
    keeper = Keeper()
    before = ModuleState(keeper)
    keeper.inner.running_mean.mul_(1.0)
    assert before.changes() == ["inner.running_mean"]


def test_a_restored_buffer_is_no_new_version() -> None:
    """A graph that has saved it must not be told that it has changed."""
    keeper = Keeper()
    before = ModuleState(keeper)
    version = keeper.inner.running_mean._version
    before.restore()
    assert keeper.inner.running_mean._version == version


def test_circles_and_modules_outside_are_no_problem() -> None:
    keeper = Keeper()
    keeper.items.append(keeper.items)
    keeper.table["me"] = keeper
    before = ModuleState(keeper)
    assert before.changes() == []
    before.restore()
    assert keeper.items[-1] is keeper.items


def test_closures_of_hooks_come_back() -> None:
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1

    keeper = Keeper()
    keeper.inner.register_forward_hook(hook)
    before = ModuleState(keeper, hooks=True)
    keeper.inner(torch.randn(4, 3))
    assert calls == 1
    before.restore()
    assert calls == 0


def test_global_random_numbers_are_told_apart() -> None:
    before = GlobalRandom()
    assert before.drawn() == set()
    torch.rand(1)
    assert before.drawn() == {"torch"}
    random.random()
    np.random.rand()
    assert before.drawn() == {"torch", "Python", "numpy"}
    before.restore()
    assert before.drawn() == set()


def test_a_thread_may_write_to_what_is_looked_at() -> None:
    """Here whoever looks at one entry adds another, as a thread could meanwhile."""
    entries: dict[Any, Any] = {}

    class Written:
        def __getattribute__(self, name: str) -> Any:
            entries[len(entries)] = 1
            return super().__getattribute__(name)

    entries.update(first=Written(), second=Written())
    module = nn.Module()
    module.entries = entries
    assert ModuleState(module).changes()
