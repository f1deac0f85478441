"""Gradients in the parameter's dtype on a real GPU: rounded by kernels on three streams, updated on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.tier import Lane, Tier
from hightide.planner import chunk_places
from hightide.runtime.surgery import run_of

pytestmark = pytest.mark.gpu

NUM_STEPS = 8


def train(params: Tier, states: Tier, update: str, accumulate: int, gradients: str) -> tuple[list[float], Any, Any]:
    torch.manual_seed(0)
    model, batch = models.hand_written(num_layers=6)  # without an embedding, whose backward adds in any order
    model, batch = model.bfloat16(), {name: value.bfloat16() for name, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    limits = hightide.Limits(gpu="512MiB", host="64MiB")
    options: dict[str, Any] = {"micro_batch": 2, "update": update, "gradients": gradients, "device": "cuda"}
    plan = hightide.plan(model, optimizer, batch, limits=limits, **options)
    blocks = tuple(
        replace(block, params=params, states=states, inputs=Tier.GPU, activation=Activation.RECOMPUTE)
        if block.name
        else block
        for block in plan.blocks
    )
    in_slots = states is Tier.HOST or update == "in_backward"
    plan = replace(plan, blocks=blocks, num_slots=3 if params is Tier.HOST else 0, num_grad_slots=2 if in_slots else 0)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan, update=update, device="cuda")
    losses = []
    for _ in range(NUM_STEPS):
        for _ in range(accumulate):
            loss = models.loss_of(model, batch)
            loss.backward()
        if update == "deferred":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    states_now = optimizer.state_dict()["state"]
    run = run_of(model)
    assert run is not None
    moved = dict(run.performer.moved_bytes)
    hightide.unwrap(model)
    return losses, states_now, moved


@pytest.mark.parametrize(("update", "accumulate"), [("deferred", 1), ("deferred", 2), ("in_backward", 1)])
def test_streamed_and_resident_parameters_give_the_same_bits(
    update: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_places, "STAGING_NUMEL", 256)  # several tiles through each buffer
    streamed = train(Tier.HOST, Tier.HOST, update, accumulate, "param")
    resident = train(Tier.GPU, Tier.HOST, update, accumulate, "param")
    assert streamed[0] == resident[0]
    for number, state in streamed[1].items():
        for name, value in state.items():
            assert torch.equal(value, resident[1][number][name]), (number, name)


def test_half_the_bytes_leave_and_the_update_on_the_gpu_sees_the_same_gradients() -> None:
    """Moments after the first step tell the gradients: the two devices' AdamW may differ in the last bits only."""
    rounded = train(Tier.HOST, Tier.HOST, "in_backward", 1, "param")
    whole = train(Tier.HOST, Tier.HOST, "in_backward", 1, "float32")
    assert rounded[2][Lane.D2H] * 2 == whole[2][Lane.D2H] > 0
    on_gpu = train(Tier.GPU, Tier.GPU, "in_backward", 1, "param")
    for loss, expected in zip(on_gpu[0], rounded[0], strict=True):
        assert abs(loss - expected) <= 0.02 * abs(expected)
