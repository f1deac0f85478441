"""The simulator: known times, the lanes' rules, shared memory, the steady state."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hightide.ir.action import Action, Mode, Op, Schedule
from hightide.ir.machine import Machine, Speeds
from hightide.ir.plan import Update
from hightide.ir.tier import Lane, Tier
from hightide.planner.lower import lower
from hightide.planner.predict.simulator import simulate
from unit.planner.profiles import plan_with, plans, profiles, stack

H, D, C = Lane.H2D, Lane.D2H, Lane.CPU


def machine(alone: float = 1.0, shared: float = 1.0, latency_s: float = 0.0) -> Machine:
    """Every lane moves `alone` bytes a second, and `shared` of that while another is busy."""
    sets = [(H,), (D,), (C,), (H, D), (H, C), (D, C), (H, D, C)]
    speeds = tuple(Speeds(busy, (alone if len(busy) == 1 else alone * shared,) * len(busy)) for busy in sets)
    return Machine("test", "made up", speeds, latency_s)


def tick(index: int, op: Op = Op.FORWARD, **options: object) -> Action:
    return Action(id=f"tick.{index}", op=op, lane=Lane.COMPUTE, tick=index, opens=index - 1, call=index, **options)  # type: ignore[arg-type]


def copy(name: str, lane: Lane, num_bytes: int, **options: object) -> Action:
    op = Op.UPDATE if lane is C else Op.FETCH
    return Action(**{"id": name, "op": op, "lane": lane, "tick": 0, "num_bytes": num_bytes, **options})  # type: ignore[arg-type]


def schedule(*actions: Action) -> Schedule:
    return Schedule(Mode.TRAIN, 0, 0, actions)


def one_second(action: Action) -> float:
    return 1.0


def test_a_tick_waits_for_its_fetch_and_the_stall_is_the_lanes() -> None:
    fetch = copy("fetch", H, 3, tick=1)
    result = simulate(schedule(fetch, tick(0), tick(1, after=("fetch",))), one_second, machine(), num_steps=1)
    assert result.step_s == pytest.approx(4.0)  # the fetch hides one second behind the first tick
    assert result.stall_s == {H: pytest.approx(2.0)}
    assert {span.id: (span.start_s, span.end_s) for span in result.spans}["tick.1"] == pytest.approx((3.0, 4.0))


def test_latency_comes_before_the_first_byte() -> None:
    fetch = copy("fetch", H, 3, tick=0)
    result = simulate(schedule(fetch, tick(0, after=("fetch",))), one_second, machine(latency_s=0.5), num_steps=1)
    assert result.step_s == pytest.approx(4.5)


def test_lanes_that_share_memory_slow_each_other_down() -> None:
    both = schedule(copy("in", H, 4), copy("out", D, 2), tick(0, after=("in", "out")))
    result = simulate(both, lambda _: 0.0, machine(shared=0.5), num_steps=1)
    # Both at half speed until the shorter one is through after 4 s, then the rest of the longer one alone.
    assert {span.id: span.end_s for span in result.spans} == pytest.approx({"out": 4.0, "in": 6.0, "tick.0": 6.0})


def test_an_update_in_parts_takes_as_long_as_its_first_part_was_measured() -> None:
    """Of others nothing changes, and the second part has the speed of its bytes."""
    actions = schedule(
        tick(0),
        copy("first", C, 4, tick=1, chunk=0),
        copy("states", C, 4, tick=2, chunk=0, op=Op.SETTLE, after=("first",)),
        copy("whole", C, 4, tick=3, chunk=1, after=("states",)),
        tick(1, after=("whole",)),
    )
    for first_part, ends in ((None, (4.0, 8.0, 12.0)), (1.5, (6.0, 10.0, 14.0))):
        result = simulate(actions, one_second, replace(machine(), first_part=first_part), num_steps=1)
        assert tuple(span.end_s for span in result.spans if span.lane is C) == pytest.approx(ends)


def test_the_cpu_lane_takes_what_is_due_first_among_the_ready() -> None:
    actions = schedule(
        tick(0),
        copy("late", C, 2, tick=9, opens=0),
        copy("later", C, 2, tick=10, opens=0),
        copy("urgent", C, 2, tick=5, opens=1),
        tick(1),
        tick(2, after=("late", "later", "urgent")),
    )
    result = simulate(actions, one_second, machine(), num_steps=1)
    order = [span.id for span in result.spans if span.lane is C]
    assert order == ["late", "urgent", "later"]  # it cannot wait for what is not ready


def test_updates_reach_into_the_next_pass() -> None:
    """Four seconds of update behind two of compute: the steady state is the update's."""
    fetch = copy("fetch", H, 1, after_prev=("update",))
    update = copy("update", C, 4, tick=2, opens=0)
    actions = schedule(fetch, tick(0, after=("fetch",)), tick(1), update)
    result = simulate(actions, one_second, machine())
    assert result.step_s == pytest.approx(1.0 + 4.0 + 1.0)  # tick.0 opens the update, whose end the next fetch awaits
    assert result.busy_s[C] == pytest.approx(4.0)


def test_a_schedule_that_locks_up_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"locks up at tick\.0"):
        simulate(schedule(tick(0, after=("never",)), copy("never", H, 1, opens=0)), one_second, machine())


def test_a_machine_without_a_speed_is_refused() -> None:
    with pytest.raises(ValueError, match="no speeds for: h2d"):
        replace(machine(), speeds=machine().speeds[1:])


@given(st.data())
def test_actions_run_once_after_what_they_wait_for_and_in_their_lanes_order(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile, data.draw(st.sampled_from(list(Update)))))
    lowered = lower(profile, plan, Mode.TRAIN)
    result = simulate(lowered, lambda action: len(action.id) * 0.1, machine(alone=4096.0, shared=0.7))
    spans = {span.id: span for span in result.spans}
    unfinished = {action.id for action in lowered.actions} - spans.keys()
    assert all(lowered.by_id[name].lane in (C, D) for name in unfinished), "only gradients and updates outlast a pass"
    for action in lowered.actions:
        for name in action.after:
            if action.id in spans and name in spans:
                assert spans[name].end_s <= spans[action.id].start_s + 1e-9
    for lane in Lane:
        if lane.is_in_order:
            done = [span.id for span in sorted(result.spans, key=lambda span: span.end_s) if span.lane is lane]
            assert done == [action.id for action in lowered.lane(lane)][: len(done)]
    total = result.busy_s[Lane.COMPUTE] + sum(result.stall_s.values())
    assert total == pytest.approx(result.step_s, rel=1e-6)


def test_a_96_block_model_takes_milliseconds() -> None:
    profile = stack(96, dtype="bfloat16")
    lowered = lower(profile, plan_with(profile, inputs=Tier.HOST, update=Update.IN_BACKWARD), Mode.TRAIN)
    spent_s = []
    for _ in range(3):
        started_s = time.process_time()
        simulate(lowered, one_second, machine(alone=1e6, shared=0.7), num_steps=4)
        spent_s.append((time.process_time() - started_s) / 4)
    assert min(spent_s) < 0.1  # 9 ms a step on an idle core
