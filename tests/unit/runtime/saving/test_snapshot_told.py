"""What a save costs, told beforehand, and found with a reader that is as slow as was assumed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import disk_plans
import hightide
import models
from hightide.ir.action import ActionKey, Op
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane
from hightide.planner.predict.save_forecast import SavedChunk, held_up, saved_bytes
from hightide.runtime import run_values as run_module
from hightide.runtime.lanes import thread_lives
from hightide.runtime.saving.snapshot import Snapshot
from snapshot_readers import Case, Reader, Training, with_spare

TILE_BYTES = 1024
UPDATE_S = 0.02  # of each, so that little else counts
SAVE_S = 1.5
LAYERS = 6


class Throttled(Reader):
    """Writes so many bytes per second, however late it wakes up."""

    def __init__(self, snapshot: Snapshot, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.written_s = 0.0
        super().__init__(snapshot)

    def run(self) -> None:
        begin_s, num_bytes = time.perf_counter(), 0
        for _, part in self.snapshot.values():
            num_bytes += part.nbytes
            time.sleep(max(0.0, begin_s + num_bytes / self._bytes_per_s - time.perf_counter()))
        self.written_s = time.perf_counter() - begin_s


@pytest.fixture
def slow_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    run = thread_lives._run

    def slowly(task: Any, *rest: Any) -> None:
        if task.lane is Lane.CPU:
            time.sleep(UPDATE_S)
        run(task, *rest)

    monkeypatch.setattr(thread_lives, "_run", slowly)
    monkeypatch.setattr(run_module, "TILE_BYTES", TILE_BYTES)
    monkeypatch.setattr(run_module, "SMALL_TILE_BYTES", TILE_BYTES)


def begun(update: str, spare: int) -> Training:
    def placed(plan: Plan) -> Plan:
        return with_spare(disk_plans.placed(plan, "host"), spare)

    training = Case(lambda: models.hand_written(num_layers=LAYERS), placed, {"update": update}).begin()
    training.steps(2)
    return training


def updates(training: Training, since_s: float, steps_ago: int) -> dict[int, tuple[float, float]]:
    """Of a step: begin and end, by chunk."""
    names = {str(ActionKey(Op.UPDATE, spec.index)): spec.index for spec in training.run.chunks.specs}
    training.run.executor.wait_for_updates()
    records = training.run.lanes.records_of(training.run.lanes.pass_index - steps_ago)
    found = {names[one.id]: (one.started_s - since_s, one.ended_s - since_s) for one in records if one.id in names}
    assert len(found) == len(training.run.chunks.specs)
    return found


@pytest.mark.parametrize(("update", "share"), [("deferred", 0.0), ("in_backward", 0.0), ("deferred", 0.2)])
def test_training_is_held_up_as_long_as_was_told(update: str, share: float, slow_updates: None) -> None:
    """From when updates began and ended in a step that nobody saved. `share` of the bytes finds room."""
    sizes = 12 * sum(param.numel() for param in models.hand_written(num_layers=LAYERS)[0].parameters())
    training = begun(update, int(share * sizes))
    ended_s = time.perf_counter()
    training.steps(1)
    own, following = updates(training, ended_s, 1), updates(training, ended_s, 0)
    training.steps(1)
    order = training.run.executor.update_order()
    specs = training.run.chunks.specs
    chunks = [SavedChunk(saved_bytes(specs[one]), max(0.0, own[one][1]), following[one][0]) for one in order]
    assert sum(chunk.num_bytes for chunk in chunks) == sizes
    told = held_up(chunks, sizes / SAVE_S, training.run.host.spare_bytes)

    snapshot = training.run.snapshot()
    assert snapshot.num_bytes == sizes
    reader = Throttled(snapshot, sizes / SAVE_S)
    training.steps(1)
    reader.join(30)
    waited_s = snapshot.cost.waited_s
    assert reader.written_s == pytest.approx(told.written_s, abs=0.3)
    assert told.waited_s > 0.2, "there is something to tell"
    assert waited_s == pytest.approx(told.waited_s, rel=0.25, abs=0.25)
    training.close()


def test_plans_tell_it_and_runs_know_it() -> None:
    model, batch = models.hand_written(num_layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = hightide.plan(model, optimizer, batch, limits=hightide.Limits(gpu="64MiB", host="64MiB"), micro_batch=2)
    assert "a checkpoint: " in plan.explain() and "estimated" in plan.explain()
    model, optimizer = hightide.wrap(
        model, optimizer, batch, limits=hightide.Limits(gpu="64MiB", host="64MiB"), micro_batch=2
    )
    run = model.hightide_run
    models.loss_of(model, batch).backward()
    optimizer.step()
    snapshot = run.snapshot()
    assert run.save_forecast is not None and run.save_forecast.num_bytes == snapshot.num_bytes
    snapshot.close()
    hightide.unwrap(model)
