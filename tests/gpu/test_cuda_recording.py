"""A recording on a real GPU: times are the GPU's own, and nothing waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import hightide
import models
from gpu.streamed import silence_transformers, wrap
from hightide.ir.action import Mode, Op
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.runtime.surgery import run_of
from unit.runtime.steps import train_step

pytestmark = pytest.mark.gpu

AHEAD_CYCLES = 400_000_000  # of a GPU's clock, about 0.2 s
CLOCK_S = 200e-6  # by which the host's clock and the GPU's may differ


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_recorded_times_follow_the_schedule(update: str) -> None:
    model, batch = models.llama()
    model, optimizer = wrap(model, batch, update=update)
    batch = {name: value.cuda() for name, value in batch.items()}
    with hightide.record(model) as recording:
        for _ in range(3):
            train_step(model, optimizer, batch)
    timeline = recording.timeline
    schedule = run_of(model).executor.programs[Mode.TRAIN].schedule
    bars = {bar.id: bar for bar in timeline.bars if not bar.earlier}
    assert {tick.id for tick in schedule.ticks} <= bars.keys()
    for action in schedule.actions:
        for name in action.after:
            # What is dropped takes no time; an update follows the call of step(), not what the GPU has queued there.
            if action.id in bars and name in bars and schedule.by_id[name].op not in (Op.EVICT, Op.STEP):
                assert bars[name].end_s <= bars[action.id].start_s + CLOCK_S, f"{name} after {action.id}"
    for lane in (Lane.COMPUTE, Lane.H2D, Lane.D2H):
        row = [bar for bar in timeline.bars if bar.lane is lane and not bar.earlier]
        assert row and all(bar.end_s >= bar.start_s for bar in row)
    assert 0.2 * run_of(model).step_s < timeline.step_s < 5 * run_of(model).step_s, "the host may run ahead by a step"
    assert timeline.gpu_reserved_bytes is not None
    assert max(sum(level.num_bytes) for level in timeline.levels) <= timeline.gpu_peak_bytes
    assert timeline.gpu_peak_bytes <= timeline.gpu_reserved_bytes <= hightide.stats(model).peak_bytes["gpu"]
    hightide.unwrap(model)


def test_recording_does_not_wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    silence_transformers(monkeypatch)
    model, batch = models.llama(mask=False)  # transformers asks the GPU about a mask
    model, optimizer = wrap(model, batch)
    with hightide.record(model) as recording:
        try:
            for step in range(5):
                if step == 2:  # by now every workspace and pinned buffer exists
                    torch.cuda.set_sync_debug_mode("error")
                train_step(model, optimizer, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert recording.timeline.step_s > 0
    hightide.unwrap(model)


@pytest.mark.alone  # a GPU that others share runs the block late
def test_the_first_block_does_not_wait_for_the_parameters_of_others() -> None:
    """Each step begins with 16 fetches of 32 MiB, one after the other; the batch comes from host memory too."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(17))).to(torch.bfloat16)
    batch = torch.randn(512, 4096, dtype=torch.bfloat16)

    def states_away(plan: Plan) -> Plan:
        blocks = [replace(block, params=Tier.GPU, states=Tier.HOST) for block in plan.blocks]
        return replace(plan, blocks=(replace(blocks[0], states=Tier.GPU), *blocks[1:]))

    model, optimizer = wrap(model, batch, states_away, update="in_backward", micro_batch=512)
    with hightide.record(model) as recording:
        for _ in range(4):
            model(batch).square().mean().backward()
            torch.cuda._sleep(AHEAD_CYCLES)  # meanwhile all updates end, and this thread begins the next step
            optimizer.step()
            optimizer.zero_grad()
    bars = {bar.id: bar for bar in recording.timeline.bars if not bar.earlier}
    assert bars["fwd.0"].end_s < bars["fetch.param.2@fwd.2"].end_s
    hightide.unwrap(model)
