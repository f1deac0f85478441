"""A search that must do without something finds the best plan of the others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import hightide
import models
from hightide.ir.action import Mode, Op
from hightide.ir.plan import Update
from hightide.ir.tier import Lane
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower, lower_step
from hightide.planner.mechanism import Mechanism
from hightide.planner.predict.step_seconds import forecast
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.search import search
from hightide.planner.search.space import Space
from hightide.planner.solution import Searched
from hightide.runtime.surgery import run_of
from unit.planner.predict.test_step_seconds import COSTS, machine
from unit.planner.problems import selective_problem
from unit.planner.profiles import plan_with, stack
from unit.runtime.steps import adamw, train_step

SOME = frozenset({1})
EVERYTHING = Candidate(2, whole=SOME, selective=SOME, swapped=frozenset({2}), looked_up=frozenset({0}), settles=True)


@pytest.mark.parametrize(
    ("changes", "unused"),
    [
        ({"whole": frozenset()}, {Mechanism.PERSISTENT}),
        ({"spare_slots": 0}, {Mechanism.SPARE_SLOTS}),
        ({"swapped": frozenset()}, {Mechanism.SWAP}),
        ({"looked_up": frozenset()}, {Mechanism.LOOKUP}),
        ({"settles": False}, {Mechanism.STATES_LATER}),
        ({"swapped": frozenset(), "selective": frozenset()}, {Mechanism.SWAP, Mechanism.LEVELS}),
    ],
)
def test_a_candidate_says_what_it_uses(changes: dict[str, object], unused: set[Mechanism]) -> None:
    # No candidate decides about them.
    always = {Mechanism.SLOT_REUSE, Mechanism.UPDATE_OVERLAP, Mechanism.LOSS_IN_FORWARD}
    assert EVERYTHING.mechanisms == set(Mechanism) - always
    assert replace(EVERYTHING, **changes).mechanisms == set(Mechanism) - always - unused  # type: ignore[arg-type]
    assert Mechanism.SPARE_SLOTS in replace(EVERYTHING, spare_slots=0, spare_grad_slots=1).mechanisms


@cache
def free(seed: int) -> Searched:
    return search(selective_problem(seed, num_blocks=2).asked)


@pytest.mark.parametrize("mechanism", Mechanism)
@pytest.mark.parametrize("seed", [17, pytest.param(2, marks=pytest.mark.long), pytest.param(6, marks=pytest.mark.long)])
def test_what_is_forbidden_is_not_used_and_the_step_is_no_shorter(mechanism: Mechanism, seed: int) -> None:
    best = free(seed)
    try:
        bound = search(best.problem.with_terms(without=frozenset({mechanism})))
    except InfeasiblePlan:
        assert mechanism in best.candidate.mechanisms, "what it did not use it cannot miss"
        return
    assert mechanism not in bound.candidate.mechanisms
    bound.verify()
    assert bound.step.step_s >= 0.99 * best.step.step_s, "a search is within a hundredth of the best"


def streamed(update: Update = Update.DEFERRED, *without: Mechanism) -> Searched:
    profile = stack()
    plan = plan_with(profile, update=update, micro_batch=2)
    problem = Problem(profile, COSTS, machine(1e6, 0.7), replace(Terms.of(plan), without=frozenset(without)))
    candidate = Candidate(2, spare_slots=2)
    space = Space(profile, problem.terms)
    return Searched.made(problem, candidate, space.placed(candidate), num_simulated=0)


def test_without_slot_reuse_backward_fetches_everything_again() -> None:
    def fetched(solution: Searched, op: Op) -> list[int | None]:
        ticks = {tick.id: tick.op for tick in solution.passes.last.ticks}
        fetches = [
            action for action in solution.passes.last.actions if action.op is Op.FETCH and action.kind == "param"
        ]
        return [one.chunk for one in fetches if one.id.at is not None and ticks[one.id.at] is op]

    free, bound = streamed(), streamed(Update.DEFERRED, Mechanism.SLOT_REUSE)
    assert fetched(free, Op.FORWARD) == fetched(bound, Op.FORWARD)
    assert set(fetched(free, Op.BACKWARD)) < set(fetched(bound, Op.BACKWARD)) == set(fetched(bound, Op.FORWARD))
    bound.verify()
    assert bound.schedules[Mode.ACCUMULATE] != lower(bound.profile, bound.plan, Mode.ACCUMULATE, bound.placement)


@pytest.mark.parametrize("update", Update)
def test_without_overlap_forward_begins_when_all_updates_are_through(update: Update) -> None:
    bound = streamed(update, Mechanism.UPDATE_OVERLAP)
    simulated = bound.step.simulated
    updates = {action.id for action in bound.passes.last.lane(Lane.CPU)}
    ended_s = max((span.end_s for span in simulated.beside if span.id in updates), default=simulated.begin_s)
    first = {"fwd.0", bound.passes.last.lane(Lane.H2D)[0].id}
    assert updates and all(span.start_s >= ended_s for span in simulated.spans if span.id in first)
    free_s = streamed(update).step.step_s
    assert bound.step.step_s > free_s if update is Update.DEFERRED else bound.step.step_s >= free_s
    placed = bound.placement, bound.passes.last
    assert forecast(bound.problem, *placed).step_s == bound.step.step_s


def test_a_plan_without_slot_reuse_runs_and_changes_no_bit() -> None:
    losses, moved = [], []
    for without in (frozenset(), frozenset({Mechanism.SLOT_REUSE})):
        model, batch = models.llama()
        optimizer = adamw(model)
        limits = hightide.Limits(gpu="320KiB", host="1GiB")
        model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, micro_batch=1)
        run = run_of(model)
        assert run is not None and run.observer is not None
        problem, run.observer = run.observer.problem, None  # type: ignore[attr-defined]
        searched = search(problem)
        bound = replace(
            searched,
            problem=problem.with_terms(without=without),
            passes=lower_step(searched.profile, searched.plan, searched.placement, without),
        )
        bound.verify()
        run.move_to(bound)
        losses.append([train_step(model, optimizer, batch) for _ in range(3)])
        stats = hightide.stats(model)
        moved.append(stats.moved_bytes["h2d"])
        assert stats.deviations == 0
        hightide.unwrap(model)
    assert losses[0] == losses[1] and moved[0] < moved[1]
