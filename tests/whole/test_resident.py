"""Where everything fits, a run is plain PyTorch: nothing moves, no lane works, the host holds nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hightide
import models
from hightide.ir.tier import Tier
from hightide.runtime.surgery import run_of
from unit.runtime.steps import train_step


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)  # the kernel of chunks, too


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("make", [models.hand_written, models.llama])
def test_a_resident_plan_adds_nothing(make: Any, update: str) -> None:
    model, batch = make()
    plain = copy.deepcopy(model)
    limits = hightide.Limits(gpu="64MiB", host="64MiB")
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, update=update)
    run, plain_optimizer, submitted = run_of(model), adamw(plain), []
    assert run is not None
    submit = run.lanes.submit

    def spy(id: str, *rest: Any) -> Any:
        submitted.append(id)
        return submit(id, *rest)

    run.lanes.submit = spy  # type: ignore[method-assign]
    for _ in range(3):
        loss = train_step(model, optimizer, batch)
        assert torch.equal(loss, train_step(plain, plain_optimizer, batch))
    weights = model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())

    assert all(block.params is block.states is block.inputs is Tier.GPU for block in run.plan.blocks)
    assert run.plan.num_slots == 0 and run.plan.micro_batch == models.NUM_SAMPLES
    assert submitted == [], "no work for a lane"
    stats = hightide.stats(model)
    assert stats.num_steps == 3 and stats.deviations == stats.evictions == 0
    assert stats.moved_bytes == {} and not any(stats.stall_s.values())
    assert stats.peak_bytes["host"] == run.host.peak_bytes == 0
    hightide.unwrap(model)
