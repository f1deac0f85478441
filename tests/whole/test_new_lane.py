"""A lane that nobody knows yet goes through all that reads schedules: it is data, and no module names it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hightide.ir import codec
from hightide.ir.action import Action, Mode, Op, Schedule
from hightide.ir.machine import Machine, Speeds
from hightide.ir.passes import Passes
from hightide.ir.tier import Lane, Picking, Tier
from hightide.ir.timeline import Timeline
from hightide.observe.timing import measure
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import peaks
from hightide.planner.predict.simulator import Span, simulate
from hightide.planner.predict.tide import SIMULATED_PARTS, simulated_timeline, step_timeline, tide
from hightide.planner.solution import Solution
from hightide.planner.verify import action_form as form
from hightide.planner.verify.compare_records import compare
from hightide.planner.verify.precedence import Precedence
from hightide.planner.verify.verify_schedule import verify
from hightide.report.page import timeline_html
from hightide.report.summary import rows
from hightide.runtime.lanes import lanes as runtime_lanes
from unit.planner.predict.test_simulator import copy, machine, one_second, schedule, tick
from unit.planner.profiles import plan_with, stack
from unit.planner.random_lanes import RandomLanes
from unit.report.test_page import data_of

PROFILE = stack(4)
PLAN = replace(plan_with(PROFILE, inputs=Tier.HOST), gpu_limit_bytes=1 << 50, host_limit_bytes=1 << 50)


@pytest.fixture(params=list(Picking))
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lane]:
    """Block inputs leave on it."""
    lane = Lane.add("network", request.param, "between GPUs")
    monkeypatch.setitem(form._FORMS, Op.STASH, form._FORMS[Op.STASH]._replace(lane=lane))
    yield lane
    del Lane.known["network"]


@pytest.fixture
def planned(network: Lane) -> Schedule:
    known = lower(PROFILE, PLAN, Mode.TRAIN)
    return edited(known, *(action.changed(lane=network) for action in known.actions if action.op is Op.STASH))


def edited(old: Schedule, *actions: Action) -> Schedule:
    new = {action.id: action for action in actions}
    return replace(old, actions=tuple(new.get(action.id, action) for action in old.actions))


def with_speeds(*speeds: Speeds) -> Machine:
    known = machine(alone=1000.0, shared=0.7)
    return replace(known, speeds=(*known.speeds, *speeds))


def test_its_name_is_all_that_is_written_and_read(network: Lane, planned: Schedule) -> None:
    assert Lane("network") is network is pickle.loads(pickle.dumps(network)) and list(Lane)[-1] is network
    assert "\nnetwork " in planned.to_text() and " network:" in planned.to_text()
    made = with_speeds(Speeds((network,), (7.0,)))
    assert codec.from_json(Machine, codec.to_json(made)) == made
    with pytest.raises(ValueError, match="already"):
        Lane.add("network", Picking.IN_ORDER, "once more")


def test_only_a_lane_that_works_in_order_orders_its_actions(network: Lane, planned: Schedule) -> None:
    first, second = (action.id for action in planned.lane(network)[:2])
    free = edited(planned, planned.by_id[second].changed(after=(), opens=-1))
    assert Precedence(free).before(first, second) is network.is_in_order


def test_its_orders_are_verified(network: Lane, planned: Schedule) -> None:
    verify(PROFILE, Placement(PLAN), planned)
    back = next(action for action in planned.actions if action.op is Op.UNSTASH)
    with pytest.raises(InfeasiblePlan, match="may still be running"):
        verify(PROFILE, Placement(PLAN), edited(planned, back.changed(after=())))


def test_without_contention_it_runs_at_its_own_speed(network: Lane) -> None:
    both = schedule(copy("in", Lane.H2D, 3000), copy("all", network, 10), tick(0, after=("in", "all")))
    made = with_speeds(Speeds((network,), (2.0,)))
    assert made.speeds_of(set(Lane) - {Lane.COMPUTE, Lane.DISK_READ, Lane.DISK_WRITE, Lane.SAVE})[network] == 2.0
    result = simulate(both, lambda _: 0.0, made, num_steps=1)
    assert {span.id: span.end_s for span in result.spans} == pytest.approx({"in": 3.0, "all": 5.0, "tick.0": 5.0})
    assert result.stall_s == {network: pytest.approx(5.0)} and result.busy_s[network] == pytest.approx(5.0)
    with pytest.raises(ValueError, match="says nothing about its network"):
        simulate(both, lambda _: 0.0, machine(), num_steps=1)


def test_lanes_slow_it_down_that_it_was_measured_with(network: Lane) -> None:
    both = schedule(copy("in", Lane.H2D, 3000), copy("all", network, 10), tick(0, after=("in", "all")))
    made = with_speeds(Speeds((network,), (2.0,)), Speeds((network, Lane.H2D), (1.0, 500.0)))
    result = simulate(both, lambda _: 0.0, made, num_steps=1)
    # Both are slow for 6 s; then 4 of its 10 bytes are left, at its own speed.
    assert {span.id: span.end_s for span in result.spans} == pytest.approx({"in": 6.0, "all": 8.0, "tick.0": 8.0})
    # No measurement has all three. Two of them were measured together, twice: the slower one counts.
    assert made.speeds_of({network, Lane.H2D, Lane.CPU}) == {network: 1.0, Lane.H2D: 500.0, Lane.CPU: 700.0}


def test_what_it_did_is_compared(network: Lane, planned: Schedule) -> None:
    records = RandomLanes(PLAN, planned, seed=0).run().records
    assert compare(planned, records) == []
    lost = next(record for record in records if record.lane is network)
    records.remove(lost)
    assert compare(planned, records) == [f"network: {lost.id} was scheduled and did not run"]


def test_a_simulated_step_shows_it(network: Lane, planned: Schedule) -> None:
    made = with_speeds(Speeds((network,), (300.0,)))
    solution = Solution(PROFILE, Placement(PLAN), Passes.of(planned), peaks(planned))
    timeline = simulated_timeline(solution, simulate(planned, one_second, made), made)
    assert codec.from_json(Timeline, codec.to_json(timeline)) == timeline
    panel = data_of(timeline_html("a plan", timeline))["panels"][0]
    assert panel["lanes"][-1] == ["network", "between GPUs"]
    stashed = [bar for bar in panel["bars"] if bar[0] == len(panel["lanes"]) - 1]
    assert [bar[4] for bar in stashed] == [action.id for action in planned.lane(network)]
    assert "network busy" in [row.name for row in rows([timeline])]


def test_what_its_thread_records_becomes_a_timeline(
    network: Lane, planned: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(runtime_lanes.WORKERS, network, "hightide-network")
    lanes = runtime_lanes.Lanes(num_update_threads=1)
    steps = []
    for _ in range(2):
        lanes.begin_pass()
        for action in planned.lane(network):
            lanes.wait(lanes.submit(action.id, network, action.tick, [], lambda: None), network)
        lanes.run_inline(planned.ticks[-1].id, lambda: None)
        steps.append(lanes.records_of(lanes.pass_index))
    lanes.drain()
    lanes.close()
    assert measure(steps).lane_s[network] > 0
    spans = [Span(one.pass_index, one.lane, one.id, one.started_s, one.ended_s) for one in steps[-1]]
    window_s = (spans[0].start_s, spans[-1].end_s)
    schedules = {spans[0].pass_index: planned}
    levels = tide(PROFILE, Placement(PLAN), schedules, spans, window_s[0])
    timeline = step_timeline(PLAN, schedules, spans, window_s, SIMULATED_PARTS, levels, (0, None), "measured here")
    bars = [bar["id"] for bar in json.loads(codec.to_json(timeline))["bars"] if bar["lane"] == "network"]
    assert bars == [action.id for action in planned.lane(network)]
    assert "between GPUs" in timeline_html("a run", timeline, timeline)
