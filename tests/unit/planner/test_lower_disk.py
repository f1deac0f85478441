"""What lives on disk: the bytes that a step moves, the time that this takes, and when the search uses it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hightide.ir.action import Action, Mode, Op, Schedule
from hightide.ir.costs import Costs
from hightide.ir.machine import Disk, Machine
from hightide.ir.plan import Plan, Update
from hightide.ir.tier import Lane, Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.bounds import least_step_s
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.simulator import simulate
from hightide.planner.predict.step_seconds import seconds_of
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.search import LEAST_GAIN, search
from hightide.planner.solution import Searched
from hightide.planner.verify.check_plan import check_plan
from unit.planner.predict.test_step_seconds import GPU, LAYER
from unit.planner.profiles import UNLIMITED, plan_with, plans, profiles, stack, verify_within

STACK = stack(12, dtype="bfloat16")
SSD = Disk("made up", True, 4e6, 2e6, 1e6, 1, 3e6, 1e6, ())  # its cache makes writing look twice as fast
MACHINE = replace(GPU, gpu=None, disk=SSD)


def moved(plan: Plan, lane: Lane) -> int:
    return sum(action.num_bytes for action in lower(STACK, plan, Mode.TRAIN).lane(lane))


def numel(plan: Plan) -> int:
    return sum(chunk.numel for chunk in plan.layout.chunks)


def test_a_step_reads_and_writes_every_byte_that_lives_there() -> None:
    """Of a bf16 parameter: 2 bytes, 10 of states, and 4 of its gradient, which deferred updates leave there."""
    deferred = plan_with(STACK, Tier.DISK, Tier.DISK)
    assert moved(deferred, Lane.DISK_WRITE) == (2 + 10 + 4) * numel(deferred)
    fetched = moved(deferred, Lane.H2D)
    assert moved(deferred, Lane.DISK_READ) == (2 + 10 + 4) * numel(deferred) + fetched
    at_once = plan_with(STACK, states=Tier.DISK, update=Update.IN_BACKWARD)
    assert moved(at_once, Lane.DISK_READ) == moved(at_once, Lane.DISK_WRITE) == 10 * numel(at_once)


def test_lanes_of_the_disk_slow_each_other_down() -> None:
    def run(*lanes: Lane) -> float:
        ops = {Lane.DISK_READ: Op.READ, Lane.DISK_WRITE: Op.WRITE}
        moving = [Action(str(lane), ops[lane], lane, tick=0, num_bytes=3_000_000) for lane in lanes]
        tick = Action("tick", Op.STEP, Lane.COMPUTE, tick=0, after=tuple(action.id for action in moving))
        return simulate(Schedule(Mode.TRAIN, 0, 0, (*moving, tick)), lambda _: 0.0, MACHINE, num_steps=1).step_s

    assert run(Lane.DISK_READ) == pytest.approx(3 / 4)
    assert run(Lane.DISK_WRITE) == pytest.approx(3 / 1)  # sustained
    assert run(Lane.DISK_READ, Lane.DISK_WRITE) == pytest.approx(
        1 + (3 - 0.5) / 1
    )  # beside the read at 1e6 / 2, alone after it


@given(st.data())
def test_no_plan_is_lastingly_faster_than_its_bound(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile, data.draw(st.sampled_from(Update)), disk=True))
    costs = Costs("test", profile.fingerprint, (LAYER,), None, 1e6, 5e5)
    problem = Problem(profile, costs, MACHINE, Terms.of(plan))
    simulated = simulate(lower(profile, plan, Mode.TRAIN), seconds_of(profile, plan, costs), MACHINE, num_steps=12)
    twelve_s = simulated.begin_s + simulated.step_s
    bound_s = least_step_s(problem, Placement(plan))
    assert 10 * bound_s <= twelve_s * 1.000001  # updates of the last ones are not done yet


def searched(host_bytes: int, disk_bytes: int) -> Searched:
    costs = estimate(STACK, GPU)
    return search(Problem(STACK, costs, MACHINE, Terms(200_000, host_bytes, disk_bytes=disk_bytes)))


def test_the_disk_is_used_where_the_host_is_short_and_only_as_far() -> None:
    without = searched(UNLIMITED, 0)
    needed = without.plan.forecast.host_peak_bytes
    assert searched(UNLIMITED, UNLIMITED).plan.blocks == without.plan.blocks
    some, most = (searched(int(share * needed), UNLIMITED) for share in (0.9, 0.6))
    assert 0 < some.plan.forecast.disk_peak_bytes < most.plan.forecast.disk_peak_bytes
    assert without.step.step_s <= (1 + LEAST_GAIN) * some.step.step_s <= (1 + LEAST_GAIN) ** 2 * most.step.step_s
    for found, share in ((some, 0.9), (most, 0.6)):
        plan = replace(found.plan, disk_limit_bytes=found.plan.forecast.disk_peak_bytes)
        check_plan(STACK, plan)
        verify_within(STACK, plan, lower(STACK, plan, Mode.TRAIN), 200_000, int(share * needed))
        with pytest.raises(InfeasiblePlan, match="of disk from the beginning"):
            less = replace(plan, disk_limit_bytes=plan.disk_limit_bytes - 1)
            verify_within(STACK, less, lower(STACK, less, Mode.TRAIN), 200_000, int(share * needed))


def test_a_disk_that_is_too_small_is_refused_with_what_it_needs() -> None:
    needed = searched(UNLIMITED, 0).plan.forecast.host_peak_bytes
    host_bytes = int(0.6 * needed)
    with pytest.raises(InfeasiblePlan) as caught:
        searched(host_bytes, 250_000)
    enough = {tier: size for one in caught.value.enough for tier, size in one.items()}
    assert enough.keys() == {Tier.GPU, Tier.HOST, Tier.DISK}, "any one of them"
    assert searched(host_bytes, enough[Tier.DISK]).plan.forecast.disk_peak_bytes <= enough[Tier.DISK]
    assert searched(enough[Tier.HOST], 250_000).plan.forecast.disk_peak_bytes <= 250_000


def test_plans_that_make_no_sense_are_refused() -> None:
    plan = plan_with(STACK, Tier.DISK, Tier.DISK)
    check_plan(STACK, plan)
    with pytest.raises(InfeasiblePlan, match="params on the disk but states on the host"):
        check_plan(STACK, plan_with(STACK, Tier.DISK, Tier.HOST))
    for name in ("num_read_buffers", "num_grad_buffers", "num_state_buffers"):
        with pytest.raises(InfeasiblePlan, match=f"{name} is 0"):
            check_plan(STACK, replace(plan, **{name: 0}))
    late = tuple(replace(block, parks=False, late=True) for block in plan.blocks)
    with pytest.raises(InfeasiblePlan, match="updated late, but its gradient does not park"):
        check_plan(STACK, replace(plan, blocks=late))
    with pytest.raises(InfeasiblePlan, match="inputs on the disk"):
        check_plan(STACK, plan_with(STACK, inputs=Tier.DISK))


def test_a_machine_without_a_disk_has_no_speeds_of_one() -> None:
    machine: Machine = replace(MACHINE, disk=None)
    with pytest.raises(ValueError, match="doctor --disk"):
        machine.speeds_of({Lane.DISK_READ})
