"""What else happens while a snapshot is read: it ends early, somebody changes values, the run moves or ends, a lane
fails. Nobody hangs, nothing is left behind, and what was read is right or refused."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import disk_plans
import hightide
import models
from hightide.ir.plan import Plan
from hightide.ir.refusal import Refused
from hightide.ir.tier import Lane, Tier
from hightide.planner.solution import Solution
from hightide.report.page import timeline_html
from hightide.runtime import run_values as run_module
from hightide.runtime.saving.snapshot import Snapshot
from hightide.runtime.saving.tiles import PARAM
from hightide.stores.ticket import Ticket
from snapshot_readers import Case, Reader, Training, Values, assert_same_bits, with_spare

PLENTY, NONE = 2**22, 0


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "TILE_BYTES", 2048)
    monkeypatch.setattr(run_module, "SMALL_TILE_BYTES", 2048)


def mixed(index: int) -> tuple[Tier, Tier]:
    return [(Tier.HOST, Tier.HOST), (Tier.GPU, Tier.GPU), (Tier.GPU, Tier.HOST)][index % 3]


def begun(spare: int = PLENTY, update: str = "deferred", homes: Any = mixed, steps: int = 2) -> Training:
    def placed(plan: Plan) -> Plan:
        return with_spare(disk_plans.placed(plan, homes), spare)

    training = Case(lambda: models.hand_written(num_layers=4), placed, {"update": update}).begin()
    training.steps(steps)
    return training


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# -- it ends early ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [PLENTY, NONE])
def test_one_that_is_closed_half_way_lets_training_go_on(spare: int) -> None:
    training, twin = begun(spare), begun(spare)
    snapshot = training.run.snapshot()
    values = snapshot.values()
    for _ in range(5):
        next(values)
    closing = threading.Timer(0.2, snapshot.close)  # without memory, updates wait until then
    closing.start()
    training.steps(2)
    closing.join()
    snapshot.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(values)
    twin.steps(2)
    assert_same_bits(training.at_rest(), twin.at_rest())
    assert (
        training.run.performer.updating.saving is None
        and "copies for a checkpoint" not in training.run.host.breakdown()
    )
    assert_same_bits(Reader(training.run.snapshot()).values(), twin.at_rest())
    training.close()
    twin.close()


def test_a_reader_that_fails_lets_training_go_on() -> None:
    training = begun(NONE)

    def read(snapshot: Snapshot) -> None:
        for number, _ in enumerate(snapshot.values()):
            if number == 3:
                raise OSError("the disk is full")

    failures: list[type] = []

    def writes() -> None:
        try:
            read(training.run.snapshot())
        except OSError as error:
            failures.append(type(error))

    writer = in_thread(writes)
    training.steps(2)
    writer.join(10)
    assert failures == [OSError] and training.run.performer.updating.saving is None
    training.close()


def test_one_that_nobody_has_any_more_is_closed() -> None:
    training = begun(NONE)
    snapshot = training.run.snapshot()
    next(snapshot.values())
    del snapshot
    training.steps(1)
    assert training.run.performer.updating.saving is None
    training.close()


def test_a_reader_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    training = begun(NONE)
    monkeypatch.setattr(training.run.lanes, "timeout_s", 0.5)
    reader = Reader(training.run.snapshot(), num_parts=2)
    training.steps(2)
    with pytest.raises(TimeoutError, match=r"has taken none for .* the checkpoint is given up"):
        reader.values()
    training.close()


def test_a_slow_reader_is_no_dead_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, and what waits for them, are held up for far longer than a lane may take."""
    training, twin = begun(NONE, homes="host"), begun(NONE, homes="host")
    lanes, expected = training.run.lanes, twin.at_rest()
    lanes.timeout_s = 0.3
    for queue in lanes._queues.values():
        queue.timeout_s = 0.3
    snapshot = training.run.snapshot()
    reader = Reader(snapshot, pause_s=0.02)
    training.steps(2)
    assert_same_bits(reader.values(), expected)
    assert snapshot.cost.waited_s > 2 * lanes.timeout_s
    twin.steps(2)
    assert_same_bits(training.at_rest(), twin.at_rest())
    training.close()
    twin.close()


def test_a_second_one_is_refused_until_the_first_is_closed() -> None:
    training = begun()
    first = training.run.snapshot()
    with pytest.raises(Refused, match="still being read"):
        training.run.snapshot()
    first.close()
    training.run.snapshot().close()
    training.close()


def test_there_is_none_of_half_a_step() -> None:
    training = begun(update="in_backward")
    models.loss_of(training.model, training.batch).backward()
    with pytest.raises(Refused, match="values are saved between backward and step"):
        training.run.snapshot()
    training.optimizer.step()
    training.run.snapshot().close()
    training.close()


