"""Ranks that plan again name limits of all ranks of a node: those that a user gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hightide.ir.tier import Tier
from hightide.observe import watch
from hightide.observe.larger_batches import LargerBatches
from hightide.observe.ranked_batches import RankedLargerBatches
from hightide.observe.ranked_watch import RankedWatch
from hightide.planner.infeasible import InfeasiblePlan

OF_ONE = InfeasiblePlan(
    "no plan fits: 5 bytes are missing on the host; give it Limits(host=100)", None, Tier.HOST, 100, ({Tier.HOST: 100},)
)


def refused(*_: Any) -> Any:
    raise OF_ONE


def test_of_larger_batches_and_of_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LargerBatches, "_searched", refused)
    monkeypatch.setattr(watch, "search", refused)
    batches, first_steps = object.__new__(RankedLargerBatches), object.__new__(RankedWatch)
    for one, method in ((batches, "_searched"), (first_steps, "_search")):
        one._collectives = SimpleNamespace(ranks=SimpleNamespace(ranks_of_node=(0, 1, 2)))  # type: ignore[attr-defined]
        with pytest.raises(InfeasiblePlan, match=r"3 ranks of a node.*Limits\(host=300\)"):
            getattr(one, method)(None)
