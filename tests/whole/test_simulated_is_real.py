"""The lanes of a run and of the simulator do the same: the same actions, in the same order on lanes that work in order,
by the same rule on the others; and both steps have the same form when they are shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

import hightide
import models
from disk_plans import placed
from each_value import each_value
from hightide.doctor.known import load_machine
from hightide.ir.action import Action, Mode, Op, Schedule
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan, Update
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.ir.timeline import MemoryPart, Timeline
from hightide.planner.predict.peaks import peaks
from hightide.planner.predict.simulator import Simulated, simulate
from hightide.planner.verify.compare_records import compare
from hightide.runtime.lanes.queues import KEPT_PASSES
from unit.planner.predict.test_simulator import machine
from unit.runtime.steps import Twins, train_step, twins

NUM_STEPS = 2


def kept(plan: Plan) -> Plan:
    blocks = tuple(replace(block, activation=Activation.KEEP, inputs=Tier.GPU) for block in plan.blocks)
    return replace(plan, blocks=blocks, gpu_limit_bytes=2**23)


def inputs_on_host(plan: Plan) -> Plan:
    blocks = tuple(replace(block, activation=Activation.RECOMPUTE, inputs=Tier.HOST) for block in plan.blocks)
    return replace(plan, blocks=blocks, gpu_limit_bytes=2**23)


def every_second_swapped(plan: Plan) -> Plan:
    assert plan.profile is not None
    blocks = tuple(
        replace(block, activation=Activation.SELECTIVE, inputs=Tier.GPU, held=Tier.HOST if index % 2 else Tier.GPU)
        if block.name and not plan.profile.blocks[index].lazy_head
        else block
        for index, block in enumerate(plan.blocks)
    )
    return replace(plan, blocks=blocks, gpu_limit_bytes=2**23)


def parameters_stay(plan: Plan) -> Plan:
    blocks = tuple(
        replace(block, params=Tier.GPU, states=block.states if index % 2 else Tier.HOST)
        for index, block in enumerate(plan.blocks)
    )
    return replace(plan, blocks=blocks, gpu_limit_bytes=2**23)


PLANS = {  # name -> (limit, edit)
    "streamed": ("200KiB", None),
    "streamed, kept": ("200KiB", kept),
    "streamed, inputs on the host": ("200KiB", inputs_on_host),
    "streamed, every second swapped": ("200KiB", every_second_swapped),
    "parameters persistent": ("200KiB", parameters_stay),
    "half persistent": ("400KiB", None),
    "everything fits": ("8MiB", None),
}
ON_DISK = {
    "all on disk": ("200KiB", partial(placed, homes="all on disk")),
    "every tier, one buffer": ("200KiB", partial(placed, homes="every tier", num_buffers=1)),
}


def wrapped(plan: str, update: Update, tied: bool = False) -> Twins:
    gpu, edit = {**PLANS, **ON_DISK}[plan]
    model, batch = models.llama(tied=tied)
    return twins(model, batch, gpu=gpu, edit=edit, update=update.value)


@dataclass(frozen=True)
class Done:
    lane: Lane
    id: str
    ready: tuple[str, ...] = ()
    ready_dues: tuple[int, ...] = ()


def as_records(schedule: Schedule, simulated: Simulated) -> list[Done]:
    """What the simulator's lanes would have written down."""
    spans = {span.id: span for span in simulated.spans}

    def ready_s(action: Action) -> float:
        names = [*action.after, *([schedule.ticks[action.opens].id] if action.opens >= 0 else [])]
        return max((spans[name].end_s for name in names), default=0.0)

    records = []
    for span in sorted(simulated.spans, key=lambda span: span.end_s):
        ready: list[Action] = []
        if not span.lane.is_in_order:
            waiting = [action for action in schedule.lane(span.lane) if spans[action.id].start_s >= span.start_s]
            # What follows the pass before was ready when that was: only that it was picked tells.
            known = [action for action in waiting if not action.after_prev or action.id == span.id]
            ready = [action for action in known if ready_s(action) <= span.start_s]
        records.append(
            Done(span.lane, span.id, tuple(action.id for action in ready), tuple(action.tick for action in ready))
        )
    return records


