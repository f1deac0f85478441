"""The tide: GPU memory over a simulated step by what it is used for, and the lanes' bars."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hightide.ir.action import Mode, Op
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, Selective, Work
from hightide.ir.codec import from_json, to_json
from hightide.ir.passes import Passes
from hightide.ir.plan import Plan, Update
from hightide.ir.tier import Lane, Tier
from hightide.ir.timeline import MemoryPart, Timeline
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import peaks
from hightide.planner.predict.simulator import simulate
from hightide.planner.predict.tide import base_parts, simulated_timeline
from hightide.planner.solution import Solution
from hightide.planner.waiting import away
from unit.planner.predict.test_simulator import machine, one_second
from unit.planner.profiles import plan_with, plans, profiles, stack

PROFILE = stack(4)
LEVELS = (MemoryPart.KEPT, MemoryPart.SELECTIVE, MemoryPart.SWAPPED)


def timeline_of(plan: Plan, profile=PROFILE, speed: float = 4096.0, mode: Mode = Mode.TRAIN) -> Timeline:
    schedule = lower(profile, plan, mode)
    solution = Solution(profile, Placement(plan), Passes.of(schedule), peaks(schedule))
    on = machine(alone=speed, shared=0.7)
    return simulated_timeline(solution, simulate(solution.passes, one_second, on), on)


def most(timeline: Timeline, part: MemoryPart) -> int:
    at = timeline.parts.index(part)
    return max(level.num_bytes[at] for level in timeline.levels)


@pytest.mark.parametrize("update", Update)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("params", [Tier.GPU, Tier.HOST])
def test_the_peak_is_the_forecast_where_no_transfer_frees_memory(
    params: Tier, activation: Activation, update: Update
) -> None:
    plan = plan_with(PROFILE, params=params, activation=activation, update=update)
    assert timeline_of(plan).gpu_peak_bytes == peaks(lower(PROFILE, plan, Mode.TRAIN)).gpu_peak_bytes


@given(st.data())
def test_the_peak_is_never_above_the_forecast_and_all_is_given_back(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile, data.draw(st.sampled_from(list(Update)))))
    timeline = timeline_of(plan, profile, data.draw(st.sampled_from([1.0, 4096.0, 1e9])))
    assert timeline.gpu_peak_bytes <= peaks(lower(profile, plan, Mode.TRAIN)).gpu_peak_bytes
    assert all(min(level.num_bytes) >= 0 for level in timeline.levels)
    assert timeline.levels[0].num_bytes == timeline.levels[-1].num_bytes, "a step ends as it begins"


def test_inputs_stay_on_the_gpu_until_their_transfer_is_through() -> None:
    plan = plan_with(PROFILE, inputs=Tier.HOST)
    timeline = timeline_of(plan)
    stash = next(bar for bar in timeline.bars if bar.op is Op.STASH and bar.num_bytes)
    at = timeline.parts.index(MemoryPart.INPUTS)
    then = next(place for place, level in enumerate(timeline.levels) if level.at_s == stash.end_s)
    before, after = (timeline.levels[place].num_bytes[at] for place in (then - 1, then))
    assert before - after == lower(PROFILE, plan, Mode.TRAIN).by_id[stash.id].gpu_gives == stash.num_bytes


def test_memory_is_told_apart() -> None:
    rule = Selective(Affine(0, 512), Work(), flop_per_byte=1, num_held=1)
    profile = replace(PROFILE, calls=tuple(replace(call, selective=rule) for call in PROFILE.calls))
    plans = [plan_with(profile, activation=activation) for activation in Activation]
    lean, part, keep = (timeline_of(plan, profile=profile) for plan in plans)
    stash = timeline_of(plan_with(PROFILE, inputs=Tier.HOST), speed=1e9)
    whole = timeline_of(plan_with(PROFILE, params=Tier.GPU, states=Tier.GPU))
    held = [[most(one, part) for part in LEVELS] for one in (lean, part, keep)]
    logits = held[0][0]
    assert held[0] == [logits, 0, 0] and held[2][1:] == [0, 0]
    assert held[1][0] == logits and 0 < held[1][1] < held[2][0] - logits
    assert most(stash, MemoryPart.INPUTS) < most(lean, MemoryPart.INPUTS)
    assert (
        (most(whole, MemoryPart.SLOTS), most(whole, MemoryPart.GRADIENTS))
        == (0, 0)
        < (most(whole, MemoryPart.PERSISTENT), 1)
    )
    assert most(lean, MemoryPart.PERSISTENT) == 0 < most(lean, MemoryPart.SLOTS)
    assert most(lean, MemoryPart.BATCH) == PROFILE.batch_bytes + PROFILE.buffer_bytes


@pytest.mark.parametrize("activation", [Activation.SELECTIVE, Activation.KEEP])
def test_what_is_swapped_has_a_part_and_bars_of_its_own(activation: Activation) -> None:
    rule = Selective(Affine(0, 512), Work(), flop_per_byte=1, num_held=1)
    profile = replace(PROFILE, calls=tuple(replace(call, selective=rule) for call in PROFILE.calls))
    plan = plan_with(profile, activation=activation, inputs=Tier.HOST)
    *layers, head = plan.blocks
    plan = replace(plan, blocks=(*(replace(block, held=Tier.HOST) for block in layers), head))
    timeline = timeline_of(plan, profile=profile, speed=1e9)
    stayed = timeline_of(plan_with(profile, activation=activation), profile=profile)
    logits = most(timeline_of(plan_with(profile), profile=profile), MemoryPart.KEPT)
    assert [most(timeline, part) for part in LEVELS][:2] == [logits, 0]
    level = MemoryPart.SELECTIVE if activation is Activation.SELECTIVE else MemoryPart.KEPT
    assert 0 < most(timeline, MemoryPart.SWAPPED) < most(stayed, level), "one or two blocks at a time"
    moved = [bar for bar in timeline.bars if bar.op in (Op.STASH, Op.UNSTASH) and not bar.earlier]
    for bar in moved:
        call = profile.calls[int(bar.id.split(".")[1])]
        gone = away(plan, call)
        assert (bar.num_bytes, bar.held_bytes) == (gone.num_bytes, gone.held_bytes)
    assert any(0 < bar.held_bytes < bar.num_bytes for bar in moved), "inputs and activations in one copy"
    assert not any(bar.held_bytes for bar in timeline.bars if bar not in moved)


def test_what_is_always_there_is_the_schedules_base() -> None:
    plan = plan_with(PROFILE, states=Tier.HOST, params=Tier.GPU)
    base = lower(PROFILE, plan, Mode.TRAIN).gpu_base_bytes
    assert sum(base_parts(Placement(plan), base).values()) == base


def test_bars_say_what_they_waited_for_and_for_how_long() -> None:
    timeline = timeline_of(plan_with(PROFILE), speed=1024.0)  # 4 and more seconds a chunk against one of compute
    bars = {bar.id: bar for bar in timeline.bars if not bar.earlier}
    tick = bars["fwd.2"]
    assert tick.waited_for == "fetch.param.2@fwd.2"
    free_s = max(bar.end_s for bar in bars.values() if bar.lane is Lane.COMPUTE and bar.end_s <= tick.start_s)
    assert tick.waited_s == pytest.approx(tick.start_s - free_s) and tick.waited_s > 3.0
    assert bars["fetch.param.2@fwd.2"].num_bytes > 0
    assert any(bar.earlier and bar.op is Op.UPDATE for bar in timeline.bars), "updates reach into this step"


@given(st.data())
def test_busy_and_stalled_times_are_the_simulators(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile, data.draw(st.sampled_from(list(Update)))))
    schedule = lower(profile, plan, Mode.TRAIN)
    simulated = simulate(schedule, one_second, machine(alone=2048.0, shared=0.7))
    timeline = simulated_timeline(Solution.of(profile, plan), simulated, machine())
    for lane in timeline.lanes:
        assert lane.busy_s == pytest.approx(simulated.busy_s[lane.lane], abs=1e-6)
        assert lane.stall_s == pytest.approx(simulated.stall_s.get(lane.lane, 0.0), abs=1e-6)


def test_a_timeline_survives_its_file(tmp_path) -> None:
    timeline = timeline_of(plan_with(PROFILE, inputs=Tier.HOST))
    timeline.save(tmp_path / "run.json")
    assert Timeline.load(tmp_path / "run.json") == timeline
    assert from_json(Timeline, to_json(replace(timeline, bars=()))).bars == ()
    with pytest.raises(ValueError, match="cannot read the timeline"):
        Timeline.load(tmp_path / "nothing.json")


def test_an_evaluation_has_a_tide_too() -> None:
    timeline = timeline_of(plan_with(PROFILE), mode=Mode.EVAL)
    assert timeline.lanes[list(Lane).index(Lane.H2D)].busy_s > 0
