"""What ranks take to gather and to reduce, by hand; and steps of several ranks, simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hightide.doctor.known import load_machine
from hightide.ir.action import Op
from hightide.ir.machine import CollectiveRates, Links, Machine
from hightide.ir.plan import Plan, Sharing, Update
from hightide.ir.tier import COLLECTIVES, Lane, Tier
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.lower import lower_step
from hightide.planner.placement import Placement
from hightide.planner.predict.bounds import least_step_s
from hightide.planner.predict.collective_seconds import collective_s, links_of
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.step_seconds import StepForecast, forecast
from hightide.planner.problem import Problem, Terms
from unit.planner.profiles import plan_with, stack
from unit.planner.ranked import ranked, ranked_plans

STACK = stack(4)
INSIDE, ACROSS = CollectiveRates(100.0, 50.0, 40.0), CollectiveRates(10.0, 5.0, 4.0)
LINKS = Links(4, 1, INSIDE, None, 0.5, 2.0, 1.0, 1.0, 1.0)
NODES = replace(LINKS, num_nodes=2, across=ACROSS)


def place(ranks: int, replicas: int = 1, sharing: Sharing = Sharing.SHARDED) -> tuple[Plan, ChunkPlace]:
    on_gpu = sharing is not Sharing.SHARDED
    plan = plan_with(STACK, *((Tier.GPU, Tier.GPU) if on_gpu else ()), slot_numel=4096)
    plan = ranked(STACK, plan, ranks, sharing, replicas=replicas)
    return plan, Placement(plan).chunks[0]  # 2048 elements, or 8192 bytes


def test_inside_a_node() -> None:
    plan, chunk = place(4)
    assert collective_s(LINKS, plan, Op.GATHER, chunk) == pytest.approx(0.5 + 8192 * 3 / 4 / 100)
    assert collective_s(LINKS, plan, Op.REDUCE, chunk) == pytest.approx(0.5 + 8192 * 3 / 4 / 50)
    plan, chunk = place(4, sharing=Sharing.REPLICATED)
    assert collective_s(LINKS, plan, Op.REDUCE, chunk) == pytest.approx(0.5 + 2 * 8192 * 3 / 4 / 40)


def test_across_nodes_the_slower_link_counts() -> None:
    plan, chunk = place(8)
    # Each node receives a half of it, which its four GPUs share.
    assert collective_s(NODES, plan, Op.GATHER, chunk) == pytest.approx(2.0 + 8192 / 2 / 4 / 10)
    fast = replace(NODES, across=replace(ACROSS, gather_bytes_per_s=1000.0))
    assert collective_s(fast, plan, Op.GATHER, chunk) == pytest.approx(2.0 + 8192 * 7 / 8 / 100)


def test_replicas_across_nodes_average_their_shards() -> None:
    plan, chunk = place(8, replicas=2)
    assert collective_s(NODES, plan, Op.GATHER, chunk) == pytest.approx(0.5 + 8192 * 3 / 4 / 100)
    inside_s, across_s = 0.5 + 8192 * 3 / 4 / 50, 2.0 + 2 * (1 / 2) * (8192 / 4) / 4
    assert collective_s(NODES, plan, Op.REDUCE, chunk) == pytest.approx(inside_s + across_s)


def test_a_machine_without_such_links_is_refused() -> None:
    plan, _ = place(4)
    with pytest.raises(ValueError, match=r"plan is for 4 ranks, .* no GPUs that are linked"):
        links_of(load_machine("h200"), plan)
    with pytest.raises(ValueError, match="1 x 8 of them"):
        links_of(load_machine("8x-h100"), plan)
    assert links_of(load_machine("h200"), plan_with(STACK)) is None


def machine_with(inside: CollectiveRates, beside: float = 1.0, ranks: int = 2) -> Machine:
    links = Links(ranks, 1, inside, None, 1e-6, 1e-6, beside, beside, 0.5)
    return replace(load_machine("4x-rtx-4090"), links=links)


def told(plan: Plan, machine: Machine) -> StepForecast:
    problem = Problem(STACK, estimate(STACK, machine), machine, Terms.of(plan))
    placement = Placement(plan)
    return forecast(problem, placement, lower_step(STACK, plan, placement))


@given(ranked_plans(STACK, Update.DEFERRED), st.sampled_from([1e6, 1e8]), st.sampled_from([2, 10]))
@settings(max_examples=25, deadline=None)
def test_faster_links_make_no_step_longer(plan: Plan, rate: float, times: int) -> None:
    """Each collective alone is faster; a simulated step may only differ by what lanes happen to meet."""
    slow = machine_with(CollectiveRates(rate, rate, rate), ranks=plan.ranks)
    fast = machine_with(CollectiveRates(*[times * rate] * 3), ranks=plan.ranks)
    assert told(plan, fast).step_s <= told(plan, slow).step_s * 1.01


def test_collectives_take_from_copies_on_the_same_link() -> None:
    plan = ranked(STACK, plan_with(STACK), 2, Sharing.SHARDED)
    rates = CollectiveRates(*[2e8] * 3)
    apart, shared = (told(plan, machine_with(rates, beside)).simulated for beside in (1.0, 0.5))
    assert shared.busy_s[Lane.H2D] > apart.busy_s[Lane.H2D] and shared.step_s > apart.step_s
    assert all(apart.busy_s[lane] > 0 for lane in COLLECTIVES)


@given(ranked_plans(STACK, Update.DEFERRED))
@settings(max_examples=25, deadline=None)
def test_no_step_is_shorter_than_its_bound(plan: Plan) -> None:
    machine = machine_with(CollectiveRates(*[1e7] * 3), ranks=plan.ranks)
    problem, placement = Problem(STACK, estimate(STACK, machine), machine, Terms.of(plan)), Placement(plan)
    step = forecast(problem, placement, lower_step(STACK, plan, placement))
    assert step.simulated.step_s >= 0.999 * least_step_s(problem, placement)