def assert_same(pair: Twins, schedule: Schedule, back: int = 0) -> None:
    pair.run.executor.wait_for_updates()
    records = pair.run.lanes.records_of(pair.run.lanes.pass_index - back)
    slow = replace(machine(alone=1e7), disk=load_machine("h200").disk)
    simulated = simulate(schedule, lambda action: 1e-3 if action.call is not None else 0.0, slow)
    dreamt = as_records(schedule, simulated)
    assert compare(schedule, records) == []
    assert compare(schedule, dreamt) == []
    for lane in Lane:
        done, expected = ([record.id for record in one if record.lane is lane] for one in (records, dreamt))
        if lane.is_in_order:
            assert done == expected
        else:
            assert sorted(done) == sorted(expected)


IN_BACKWARD = ("streamed, every second swapped", "parameters persistent", "all on disk")  # whose updates differ most
TIED = ("streamed", "streamed, inputs on the host", "parameters persistent")


def unless(also: bool) -> Any:
    return () if also else pytest.mark.long


@pytest.mark.parametrize(
    ("plan", "update"),
    [
        pytest.param(
            plan, update, marks=unless(plan == "streamed" or (update is Update.DEFERRED) != (plan in IN_BACKWARD))
        )
        for plan in (*PLANS, *ON_DISK)
        for update in Update
    ],
)
def test_executed_equals_simulated(plan: str, update: Update) -> None:
    pair = wrapped(plan, update)
    for _ in range(NUM_STEPS):
        pair.step()
    schedules = {mode: program.schedule for mode, program in pair.run.executor.programs.items()}
    for back in range(NUM_STEPS):
        assert_same(pair, schedules[Mode.TRAIN], back)
    with torch.no_grad():
        pair.model(**models.token_batch(num_samples=2))
    assert_same(pair, schedules[Mode.EVAL])
    pair.close()


# -- bytes ------------------------------------------------------------------------------------------------------------

Phase = tuple[str, str]  # which part of the pass opens an action, and its lane


def phases(schedule: Schedule, num_bytes: dict[str, int]) -> Counter[Phase]:
    """Bytes by the part of a pass in which they may begin to move."""
    last_forward = max(tick.tick for tick in schedule.ticks if tick.op is Op.FORWARD)
    found: Counter[Phase] = Counter()
    for action in schedule.actions:
        step = schedule.ticks[-1].tick
        part = "forward" if action.opens < last_forward else "backward" if action.opens < step else "step"
        if action.lane not in (Lane.COMPUTE, Lane.CPU):
            found[part, str(action.lane)] += num_bytes[action.id]
    return found


@pytest.mark.parametrize(("plan", "update"), each_value(["streamed", *ON_DISK], [*Update]))
def test_each_phase_moves_the_bytes_that_were_simulated(plan: str, update: Update) -> None:
    pair = wrapped(plan, update)
    for _ in range(3):
        pair.step()
    pair.run.executor.wait_for_updates()
    schedule = pair.run.executor.programs[Mode.TRAIN].schedule
    expected = phases(schedule, {action.id: action.num_bytes for action in schedule.actions})
    for back in range(2):  # of the first pass, the persistent parameters are not refreshed
        records = pair.run.lanes.records_of(pair.run.lanes.pass_index - back)
        assert phases(schedule, {record.id: record.num_bytes for record in records}) == expected
    lanes = {lane for _, lane in expected}
    assert ({"disk_read", "disk_write"} <= lanes) == (plan in ON_DISK)
    if plan in ON_DISK:
        late = "step" if update is Update.DEFERRED else "backward"
        assert expected[late, "disk_write"] > 0 and expected["forward", "disk_write"] == 0
    pair.close()


