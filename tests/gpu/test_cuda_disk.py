"""Training from a disk, on a real GPU: the bits of a run whose states are on the host, within limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hightide
import models
from disk_plans import placed
from gpu.streamed import LIMITS
from hightide.ir.plan import Plan
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of
from hightide.stores.pinned import PinnedArena

pytestmark = pytest.mark.gpu

NUM_STEPS = 20


def trained(homes: str, update: str, folder: Path, num_buffers: int = 2) -> tuple[list[float], dict[str, Any], Run]:
    model, batch = models.llama(tied=True)
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    options = {"micro_batch": 2, "update": update, "gradients": "param", "device": "cuda"}
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, **options)
    plan = _with_limits_of(plan, placed(plan, homes, num_buffers))
    limits = hightide.Limits(disk=f"{folder}:64MiB") if plan.uses_disk else None
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan, limits=limits, device="cuda")
    run, losses = run_of(model), []
    assert run is not None
    for step in range(NUM_STEPS):
        loss = models.loss_of(model, models.token_batch(seed=step))
        loss.backward()
        if update == "deferred":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}, run


def _with_limits_of(plan: Plan, edited: Plan) -> Plan:
    """Libraries' workspaces need more than the few bytes of the tests without a GPU."""
    return replace(edited, gpu_limit_bytes=plan.gpu_limit_bytes, host_limit_bytes=plan.host_limit_bytes)


@pytest.mark.parametrize("num_buffers", [1, 3])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("homes", ["states on disk", "all on disk", "states on disk, parameters on gpu"])
def test_the_same_bits_as_with_states_on_the_host(homes: str, update: str, num_buffers: int, tmp_path: Path) -> None:
    expected, weights, other = trained("host", update, tmp_path)
    other.discard()
    losses, found, run = trained(homes, update, tmp_path, num_buffers)
    assert losses == expected
    for name, value in weights.items():
        assert torch.equal(found[name], value), name
    stats = hightide.stats(run.model)
    assert stats.deviations == 0
    assert stats.peak_bytes["host"] <= stats.forecast.host_peak_bytes
    assert stats.peak_bytes["disk"] == stats.forecast.disk_peak_bytes
    run.discard()


def test_buffers_are_pinned(tmp_path: Path) -> None:
    _, _, run = trained("all on disk", "in_backward", tmp_path)
    assert isinstance(run.host, PinnedArena) and run.host.is_pinned
    assert run.chunks.disk is not None
    for ring in (run.chunks.disk.rings.up, run.chunks.disk.rings.down, run.chunks.disk.rings.state):
        buffer = ring.array(0, torch.uint8, 4096).view
        assert buffer.is_pinned() and buffer.data_ptr() % 4096 == 0
    run.discard()
