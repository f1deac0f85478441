"""What lives on disk: the bytes that a step moves, the time that this takes, and when the search uses it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hightide.ir.action import Action, Mode, Op, Place, Schedule
from hightide.ir.activation import Activation
from hightide.ir.costs import Costs
from hightide.ir.machine import Disk, Machine
from hightide.ir.plan import Plan, Update
from hightide.ir.tier import Lane, Tier
from hightide.planner.disk_inputs import stored_bytes
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.bounds import least_step_s
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.peaks import peaks
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


@pytest.mark.parametrize("num_buffers", [1, 2, 5, 40])
def test_inputs_go_to_disk_and_come_back_but_for_those_that_wait_in_buffers(num_buffers: int) -> None:
    plan = plan_with(STACK, inputs=Tier.DISK, num_buffers=num_buffers)
    check_plan(STACK, plan)
    schedule = lower(STACK, plan, Mode.TRAIN)
    verify_within(STACK, plan, schedule, UNLIMITED, UNLIMITED)
    passing = [index for index, call in enumerate(STACK.calls) if call.saved_inputs.at(STACK.num_samples)]
    stored = passing[: max(0, len(passing) - num_buffers)]
    assert [action.call for action in schedule.lane(Lane.DISK_WRITE)] == stored
    assert [action.call for action in schedule.lane(Lane.DISK_READ)] == stored[::-1]
    size = STACK.calls[passing[0]].saved_inputs.at(STACK.num_samples)
    assert moved(plan, Lane.DISK_WRITE) == moved(plan, Lane.DISK_READ) == size * len(stored)
    on_host = lower(STACK, plan_with(STACK, inputs=Tier.HOST), Mode.TRAIN)
    for lane in (Lane.D2H, Lane.H2D):
        assert schedule.lane(lane) and moved(plan, lane) == sum(action.num_bytes for action in on_host.lane(lane))
    told, elsewhere = peaks(schedule), peaks(on_host)
    assert told.gpu_peak_bytes == elsewhere.gpu_peak_bytes
    assert told.host_peak_bytes == on_host.host_base_bytes + num_buffers * 4096
    assert told.disk_peak_bytes == 4096 * len(stored)


def test_wrong_ways_of_inputs_are_refused() -> None:
    plan = plan_with(STACK, inputs=Tier.DISK, num_buffers=2)
    schedule = lower(STACK, plan, Mode.TRAIN)

    def refused(match: str, name: str, **changes: object) -> None:
        actions = tuple(replace(a, **changes) if a.id == name else a for a in schedule.actions)  # type: ignore[arg-type]
        with pytest.raises(InfeasiblePlan, match=match):
            verify_within(STACK, plan, replace(schedule, actions=actions), UNLIMITED, UNLIMITED)

    read, write, stash = (schedule.by_id[name] for name in ("read.3", "write.3", "stash.3"))
    unstash = schedule.by_id["unstash.3"]
    refused("before chunk None has left it", stash.id, after=(schedule.ticks[3].id,))
    refused("goes to a buffer that may not be free yet", "stash.1", after_prev=())
    refused("reads inputs before they are on disk|before chunk", read.id, after=())
    refused("before they are in it", write.id, after=())
    refused("where the inputs of call 3 are not", unstash.id, source=Place(Tier.HOST, 1 - (unstash.source.slot or 0)))
    refused("passes through host; there are 2 buffers", stash.id, target=Place(Tier.HOST))
    refused("it has 1536 to move", write.id, num_bytes=1)
    refused("names the call 99", write.id, call=99)
    on_host = replace(plan, blocks=tuple(replace(block, inputs=Tier.HOST) for block in plan.blocks))
    with pytest.raises(InfeasiblePlan, match=r"goes through no buffer|do not wait on disk"):
        verify_within(STACK, on_host, schedule, UNLIMITED, UNLIMITED)


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


@pytest.mark.parametrize("update", Update)
def test_inputs_wait_on_disk_where_the_host_is_too_short_for_them(update: Update) -> None:
    """And nowhere else: on the way through forward compute would wait for them."""
    profile, tiers = stack(12, num_samples=32, dtype="bfloat16"), {}
    for host_bytes in (120_000, 200_000):
        terms = Terms(195_000, host_bytes, update, disk_bytes=UNLIMITED)
        found = search(Problem(profile, estimate(profile, GPU), MACHINE, terms))
        found.verify()
        tiers[host_bytes] = {block.inputs for block in found.plan.blocks}
        text = " ".join(found.plan.explain().split())
        assert ("for block inputs" in text) == ("KiB block inputs" in text) == (host_bytes == 120_000), text
    assert Tier.DISK in tiers[120_000] and Tier.DISK not in tiers[200_000]


def test_block_inputs_are_part_of_what_is_written() -> None:
    plan = plan_with(STACK, Tier.DISK, Tier.DISK, inputs=Tier.DISK, update=Update.IN_BACKWARD)
    elsewhere = plan_with(STACK, Tier.DISK, Tier.DISK, inputs=Tier.HOST, update=Update.IN_BACKWARD)
    stored = stored_bytes(STACK, plan)
    assert moved(plan, Lane.DISK_WRITE) - moved(elsewhere, Lane.DISK_WRITE) == 1536 * len(stored) > 0
    slow = replace(MACHINE, disk=Disk("made up", True, 40.0, 20.0, 10.0, 1, 30.0, 10.0, ()))
    problem = Problem(STACK, estimate(STACK, GPU), slow, Terms.of(plan))
    assert least_step_s(problem, Placement(plan)) > least_step_s(problem, Placement(elsewhere))


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
    inputs = plan_with(STACK, inputs=Tier.DISK)
    with pytest.raises(InfeasiblePlan, match="num_input_buffers is 0, but inputs of blocks wait on the disk"):
        check_plan(STACK, replace(inputs, num_input_buffers=0))
    swapped = replace(inputs.blocks[2], activation=Activation.SELECTIVE, held=Tier.HOST)
    with pytest.raises(InfeasiblePlan, match="inputs on the disk and activations on the host"):
        check_plan(STACK, replace(inputs, blocks=(*inputs.blocks[:2], swapped, *inputs.blocks[3:])))


def test_a_machine_without_a_disk_has_no_speeds_of_one() -> None:
    machine: Machine = replace(MACHINE, disk=None)
    with pytest.raises(ValueError, match="doctor --disk"):
        machine.speeds_of({Lane.DISK_READ})