@pytest.mark.parametrize("plan", ON_DISK)
def test_a_step_in_one_call_reads_parameters_twice_and_in_four_calls_eight_times(plan: str) -> None:
    """From disk and to the GPU, simulated and executed: a step of micro-batches against as many calls of the model."""
    moved = {}
    for calls in (1, 4):
        pair = wrapped(plan, Update.DEFERRED)
        schedules = [Mode.TRAIN, *[Mode.ACCUMULATE] * (calls - 1)]
        parts = [{name: value[part::calls] for name, value in pair.batch.items()} for part in range(calls)]
        pair.step()  # the first one refreshes nothing
        for part in parts:
            models.loss_of(pair.model, part).backward()
        first_pass = pair.run.lanes.pass_index - calls + 1
        pair.optimizer.step()
        pair.run.executor.wait_for_updates()
        read, told = 0, 0
        for number, mode in enumerate(schedules):
            schedule = pair.run.executor.programs[mode].schedule
            reads = {a.id: a.num_bytes for a in schedule.lane(Lane.DISK_READ) if a.kind is ChunkKind.PARAM}
            done = {record.id: record.num_bytes for record in pair.run.lanes.records_of(first_pass + number)}
            told += sum(reads.values())
            read += sum(done[name] for name in reads)
        assert read == told
        moved[calls] = read
        once = sum(place.chunk.param_bytes for place in pair.run.chunks.placed if place.home is Tier.DISK)
        pair.close()
    assert once < moved[1] <= 2 * once and moved[4] == 4 * moved[1]


@pytest.mark.parametrize(
    ("plan", "tied"),
    [
        pytest.param(plan, tied, marks=unless(plan == "streamed" or tied == (plan in TIED)))
        for plan in PLANS
        for tied in (False, True)
    ],
)
def test_an_accumulating_pass_equals_its_simulation(plan: str, tied: bool) -> None:
    pair = wrapped(plan, Update.DEFERRED, tied)
    models.loss_of(pair.model, pair.batch).backward()
    train_step(pair.model, pair.optimizer, pair.batch)
    assert_same(pair, pair.run.executor.programs[Mode.ACCUMULATE].schedule)
    pair.close()


@pytest.mark.parametrize(("plan", "update"), each_value(["streamed", "everything fits"], [*Update]))
def test_tied_parameters_equal_their_simulation(plan: str, update: Update) -> None:
    pair = wrapped(plan, update, tied=True)
    for _ in range(2):
        pair.step()
    assert_same(pair, pair.run.executor.programs[Mode.TRAIN].schedule)
    pair.close()


# -- recordings -------------------------------------------------------------------------------------------------------


def recorded(pair: Twins, num_steps: int = NUM_STEPS) -> Timeline:
    with hightide.record(pair.model) as recording:
        for _ in range(num_steps):
            train_step(pair.model, pair.optimizer, pair.batch)
    return recording.timeline


def evaluate(pair: Twins, times: int, batch: dict[str, torch.Tensor] | None = None) -> None:
    with torch.no_grad():
        for _ in range(times):
            pair.model(**(pair.batch if batch is None else batch))


@pytest.mark.parametrize("update", Update)
def test_a_recording_shows_every_action_of_the_last_step(update: Update) -> None:
    pair = wrapped("streamed, inputs on the host", update)
    timeline = recorded(pair)
    schedule = pair.run.executor.programs[Mode.TRAIN].schedule
    shown = {bar.id for bar in timeline.bars if not bar.earlier}
    hidden = {action.id for action in schedule.actions} - shown
    assert all(schedule.by_id[name].lane in (Lane.CPU, Lane.D2H) for name in hidden), "only what outlasts the step"
    assert all(bar.op is schedule.by_id[bar.id].op for bar in timeline.bars)
    compute = [bar for bar in timeline.bars if bar.lane is Lane.COMPUTE and not bar.earlier]
    assert compute[-1].end_s == pytest.approx(timeline.step_s)
    assert all(first.end_s <= second.start_s for first, second in pairwise(compute))
    ratios = [timeline.step_s / pair.run.step_s]
    while not 0.5 < ratios[-1] < 2 and len(ratios) < 10:  # something else may have run between the two moments
        ratios.append(recorded(pair).step_s / pair.run.step_s)
    assert 0.5 < ratios[-1] < 2, ratios
    pair.close()