def test_an_update_stands_behind_those_that_the_reader_may_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the cpu lane would wait for a reader that waits for the cpu lane."""
    training = begun(homes="host")
    snapshot = training.run.snapshot()
    late = Ticket("an update of the saved step")
    saving = training.run.performer.updating.saving
    assert saving is not None
    saving._owed[0].append(late)
    training.steps(1)
    time.sleep(0.1)
    updates = [ticket for ticket in training.run.flight.updates.values() if not ticket.done]
    assert len(updates) > 2
    late.set_result()
    training.run.executor.wait_for_updates()
    snapshot.close()
    training.close()


# -- somebody changes values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [PLENTY, NONE])
def test_values_that_are_loaded_or_written_meanwhile_come_after_it(spare: int) -> None:
    training = begun(spare)
    expected = training.at_rest()
    model, optimizer = training.model, training.optimizer
    weights, states = model.state_dict(), optimizer.state_dict()
    reader = Reader(training.run.snapshot(), pause_s=0.002)
    for param in model.parameters():
        optimizer.state[param]["exp_avg"].fill_(7.0)
    assert_same_bits(reader.values(), expected)
    changed = training.at_rest()
    assert all(bool((value == 7.0).all()) for (_, kind), value in changed.items() if kind == "exp_avg")
    reader = Reader(training.run.snapshot(), pause_s=0.002)
    model.load_state_dict({name: value + 1 for name, value in weights.items()})
    assert_same_bits(reader.values(), changed)
    changed = training.at_rest()
    reader = Reader(training.run.snapshot(), pause_s=0.002)
    optimizer.load_state_dict(states)
    assert_same_bits(reader.values(), changed)
    again = training.at_rest()
    assert all(torch.equal(again[name], expected[name]) for name in again if name[1] != PARAM)
    training.close()


def test_a_write_in_place_that_nothing_orders_is_told() -> None:
    """Where a parameter's only copy is on the GPU, users may write to it; a copy that is under way may have half."""
    training = begun(homes="gpu")
    expected = training.at_rest()
    reader = Reader(training.run.snapshot(), num_parts=0)  # with memory for all: it has left when the write comes
    while any(not one.is_through for one in training.run.performer.updating._saving._kept):
        time.sleep(0.001)
    with torch.no_grad():
        for param in training.model.parameters():
            param.clamp_(-0.01, 0.01)
    assert_same_bits(reader.values(), expected)
    training.close()
    training = begun(NONE, homes="gpu")
    reader = Reader(training.run.snapshot(), num_parts=0)
    while not reader.snapshot.cost.copied_bytes:
        time.sleep(0.001)
    with torch.no_grad():
        for param in training.model.parameters():
            param.clamp_(-0.01, 0.01)
    with pytest.raises(RuntimeError, match="was written to in place while"):
        reader.values()
    training.steps(1)
    training.close()


def test_reading_values_meanwhile_copies_nothing() -> None:
    training = begun()
    weights, states = training.model.state_dict(), training.optimizer.state_dict()
    chunks = training.run.chunks
    snapshot = training.run.snapshot(lambda key, kind: chunks.value(key).store.tier is Tier.HOST)
    values = snapshot.values()
    next(values)
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, weights[name])
    assert str(training.optimizer.state_dict()) == str(states)
    with torch.no_grad():
        models.loss_of(training.model, training.batch)
    assert snapshot.cost.copied_bytes == 0 and snapshot.cost.waited_s == 0
    snapshot.close()
    training.close()


def test_evaluation_between_changes_nothing() -> None:
    training = begun()
    expected = training.at_rest()
    reader = Reader(training.run.snapshot(), num_parts=1)
    training.model.eval()
    with torch.no_grad():
        models.loss_of(training.model, training.batch)
    training.model.train()
    assert_same_bits(reader.values(), expected)
    training.close()


# -- the run moves, or ends ---------------------------------------------------------------------------------------


def test_unwrapping_waits_for_the_reader() -> None:
    training = begun(NONE)
    expected = training.at_rest()
    reader = Reader(training.run.snapshot(), pause_s=0.002)
    training.steps(1)
    training.close()
    assert not reader.is_alive() or reader.num_read == len(reader.tensors) or reader.snapshot.cost.waited_s > 0
    assert_same_bits(reader.values(), expected)


@pytest.mark.parametrize("spare", [PLENTY, NONE])
def test_a_move_to_another_plan_waits_for_the_reader(spare: int) -> None:
    training, twin = begun(spare), begun(spare)
    expected = training.at_rest()
    reader = Reader(training.run.snapshot(), pause_s=0.002)
    training.steps(1)
    run = training.run
    other = disk_plans.placed(replace(run.plan, profile=run.profile), "host")
    run.move_to(Solution.of(run.profile, other))
    assert run.performer.updating.saving is None
    training.steps(1)
    assert_same_bits(reader.values(), expected)
    assert_same_bits(Reader(run.snapshot()).values(), training.at_rest())
    twin.steps(2)
    final: Values = twin.at_rest()
    assert all(torch.equal(value, final[name]) for name, value in training.at_rest().items())
    training.close()
    twin.close()


