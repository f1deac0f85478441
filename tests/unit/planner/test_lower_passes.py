"""Steps of several passes, as schedules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hightide.ir.action import Mode, Op, Place, Schedule
from hightide.ir.machine import Disk
from hightide.ir.plan import BlockPlan, Plan, Update
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.chunk_place import RING_COUNTS
from hightide.planner.disk_inputs import passing_calls
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower, lower_step
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import peaks, step_peaks
from hightide.planner.predict.simulator import Simulated, simulate, simulated_step_s
from hightide.planner.verify.check_plan import check_plan
from hightide.planner.verify.verify_schedule import verify, verify_step
from unit.planner.predict.test_simulator import machine
from unit.planner.profiles import finish, plan_with, plans, profiles, stack
from unit.planner.random_lanes import RandomLanes

SLOW_DISK = Disk("made up", True, 4e3, 2e3, 1e3, 1, 3e3, 1e3, ())


def several(plan: Plan, number: int, sums: Tier = Tier.HOST) -> Plan:
    return replace(plan, accumulate=number, blocks=tuple(replace(block, sums=sums) for block in plan.blocks))


def fetched(schedule: Schedule, kind: ChunkKind) -> list[str]:
    return [action.id for action in schedule.lane(Lane.H2D) if action.kind is kind]


def test_each_pass_begins_and_ends_as_it_must() -> None:
    profile = stack(4)
    passes = lower_step(profile, several(plan_with(profile), 5))
    assert [(schedule.mode, count) for schedule, count in passes.runs] == [
        (Mode.FIRST, 1),
        (Mode.MIDDLE, 3),
        (Mode.LAST, 1),
    ]
    assert passes.number == 5
    for schedule in passes:
        ops = {action.op for action in schedule.actions}
        assert (Op.UPDATE in ops) == (schedule.mode is Mode.LAST)
        assert bool(fetched(schedule, ChunkKind.GRAD)) == (schedule.mode is not Mode.FIRST)
        assert (Op.CLEAR in ops) == (schedule.mode is Mode.FIRST)


def test_two_passes_have_no_middle() -> None:
    passes = lower_step(stack(2), several(plan_with(stack(2)), 2))
    assert [schedule.mode for schedule in passes] == [Mode.FIRST, Mode.LAST]


def test_a_step_of_one_pass_is_what_it_was() -> None:
    profile = stack(3)
    plan = plan_with(profile)
    assert lower_step(profile, plan).runs == ((lower(profile, plan, Mode.TRAIN), 1),)


def test_sums_that_stay_leave_once() -> None:
    profile = stack(4)
    passes = lower_step(profile, several(plan_with(profile), 3, Tier.GPU))
    sent = {schedule.mode: [a for a in schedule.actions if a.op is Op.WRITE_BACK] for schedule in passes}
    assert not sent[Mode.FIRST] and not sent[Mode.MIDDLE]
    assert {action.source for action in sent[Mode.LAST]} == {Place(Tier.GPU)}
    assert not any(fetched(schedule, ChunkKind.GRAD) for schedule in passes)
    cleared = [action for action in passes.first.actions if action.op is Op.CLEAR]
    left = {action.chunk: action.id for action in sent[Mode.LAST]}
    assert [action.after_prev for action in cleared] == [(left[action.chunk],) for action in cleared]
    assert Placement(several(plan_with(profile), 3, Tier.GPU)).widest_tick({0, 1, 2})[1] == 0  # no grad slots


def test_slots_keep_what_no_update_has_made_stale() -> None:
    profile = stack(6)
    passes = lower_step(profile, several(plan_with(profile, spare=2, slot_numel=3200), 4))
    first, middle, last = passes
    assert not first.standing and middle.standing == last.standing and len(middle.standing) == 3
    saved = set(fetched(first, ChunkKind.PARAM)) - set(fetched(middle, ChunkKind.PARAM))
    assert saved == {f"fetch.param.{chunk}@fwd.{chunk}" for chunk, _ in middle.standing}


def test_persistent_parameters_are_refreshed_once_a_step() -> None:
    profile = stack(3)
    passes = lower_step(profile, several(plan_with(profile, params=Tier.GPU, states=Tier.HOST), 3))
    assert [bool(fetched(schedule, ChunkKind.PARAM)) for schedule in passes] == [True, False, False]


@st.composite
def steps(draw: st.DrawFn) -> Any:
    profile, update = draw(profiles()), draw(st.sampled_from(Update))
    plan = draw(plans(profile, update, disk=draw(st.booleans())))
    blocks: list[BlockPlan] = []
    for block in plan.blocks:
        homes = [Tier.GPU, Tier.HOST, *([Tier.DISK] if block.states is Tier.DISK else [])]
        blocks.append(replace(block, sums=draw(st.sampled_from(homes)) if block.compute is Tier.GPU else Tier.HOST))
    spares = plan.num_slots, plan.num_grad_slots
    made = finish(profile, blocks, update, plan.micro_batch, 0, 0, plan.layout.slot_numel, 0)
    plan = replace(made, accumulate=draw(st.integers(2, 4)), gradients=plan.gradients)
    placement = Placement(plan)
    slots, grad_slots = placement.widest_tick({call.block for call in profile.calls})
    num_slots, num_grad_slots = max(slots, spares[0]), max(grad_slots, spares[1])
    sizes = placement.buffer_bytes
    rings = {name: draw(st.integers(1, 3)) if sizes[ring] else 0 for ring, name in RING_COUNTS.items()}
    rings["num_input_buffers"] = draw(st.integers(1, 3)) if passing_calls(profile, plan) else 0
    plan = replace(plan, num_slots=num_slots, num_grad_slots=num_grad_slots, **rings)
    return profile, plan, draw(st.integers(0, 2**16))


def check(case: Any) -> None:
    profile, plan, seed = case
    check_plan(profile, plan)
    placement = Placement(plan)
    passes = lower_step(profile, plan, placement)
    verify_step(profile, placement, passes)
    for schedule in passes:
        run, told = RandomLanes(plan, schedule, seed).run(), peaks(schedule)
        assert run.gpu_peak_bytes <= told.gpu_peak_bytes and run.host_peak_bytes <= told.host_peak_bytes
    lanes = replace(machine(alone=4096.0, shared=0.7), disk=SLOW_DISK)
    simulated = simulate(passes, lambda _: 1.0, lanes)
    assert sum(one.weight for one in simulated.passes) == plan.accumulate
    check_buffers(simulated)


def check_buffers(simulated: Simulated) -> None:
    """From pass to pass no buffer on the host is filled before it was emptied."""
    by_pass = {one.index: one.schedule.by_id for one in simulated.passes}
    filled: dict[tuple[str, int | None], list[float]] = {}
    emptied: dict[tuple[str, int | None], list[float]] = {}
    unused: dict[tuple[int, int | None], int | None] = {}  # gradients that nothing but their update takes out
    for span in simulated.spans:
        action = by_pass[span.pass_index][span.id]
        ring = "state" if action.kind is ChunkKind.STATE else "up" if action.op in (Op.READ, Op.FETCH) else "down"
        ring = "inputs" if action.chunk is None else ring
        enters = action.op in (Op.READ, Op.WRITE_BACK, Op.STASH)
        if enters and action.target is not None and action.target.slot is not None:
            filled.setdefault((ring, action.target.slot), []).append(span.start_s)
            if action.op is Op.WRITE_BACK:
                unused[span.pass_index, action.chunk] = action.target.slot
        leaves = action.op in (Op.FETCH, Op.WRITE, Op.UNSTASH)
        if leaves and action.source is not None and action.source.slot is not None:
            emptied.setdefault((ring, action.source.slot), []).append(span.end_s)
            if action.op is Op.WRITE and action.chunk is not None:
                unused.pop((span.pass_index, action.chunk), None)
        if action.op is Op.UPDATE and (span.pass_index, action.chunk) in unused:
            emptied.setdefault(("down", unused.pop((span.pass_index, action.chunk))), []).append(span.end_s)
    assert filled.keys() == emptied.keys()
    for place, starts in filled.items():
        ends = sorted(emptied[place])
        assert len(starts) == len(ends)
        for end_s, start_s in zip(ends, sorted(starts)[1:], strict=False):
            assert end_s <= start_s + 1e-9, f"{place} is filled while it is in use"


@given(steps())
@settings(max_examples=30, deadline=None)
def test_any_step_is_right_at_any_speed_of_the_lanes(case: Any) -> None:
    check(case)


@pytest.mark.long
@pytest.mark.timeout(1800)
@given(steps())
@settings(max_examples=1500, deadline=None, derandomize=False, print_blob=True)
def test_any_step_is_right_at_length(case: Any) -> None:
    check(case)


def edited(schedule: Schedule, drop: str = "", **changes: Any) -> Schedule:
    """Without one action, or with fields of all others changed."""
    kept = [action for action in schedule.actions if action.id != drop]
    gone = [replace(one, after=tuple(name for name in one.after if name != drop)) for one in kept]
    return replace(schedule, actions=tuple(gone), **changes)


@pytest.mark.parametrize("sums", [Tier.HOST, Tier.GPU])
def test_wrong_passes_are_refused(sums: Tier) -> None:
    profile = stack(4)
    plan = several(plan_with(profile, spare=2), 3, sums)
    placement, passes = Placement(plan), lower_step(profile, plan)
    first, middle, last = passes
    verify_step(profile, placement, passes)

    def refused(schedule: Schedule, match: str) -> None:
        with pytest.raises(InfeasiblePlan, match=match):
            verify(profile, placement, schedule)

    refused(replace(first, standing=middle.standing), "cannot stand")
    refused(edited(middle, standing=middle.standing[1:]), "which is not in a slot then")
    chunk = middle.standing[0][0]
    refused(replace(middle, standing=((chunk, 10**6),)), "cannot stand")
    refused(replace(first, mode=Mode.MIDDLE), "holds sums|is not in a slot|not in a grad slot")
    refused(replace(last, mode=Mode.MIDDLE), "before the last pass|is to stay")
    missing = next(action.id for action in last.actions if action.op is Op.WRITE_BACK)
    refused(edited(last, drop=missing), "never written back|is not written back|which is not in the schedule|occupies")
    if sums is Tier.GPU:
        cleared = next(action for action in first.actions if action.op is Op.CLEAR)
        unordered = tuple(replace(a, after_prev=()) if a is cleared else a for a in first.actions)
        refused(replace(first, actions=unordered), "on its way")
    else:
        continued = next(a.id for a in middle.actions if a.op is Op.FETCH and a.kind is ChunkKind.GRAD)
        refused(edited(middle, drop=continued), "not in a grad slot")


def test_what_a_pass_expects_the_one_before_must_leave() -> None:
    profile = stack(4)
    plan = several(plan_with(profile, spare=2), 3)
    passes = lower_step(profile, plan)
    moved = tuple((chunk, slot) for (chunk, _), (_, slot) in pairwise([*passes.last.standing, passes.last.standing[0]]))
    assert moved != passes.last.standing
    with pytest.raises(InfeasiblePlan):
        wrong = replace(passes, runs=(*passes.runs[:-1], (replace(passes.last, standing=moved), 1)))
        verify_step(profile, Placement(plan), wrong)


def test_the_second_of_many_passes_stands_for_the_rest() -> None:
    profile = stack(4)
    lanes, plan = machine(alone=4096.0, shared=0.7), plan_with(profile)
    steps_s = [
        simulated_step_s(lower_step(profile, several(plan, number)), lambda _: 1.0, lanes, num_steps=2)
        for number in (4, 5, 6, 60)
    ]
    differences = [after - before for before, after in pairwise(steps_s)]
    assert differences[0] == pytest.approx(differences[1])
    assert steps_s[3] == pytest.approx(steps_s[2] + 54 * differences[1])
    told = simulate(lower_step(profile, several(plan, 6)), lambda _: 1.0, lanes)
    assert told.step_s == pytest.approx(steps_s[2], rel=0.02)


# -- from a disk ------------------------------------------------------------------------------------------------------


def from_disk(number: int, sums: Tier, update: Update = Update.DEFERRED, num_buffers: int = 2, **kinds: Any) -> Plan:
    """All of a stack of bf16, which has 10 bytes of states for each parameter."""
    profile = stack(6, dtype="bfloat16")
    plan = several(plan_with(profile, Tier.DISK, Tier.DISK, update=update, num_buffers=0, **kinds), number, sums)
    sizes = Placement(plan).buffer_bytes
    plan = replace(plan, **{name: num_buffers if sizes[ring] else 0 for ring, name in RING_COUNTS.items()})
    check_plan(profile, plan)
    return plan


@pytest.mark.parametrize("update", Update)
@pytest.mark.parametrize("sums", Tier)
def test_states_cross_once_a_step_and_parameters_with_every_pass(sums: Tier, update: Update) -> None:
    plan, number = from_disk(3, sums, update), 3
    profile, placement = stack(6, dtype="bfloat16"), Placement(plan)
    numel = sum(place.chunk.numel for place in placement.chunks)
    passes = lower_step(profile, plan, placement)
    verify_step(profile, placement, passes)
    fetched_bytes = sum(
        count * sum(a.num_bytes for a in schedule.lane(Lane.H2D) if a.kind is ChunkKind.PARAM)
        for schedule, count in passes.runs
    )
    # Sums go there and come back between passes; one that is deferred waits there for its update, wherever it was.
    there = {Tier.DISK: number, Tier.HOST: 0, Tier.GPU: 1 if update is Update.DEFERRED else 0}[sums]
    assert passes.moved_bytes(Lane.DISK_WRITE) == (12 + 4 * there) * numel
    assert passes.moved_bytes(Lane.DISK_READ) == fetched_bytes + (12 + 4 * there) * numel
    for schedule in passes:
        kinds = {(action.op, action.kind) for action in schedule.actions}
        assert ((Op.READ, ChunkKind.STATE) in kinds) == schedule.mode.ends_step
    parked = peaks(passes.last).host_peak_bytes - passes.last.host_base_bytes
    parks = sums is Tier.GPU and update is Update.IN_BACKWARD
    assert (parked > 0) == parks
    assert (step_peaks(passes).host_peak_bytes > passes.last.host_base_bytes) == parks


def test_what_is_parked_waits_on_the_host_while_the_next_step_begins() -> None:
    """Its first pass has inputs on the host besides."""
    plan = from_disk(3, Tier.GPU, Update.IN_BACKWARD, inputs=Tier.HOST)
    passes = lower_step(stack(6, dtype="bfloat16"), plan)
    parked = sum(action.host_takes for action in passes.last.actions if action.op is Op.WRITE_BACK)
    first = peaks(passes.first, last=passes.last)
    assert first.host_peak_bytes - peaks(passes.first).host_peak_bytes > 0
    assert first.host_peak_bytes >= passes.first.host_base_bytes + parked
    assert step_peaks(passes).host_peak_bytes >= first.host_peak_bytes


def test_a_buffer_that_another_pass_has_not_emptied_is_refused() -> None:
    plan, profile = from_disk(3, Tier.DISK), stack(6, dtype="bfloat16")
    passes, placement = lower_step(profile, plan), Placement(plan)
    emptied = {action.id for one in passes for action in one.actions if action.op in (Op.FETCH, Op.WRITE)}
    for number, (schedule, _) in enumerate(passes.runs):
        first = next(a for a in schedule.lane(Lane.DISK_READ) if emptied & {*a.after_prev})
        kept = tuple(name for name in first.after_prev if name not in emptied or name.startswith("write.state"))
        wrong = replace(
            schedule, actions=tuple(replace(a, after_prev=kept) if a is first else a for a in schedule.actions)
        )
        runs = tuple((wrong, count) if at == number else (one, count) for at, (one, count) in enumerate(passes.runs))
        with pytest.raises(InfeasiblePlan, match=f"{first.id} goes to a buffer that may not be free yet"):
            verify_step(profile, placement, replace(passes, runs=runs))


def test_sums_on_disk_need_states_there() -> None:
    profile = stack(2)
    with pytest.raises(InfeasiblePlan, match=r"sums of gradients on the disk but states on the host.*use sums=gpu"):
        check_plan(profile, several(plan_with(profile), 2, Tier.DISK))