def test_a_recording_knows_what_the_accelerator_held() -> None:
    pair = wrapped("streamed, kept", Update.DEFERRED)
    timeline = recorded(pair)
    totals = [sum(level.num_bytes) for level in timeline.levels]
    schedule = pair.run.executor.programs[Mode.TRAIN].schedule
    assert len(totals) == 2 * len(schedule.ticks)
    assert max(totals) <= timeline.gpu_peak_bytes <= peaks(schedule).gpu_peak_bytes
    rest = timeline.parts.index(MemoryPart.REST)
    middle = timeline.levels[len(totals) // 2].num_bytes[rest]
    assert middle > 2 * timeline.levels[0].num_bytes[rest], "kept activations pile up until backward"
    pair.close()


def test_a_recording_of_one_step_is_refused_and_costs_nothing_afterwards() -> None:
    pair = wrapped("streamed", Update.DEFERRED)
    with pytest.raises(ValueError, match="this one has 1, do at least 2"):
        recorded(pair, num_steps=1)
    with hightide.record(pair.model):
        train_step(pair.model, pair.optimizer, pair.batch)  # that is refused only when its timeline is asked for
    train_step(pair.model, pair.optimizer, pair.batch)
    assert all(record.gpu_bytes is None for record in pair.run.lanes.records_of(pair.run.lanes.pass_index))
    with pytest.raises(ValueError, match="after the `with` block"), hightide.record(pair.model) as recording:
        recording.timeline  # noqa: B018
    with pytest.raises(ValueError, match="not wrapped"):
        hightide.record(torch.nn.Linear(2, 2))
    pair.close()


def test_an_accumulated_step_is_recorded_by_its_last_pass() -> None:
    pair = wrapped("streamed", Update.DEFERRED)
    with hightide.record(pair.model) as recording:
        for _ in range(2):
            models.loss_of(pair.model, pair.batch).backward()
            train_step(pair.model, pair.optimizer, pair.batch)
    bars = {bar.id: bar for bar in recording.timeline.bars}
    assert any(name.startswith("fetch.grad.") and bar.op is not None for name, bar in bars.items())
    pair.close()


@pytest.mark.parametrize("num_evaluations", [1, 10])
def test_a_recording_shows_the_last_step_whatever_follows_it(num_evaluations: int) -> None:
    pair = wrapped("streamed", Update.DEFERRED)
    with hightide.record(pair.model) as recording:
        for _ in range(3):
            train_step(pair.model, pair.optimizer, pair.batch)
        evaluate(pair, num_evaluations)
    schedule = pair.run.executor.programs[Mode.TRAIN].schedule
    shown = {bar.id for bar in recording.timeline.bars if not bar.earlier}
    assert {tick.id for tick in schedule.ticks} <= shown
    evaluate(pair, 1)
    assert len({record.pass_index for record in pair.run.lanes.records}) <= KEPT_PASSES, "kept no longer"
    pair.close()


def test_evaluations_between_steps_are_not_part_of_a_step() -> None:
    pair = wrapped("streamed", Update.DEFERRED)
    with hightide.record(pair.model) as recording:
        for _ in range(2):
            train_step(pair.model, pair.optimizer, pair.batch)
            evaluate(pair, 8)
    compute = [bar for bar in recording.timeline.bars if bar.lane is Lane.COMPUTE and not bar.earlier]
    schedule = pair.run.executor.programs[Mode.TRAIN].schedule
    assert {bar.id for bar in compute} == {action.id for action in schedule.lane(Lane.COMPUTE)}
    assert len(compute) == len(schedule.lane(Lane.COMPUTE))
    pair.close()


def test_the_peak_of_a_recording_is_that_of_its_last_step() -> None:
    pair = wrapped("everything fits", Update.DEFERRED)
    alone = recorded(pair)
    most = {name: value.repeat(8, 1) for name, value in pair.batch.items()}
    with hightide.record(pair.model) as recording:
        evaluate(pair, 1, most)
        for _ in range(NUM_STEPS):
            train_step(pair.model, pair.optimizer, pair.batch)
        evaluate(pair, 1, most)
    timeline, since_wrapping = recording.timeline, hightide.stats(pair.model).peak_bytes["gpu"]
    assert max(sum(level.num_bytes) for level in timeline.levels) <= timeline.gpu_peak_bytes
    assert timeline.gpu_peak_bytes == alone.gpu_peak_bytes < since_wrapping
    assert timeline.gpu_reserved_bytes is None
    pair.close()


def test_a_recording_inside_another_is_refused_and_the_outer_one_goes_on() -> None:
    pair = wrapped("streamed", Update.DEFERRED)
    with hightide.record(pair.model) as outer:
        with pytest.raises(ValueError, match="recorded already"), hightide.record(pair.model):
            pass
        for _ in range(2):
            train_step(pair.model, pair.optimizer, pair.batch)
    assert outer.timeline.levels
    recorded(pair)
    pair.close()
