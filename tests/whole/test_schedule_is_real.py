"""The executor does what the schedule says, and says what it did."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hightide
import models
from each_value import each_value
from hightide.ir.action import Action, Mode, Op, Schedule
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.verify.compare_records import compare
from hightide.runtime.lanes.queues import LaneRecord
from hightide.runtime.schedule.program import Program
from unit.runtime.steps import Twins, train_step, twins
from waiting import soon


def two_slots_more(plan: Plan) -> Plan:
    return replace(plan, num_slots=plan.num_slots + 2, num_grad_slots=plan.num_grad_slots + 1, gpu_limit_bytes=2**20)


def streamed_and_kept(plan: Plan) -> Plan:
    blocks = [
        replace(block, params=Tier.HOST, states=Tier.HOST, inputs=Tier.GPU, activation=Activation.KEEP)
        for block in plan.blocks
    ]
    return replace(plan, num_slots=3, num_grad_slots=2, gpu_limit_bytes=2**23, blocks=tuple(blocks))


PLANS = {  # name -> (limit, edit)
    "lean": ("200KiB", None),
    "half": ("400KiB", None),
    "everything fits": ("8MiB", None),
    "more slots": ("200KiB", two_slots_more),
    "streamed, kept": ("200KiB", streamed_and_kept),
}


def wrapped(plan: str = "lean", update: str = "deferred") -> Twins:
    model, batch = models.llama()
    gpu, edit = PLANS[plan]
    return twins(model, batch, gpu=gpu, edit=edit, update=update)


def schedule(pair: Twins, mode: Mode = Mode.TRAIN) -> Schedule:
    return pair.run.executor.programs[mode].schedule


def records(pair: Twins, back: int = 0) -> list[LaneRecord]:
    """Of the last pass, with what it left for the next; of the pass before it with `back=1`."""
    pair.run.executor.wait_for_updates()
    return pair.run.lanes.records_of(pair.run.lanes.pass_index - back)


def install(pair: Twins, edited: Schedule) -> None:
    pair.run.executor.programs[edited.mode] = Program(edited)


def edit(base: Schedule, **changes: Action | None) -> Schedule:
    """A schedule with some actions replaced, or dropped where the change is None."""
    actions = [changes.get(action.id, action) for action in base.actions]
    kept = [action for action in actions if action is not None]
    gone = {name for name, action in changes.items() if action is None}
    kept = [replace(action, after=tuple(name for name in action.after if name not in gone)) for action in kept]
    return replace(base, actions=tuple(kept))


@pytest.mark.parametrize(("plan", "update"), each_value(list(PLANS), ("deferred", "in_backward")))
def test_executed_equals_scheduled(plan: str, update: str) -> None:
    pair = wrapped(plan, update)
    for _ in range(2):
        pair.assert_equal(*pair.step())
    for back in range(2):
        assert compare(schedule(pair), records(pair, back)) == []
    with torch.no_grad():
        pair.model(**models.token_batch(num_samples=2))
    assert compare(schedule(pair, Mode.EVAL), records(pair)) == []
    assert hightide.stats(pair.model).deviations == 0
    pair.close()


@pytest.mark.parametrize("plan", PLANS)
def test_accumulation_follows_its_own_schedule(plan: str) -> None:
    pair = wrapped(plan)

    def accumulate(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> torch.Tensor:
        for _ in range(2):
            models.loss_of(model, batch).backward()
        return train_step(model, optimizer, batch)

    for _ in range(2):
        pair.assert_equal(*pair.step(accumulate))
        followed = [compare(schedule(pair, Mode.ACCUMULATE), records(pair))]
        # A pass without a step leaves the step and its updates undone, and nothing else.
        for back, mode in ((1, Mode.ACCUMULATE), (2, Mode.TRAIN)):
            followed.append([line for line in compare(schedule(pair, mode), records(pair, back)) if not of_step(line)])
        assert followed == [[], [], []]
    pair.close()


def of_step(line: str) -> bool:
    return line.endswith("was scheduled and did not run") and ("step" in line.split()[1] or "update" in line.split()[1])


def fetch_of(pair: Twins, chunk: int) -> Action:
    found = schedule(pair).actions
    return next(a for a in found if a.op is Op.FETCH and a.kind is ChunkKind.PARAM and a.chunk == chunk)


def slot_of_first_fetch(pair: Twins, monkeypatch: pytest.MonkeyPatch, chunk: int) -> list[int]:
    """Slots that the lane really copies into, seen at the performer."""
    seen: list[int] = []
    original = pair.run.performer.fetch_param

    def fetch_param(index: int, slot: int) -> object:
        if index == chunk:
            seen.append(slot)
        return original(index, slot)

    monkeypatch.setattr(pair.run.performer, "fetch_param", fetch_param)
    return seen


def test_an_edited_target_slot_is_where_the_chunk_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = wrapped("more slots")
    pair.step()
    chunk = max(a.chunk for a in schedule(pair).actions if a.op is Op.FETCH and a.kind is ChunkKind.PARAM)
    planned = fetch_of(pair, chunk)
    free = pair.run.plan.num_slots
    pair.close()

    pair = wrapped("more slots")
    pair.step()
    seen = slot_of_first_fetch(pair, monkeypatch, chunk)
    other = (planned.target.slot + 1) % free
    install(pair, edit(schedule(pair), **{planned.id: replace(planned, target=replace(planned.target, slot=other))}))
    pair.assert_equal(*pair.step())
    assert seen[0] == other != planned.target.slot
    pair.close()


def test_a_dropped_fetch_happens_on_demand_and_is_reported() -> None:
    pair = wrapped("more slots")
    pair.step()
    whole = schedule(pair)
    planned = next(
        a for a in whole.actions if a.op is Op.FETCH and a.kind is ChunkKind.PARAM and a.target.slot is not None
    )
    install(pair, edit(whole, **{planned.id: None}))
    pair.assert_equal(*pair.step())
    done = {record.id for record in records(pair)}
    demanded = [name for name in done if name.startswith(f"demand.fetch.{planned.chunk}.")]
    assert planned.id not in done and len(demanded) == 1
    lines = compare(whole, records(pair))
    assert f"h2d: {planned.id} was scheduled and did not run" in lines
    assert f"h2d: {demanded[0]} ran and was not scheduled" in lines
    pair.close()


def test_an_edited_dependency_changes_the_moment_of_an_action() -> None:
    """A fetch that opens later starts later: after the tick that opens it now."""
    pair = wrapped("more slots")
    pair.step()
    whole = schedule(pair)
    early = next(a for a in whole.lane(Lane.H2D) if a.op is Op.FETCH and a.opens == -1 and a.tick >= 2)
    late_opens = early.tick - 1

    def started_after_tick() -> bool:
        spans = {record.id: record for record in records(pair)}
        return spans[early.id].started_s > spans[whole.ticks[late_opens].id].ended_s

    behind = {a.id: replace(a, opens=max(a.opens, late_opens)) for a in whole.lane(Lane.H2D) if a.tick >= early.tick}

    def started_before() -> bool:
        pair.step()
        return not started_after_tick()

    assert soon(started_before)  # it may, and does unless its thread is kept from running
    install(pair, edit(whole, **behind))
    for _ in range(3):
        pair.assert_equal(*pair.step())
        assert started_after_tick()
    pair.close()


def test_a_reordering_in_the_records_is_found() -> None:
    pair = wrapped()
    pair.step()
    done = records(pair)
    for lane in (Lane.COMPUTE, Lane.H2D, Lane.D2H):
        first, second = [place for place, record in enumerate(done) if record.lane is lane][:2]
        planted = list(done)
        planted[first], planted[second] = planted[second], planted[first]
        assert len(compare(schedule(pair), planted)) == 2
    assert compare(schedule(pair), done) == []
    pair.close()


def test_a_reordering_in_the_execution_is_found() -> None:
    """The executor runs an edited schedule; the comparison with the original fails, with the edited one it does not."""
    pair = wrapped("more slots")
    pair.step()
    whole = schedule(pair)
    lane = whole.lane(Lane.H2D)
    places = [at for at in range(len(lane) - 1) if lane[at].opens == lane[at + 1].opens]
    first = lane[places[0]], lane[places[0] + 1]
    order = {first[0].id: first[1], first[1].id: first[0]}
    install(pair, edit(whole, **order))
    pair.assert_equal(*pair.step())
    assert compare(whole, records(pair)) == [
        f"h2d: {first[1].id} ran where {first[0].id} was scheduled",
        f"h2d: {first[0].id} ran where {first[1].id} was scheduled",
    ]
    assert compare(schedule(pair), records(pair)) == []
    pair.close()


def test_a_pick_against_the_rule_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cpu lane is made to take what is due last. Updates all become ready at step(), so it has a choice."""
    from hightide.runtime.lanes import queues

    pair = wrapped()
    pair.step()
    assert compare(schedule(pair), records(pair)) == []
    right = queues.DueFirst._pop_ready

    def due_last(queue: queues.DueFirst) -> queues.Task | None:
        if len(queue._heap) > 1:
            last = max(queue._heap)
            queue._heap.remove(last)
            queue._heap.insert(0, last)
            task = queue._tasks.pop(last[1])
            queue._heap.pop(0)
            queues.heapq.heapify(queue._heap)
            task.ready, task.ready_dues = tuple(queue._ready_ids.values()), tuple(queue._ready_dues.values())
            del queue._ready_ids[task.order], queue._ready_dues[task.order]
            return task
        return right(queue)

    monkeypatch.setattr(queues.DueFirst, "_pop_ready", due_last)
    models.loss_of(pair.model, pair.batch).backward()
    with pair.run.lanes._state.lock:  # the lane cannot pick before all updates are there
        pair.optimizer.step()
    lines = compare(schedule(pair), records(pair))
    assert lines and all("was ready and due earlier" in line for line in lines)
    pair.close()


def test_what_is_due_can_be_compared_across_passes() -> None:
    """What an update leaves over is due at a tick of the pass that follows, and before what that one needs later."""
    pair = wrapped()
    pair.step()
    pair.step()
    planned = schedule(pair)
    found = [{record.id: record.due for record in records(pair, back) if record.lane is Lane.CPU} for back in (1, 0)]
    first, second = ({due - planned.by_id[name].tick for name, due in dues.items()} for dues in found)
    assert len(first) == len(second) == 1 and second.pop() - first.pop() == len(planned.ticks)
    pair.close()
