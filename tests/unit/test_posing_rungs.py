"""What is held in part is measured only where a plan wants it, and no plan has what was not measured."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import models
from hightide import posing, this_machine
from hightide.ir.activation import Activation
from hightide.ir.costs import CallPeaks, Costs, Curve, Point
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.estimate import estimate
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.by_hand import plan_by_hand
from hightide.planner.search.candidate import Candidate
from hightide.process.progress import progress_line
from hightide.profiler.model.model_profile import profile_calls
from hightide.rehearsal.rehearse import _in_proportion, measure_selective
from unit.runtime.steps import adamw

CPU = torch.device("cpu")
TERMS = Terms(2**30, 2**30)


def posed(name: str) -> tuple[Problem, posing.Profiled]:
    """As on a GPU with compiled blocks: all is measured but for what is held in part."""
    model, batch = models.ZOO[name]()
    profiled = profile_calls(model, adamw(model), batch, None, device=None)
    costs = estimate(profiled[0], this_machine.simulated_machine())
    bytes_of = {call.kind: call for call in profiled[0].calls}

    def curve(kind: int, what: str) -> Curve:
        return Curve(tuple(Point(size, getattr(bytes_of[kind], what).at(size)) for size in (1, 6)))

    whats = ("forward_peak", "kept", "backward_peak")
    peaks = tuple(CallPeaks(*(curve(kind, what) for what in whats)) for kind in range(len(costs.calls)))
    problem = Problem(profiled[0], replace(costs, peaks=peaks), this_machine.simulated_machine(), TERMS)
    return problem, profiled


class Searches:
    """Each wants one rung that was not measured, as long as there is one."""

    def __init__(self, fails_with: Collection[int] = ()) -> None:
        self.wanted: list[int] = []
        self._fails_with = frozenset(fails_with)

    def __call__(self, problem: Problem) -> Any:
        rungs = {call.kind for call in problem.profile.calls if call.selective is not None}
        if any(problem.costs.calls[kind].selective.is_measured for kind in rungs & self._fails_with):
            raise InfeasiblePlan("too much")
        kind = min(problem.estimated_rungs, default=None)
        self.wanted += [] if kind is None else [kind]
        blocks = {call.block for call in problem.profile.calls if call.kind == kind}
        plan = plan_by_hand(problem.profile, Candidate(2, selective=frozenset(blocks)), TERMS)
        return SimpleNamespace(plan=plan, problem=problem)


def measured(costs: Costs, kinds: Collection[int]) -> Costs:
    calls = [
        replace(cost, selective=replace(cost.selective, is_measured=True)) if kind in kinds and cost.selective else cost
        for kind, cost in enumerate(costs.calls)
    ]
    return replace(costs, calls=tuple(calls))


@pytest.mark.parametrize("fails", ["nothing", "to measure", "to fit"])
def test_every_rung_that_a_plan_has_was_measured(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    problem, profiled = posed("t5")
    rungs = problem.estimated_rungs
    assert len(rungs) >= 2
    first = min(rungs)
    searches, seen = Searches([first] if fails == "to fit" else ()), []

    def measure(profile: Any, probed: Any, records: Any, costs: Costs, *args: Any) -> Costs:
        kinds = args[-1]
        seen.extend(kinds)
        if fails == "to measure" and first in kinds:
            raise torch.OutOfMemoryError("no room for it")
        return measured(costs, kinds)

    monkeypatch.setattr(posing, "measure_selective", measure)
    monkeypatch.setattr(posing, "search", searches)
    if fails == "to measure":
        with pytest.warns(UserWarning, match="nothing is held in part of them"):
            solution = posing.solved(problem, profiled, CPU, compile=True)
    else:
        solution = posing.solved(problem, profiled, CPU, compile=True)
    assert sorted(seen) == sorted(searches.wanted) == sorted(rungs), "each of them once"
    assert not solution.problem.estimated_rungs
    assert all(block.activation is Activation.RECOMPUTE for block in solution.plan.blocks if block.name)
    left = {call.kind for call in solution.problem.profile.calls if call.selective is not None}
    assert left == (rungs if fails == "nothing" else rungs - {first})


def test_sizes_that_were_not_measured_are_told_in_proportion() -> None:
    told = Curve((Point(1, 30.0), Point(4, 60.0), Point(16, 180.0)))
    found = _in_proportion(told, {8: 200.0})  # 100 were told
    assert [(point.num_samples, point.value) for point in found.points] == [
        (1, 60.0),
        (4, 120.0),
        (8, 200.0),
        (16, 360.0),
    ]
    assert _in_proportion(Curve(()), {8: 200.0}).points == (Point(8, 200.0),)
    assert _in_proportion(told, {8: 0.0}).points == (Point(8, 0.0),)


def test_the_seconds_of_a_rung_are_told_by_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    problem, (profile, probed, records) = posed("llama")
    (kind,) = problem.estimated_rungs
    with caplog.at_level(logging.INFO, "hightide"), progress_line("wrap"):
        costs = measure_selective(profile, probed, records, problem.costs, CPU, False, 2, {kind})
    cost = costs.calls[kind].selective
    assert cost is not None and cost.is_measured
    assert any("LlamaDecoderLayer (kind" in line and "held in part took" in line for line in caplog.messages)