def test_a_model_that_is_dropped_meanwhile_is_still_read_and_then_gone() -> None:
    training = begun()
    expected = training.at_rest()
    gone = weakref.ref(training.run), weakref.ref(training.run.lanes)
    reader = Reader(training.run.snapshot(), pause_s=0.002)
    del training
    gc.collect()
    assert_same_bits(reader.values(), expected)
    del reader
    for _ in range(100):
        gc.collect()
        if gone[0]() is None and gone[1]() is None:
            break
        time.sleep(0.05)
    assert gone[0]() is None and gone[1]() is None


def test_an_interrupt_while_training_waits_for_the_reader_leaves_both_well() -> None:
    training, twin = begun(NONE), begun(NONE)
    expected = training.at_rest()
    reader = Reader(training.run.snapshot(), num_parts=2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    threading.Timer(0.6, reader.go_on.set).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            training.close()
        training.steps(1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert_same_bits(reader.values(), expected)
    twin.steps(1)
    assert_same_bits(training.at_rest(), twin.at_rest())
    training.close()
    twin.close()


def test_a_lane_that_fails_ends_both(monkeypatch: pytest.MonkeyPatch) -> None:
    training = begun(NONE)
    reader = Reader(training.run.snapshot(), num_parts=2)
    error = OSError("no such luck")
    threading.Timer(0.2, training.run.lanes.fail, [error]).start()
    with pytest.raises(OSError, match="no such luck"):
        training.steps(2)
    with pytest.raises(OSError, match="no such luck"):  # what lies on the GPU cannot leave any more
        reader.values()
    assert training.run.performer.updating.saving is None
    training.run.discard()


def test_one_tile_at_a_time_runs_ahead_on_the_link() -> None:
    """However often the reader asks: others use the link too. A tile is through when its fence has passed."""
    training = begun(homes="gpu")
    run, waiting, most = training.run, [], 0
    submit, when_through = run.lanes.submit, run.lanes.when_through

    def noted(id: str, *rest: Any) -> Ticket:
        nonlocal most
        ticket = submit(id, *rest)
        ahead = [one for one in waiting if one.__name__ == "_has_left"]
        most = max(most, len(ahead))
        return ticket

    def late(ticket: Ticket, then: Any) -> None:
        if getattr(then, "__name__", "") != "_has_left":
            return when_through(ticket, then)
        waiting.append(then)
        timer = threading.Timer(0.02, lambda: (waiting.remove(then), then()))
        timer.daemon = True
        timer.start()

    run.lanes.submit, run.lanes.when_through = noted, late
    expected = training.at_rest()
    assert_same_bits(Reader(run.snapshot(), pause_s=0.001).values(), expected)
    del run.lanes.submit, run.lanes.when_through
    assert most <= 1, f"{most} at once"
    training.close()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("homes", ["host", "gpu"])
def test_a_chunk_without_elements_changes_nothing(homes: str) -> None:
    class Empty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
            self.none = torch.nn.Linear(0, 0)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            for layer in self.layers:
                x = layer(x)
            return {"loss": x.square().mean() + self.none(x[:, :0]).sum()}

    def placed(plan: Plan) -> Plan:
        return with_spare(disk_plans.placed(plan, homes), PLENTY)

    training = Case(lambda: (Empty(), {"x": torch.ones(4, 8)}), placed).begin()
    training.steps(1)
    expected = training.at_rest()
    snapshot = training.run.snapshot()
    training.steps(2)  # before there is a reader
    assert_same_bits(Reader(snapshot).values(), expected)
    assert any(key.startswith("none") and not value.numel() for (key, _), value in expected.items())
    training.close()


def test_it_is_seen_in_recordings() -> None:
    training = begun()
    reader = Reader(training.run.snapshot(), pause_s=0.001)
    training.steps(1)
    expected = len({training.run.chunks.places[tensor.key][0] for tensor in reader.tensors})
    reader.values()
    saved = [record for record in training.run.lanes.records if record.lane is Lane.SAVE]
    assert len(saved) == expected and all(a.ended_s <= b.started_s for a, b in itertools.pairwise(saved))
    assert sum(record.num_bytes for record in saved) == sum(tensor.num_bytes for tensor in reader.tensors)
    leaving = [record for record in training.run.lanes.records if record.id.startswith("save.") and record not in saved]
    assert leaving and {record.lane for record in leaving} == {Lane.D2H}
    training.close()


def test_a_recorded_step_shows_it() -> None:
    training = begun()
    with hightide.record(training.model) as recording:
        training.steps(2)
        Reader(training.run.snapshot()).values()
        training.steps(1)
    bars = [bar for bar in recording.timeline.bars if bar.lane is Lane.SAVE]
    assert bars and Lane.SAVE in {used.lane for used in recording.timeline.lanes}
    assert "values of a checkpoint" in timeline_html("a run", recording.timeline)
    training.close()
