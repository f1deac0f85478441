"""Copies for a checkpoint are ordered by fences: behind the updates of the saved step, before those of the next, and
before the reader. The race detector stands for a GPU."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import race_detector
import torch
from test_streams_order import wrapped

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.runtime import run_values as run_module
from hightide.runtime.saving.copy_buffers import CopyStage, SnapshotTile
from hightide.runtime.saving.copy_on_update import CopyOnUpdate
from hightide.runtime.saving.snapshot import Snapshot
from hightide.runtime.surgery import run_of
from hightide.stores.ticket import Ticket


def mixed(plan: Plan) -> Plan:
    """Blocks are updated on the GPU, on the host, and on the host with parameters on the GPU, in turn."""
    homes = [(Tier.GPU, Tier.GPU), (Tier.HOST, Tier.HOST), (Tier.GPU, Tier.HOST)]
    blocks = tuple(
        replace(
            block,
            params=homes[index % 3][0],
            states=homes[index % 3][1],
            inputs=Tier.GPU,
            activation=Activation.RECOMPUTE,
            settles=index % 2 == 0,
        )
        if block.name
        else block
        for index, block in enumerate(plan.blocks)
    )
    widest = max(plan.layout.num_slots(chunk) for chunk in plan.layout.chunks)
    return replace(plan, blocks=blocks, num_slots=3 * widest, num_grad_slots=2 * widest)


def watch(detector: race_detector.Detector, run: Any, patch: pytest.MonkeyPatch) -> None:
    """Uses of values on the GPU by copies and updates, and of buffers by copies and the reader."""
    prepare, submit, take = run.performer.updating.updates.prepare, run.lanes.submit, CopyOnUpdate.take

    def updating(chunk: int, in_parts: bool) -> Any:
        prepared = prepare(chunk, in_parts)
        if prepared is None or not run.chunks.placed[chunk].is_updated_on_gpu:
            return prepared
        apply, states = prepared

        def update() -> None:
            detector.use([("values on the GPU", chunk)], f"update of {chunk}")
            apply()

        return update, states

    def leaving(id: str, lane: Lane, due: int, after: Any, work: Any) -> Ticket:
        if not id.startswith("save."):
            return submit(id, lane, due, after, work)
        chunk, number = (int(word) for word in id.split(".")[1:])
        saving = run.performer.updating._saving

        def copy() -> int:
            kept: SnapshotTile = saving._kept[number]
            assert kept.buffer is not None
            detector.use([("values on the GPU", chunk)], f"save of {chunk}", writes=False)
            detector.use([("buffer", kept.buffer.memory.data_ptr())], f"save of {chunk}")
            return int(work())

        return submit(id, lane, due, after, copy)

    def taking(saving: CopyOnUpdate, number: int) -> torch.Tensor:
        values = take(saving, number)
        kept = saving._kept[number]
        if kept.stage is CopyStage.ASIDE and kept.tier is Tier.GPU:
            detector.use([("buffer", values.data_ptr())], f"reading of tile {number}", writes=False)
        return values

    patch.setattr(run.performer.updating.updates, "prepare", updating)
    patch.setattr(run.lanes, "submit", leaving)
    patch.setattr(CopyOnUpdate, "take", taking)


def resident(plan: Plan) -> Plan:
    """Nothing else leaves the GPU."""
    there = {"params": Tier.GPU, "states": Tier.GPU, "inputs": Tier.GPU}
    return replace(plan, blocks=tuple(replace(block, **there) for block in plan.blocks), num_slots=0)


def read(snapshot: Snapshot, stepped: threading.Event) -> None:
    """What it waits for orders no stream. Where everything is on the GPU it lets the next step go by."""
    for number, _ in enumerate(snapshot.values()):
        if number == 1:
            stepped.wait(0.5)


@pytest.mark.parametrize("homes", [mixed, resident])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_copies_stand_between_the_updates_of_two_steps(
    update: str, homes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "TILE_BYTES", 2048)
    monkeypatch.setattr(run_module, "SMALL_TILE_BYTES", 2048)
    detector = race_detector.install(monkeypatch)
    pair = models.hand_written(num_layers=4)
    model, optimizer = wrapped(update, *pair, homes)
    run = run_of(model)
    watch(detector, run, monkeypatch)
    for step in range(6):
        models.loss_of(model, pair[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            snapshot = run.snapshot()
            stepped = threading.Event()
            reader = threading.Thread(target=read, args=[snapshot, stepped], name="hightide-reader", daemon=True)
            reader.start()
        else:
            stepped.set()
            reader.join(30)
            assert not reader.is_alive() and snapshot.cost.copied_bytes > 0
    run.executor.wait_for_updates()
    hightide.unwrap(model)
    assert detector.num_uses["values on the GPU"] > 30 and detector.num_uses["buffer"] > 60
    races = {race for race in detector.races if "overtake reading" not in race}  # it gives buffers back at its end
    assert not races, "\n".join(sorted(races))
