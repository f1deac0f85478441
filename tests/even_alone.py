"""One rank with and without collectives to itself, for the simulated accelerator and for a GPU. See [Note: one rank
that talks to itself] in shard/meeting.py."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import hightide
import models
from hightide.ir.action import Mode
from hightide.ir.plan import Plan, Sharing
from hightide.ir.tier import COLLECTIVES, Lane, Tier
from hightide.planner.placement import Placement
from hightide.planner.verify.compare_records import compare
from hightide.runtime.surgery import run_of
from hightide.shard.meeting import EVEN_ALONE_SWITCH

NUM_SAMPLES = 4
NUM_STEPS = 3


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: str  # a digest
    plan: Plan
    peak_bytes: dict[Tier, int]
    backend: str  # "": nothing was exchanged
    differences: list[str]  # between the schedule of the last pass and what ran
    scheduled: Counter[Lane]  # collectives of a pass,
    ran: Counter[Lane]  # those that ran in the last one,
    issued: Counter[Lane]  # and those that a communicator was asked for, in all


@contextmanager
def talking() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(EVEN_ALONE_SWITCH, "1")
        yield


def with_collectives(plan: Plan) -> Plan:
    """The same sizes and places; parameters that stay on the GPU are whole there."""
    ways = [_sharing(block.name, block.params) for block in plan.blocks]
    blocks = tuple(replace(block, sharing=way) for block, way in zip(plan.blocks, ways, strict=True))
    forced = replace(plan, even_alone=True, blocks=blocks)
    _, grad_slots = Placement(forced).widest_tick(set(range(len(blocks))))
    return replace(forced, num_grad_slots=max(plan.num_grad_slots, grad_slots))


def _sharing(name: str, params: Tier) -> Sharing:
    if not name:  # parameters of no block
        return Sharing.REPLICATED
    return Sharing.PARAMS_REPLICATED if params is Tier.GPU else Sharing.SHARDED


def train(device: str, update: str = "deferred", clip: float | None = None, **how: Any) -> Trained:
    """`how`: plan or limits."""
    model, example = models.llama(num_samples=NUM_SAMPLES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    wrapped, stepping = hightide.wrap(model, optimizer, example, update=update, device=device, **how)
    losses = []
    for batch in models.token_batches(NUM_STEPS, num_samples=NUM_SAMPLES):
        loss = models.loss_of(wrapped, batch)
        loss.backward()
        losses.append(loss.item())
        if clip is not None:
            losses.append(float(torch.nn.utils.clip_grad_norm_(wrapped.parameters(), clip)))
        stepping.step()
        stepping.zero_grad()
    run, stats = run_of(wrapped), hightide.stats(wrapped)
    assert run is not None
    run.executor.wait_for_updates()
    schedule, records = run.executor.programs[Mode.TRAIN].schedule, run.lanes.records_of(run.lanes.pass_index)
    records = [record for record in records if not record.id.startswith("norms.")]  # summed behind the last REDUCE
    logs = {} if run.watchman is None else run.watchman.own.logs
    issued = Counter({lane: logs[str(lane)].number for lane in COLLECTIVES if logs})
    weights = b"".join(value.cpu().numpy().tobytes() for value in wrapped.state_dict().values())
    trained = Trained(
        losses,
        hashlib.sha256(weights).hexdigest(),
        stats.plan,
        dict(stats.peak_bytes),
        "" if run.between is None else run.between.collectives.ranks.backend,
        compare(schedule, records),
        Counter({lane: len(schedule.lane(lane)) for lane in COLLECTIVES}),
        Counter(record.lane for record in records if record.lane in COLLECTIVES),
        issued,
    )
    hightide.unwrap(wrapped)
    return trained


def check(plain: Trained, forced: Trained, backend: str) -> None:
    """Collectives run as they are scheduled, within the limits; losses and weights are what they are without."""
    assert not plain.plan.has_collectives and not plain.backend and not plain.ran and not plain.issued
    assert forced.plan.even_alone and forced.plan.ranks == 1 and forced.backend == backend
    assert forced.differences == plain.differences == [] and forced.ran == forced.scheduled
    for lane in COLLECTIVES:
        assert forced.scheduled[lane] > 0 and forced.issued[lane] >= NUM_STEPS * forced.scheduled[lane]
    limits = {Tier.GPU: forced.plan.gpu_limit_bytes, Tier.HOST: forced.plan.host_limit_bytes}
    for tier, limit_bytes in limits.items():
        assert forced.peak_bytes[tier] <= limit_bytes
    assert forced.losses == plain.losses and forced.weights == plain.weights
