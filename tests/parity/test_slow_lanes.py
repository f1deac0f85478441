"""Results must not depend on how fast the lanes are. Each lane in turn is slowed down at random; a copy that somebody
uses without having waited for it shows up as a wrong weight."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.runtime.lanes import thread_lives

NUM_STEPS = 2
DELAYS_S = (0.0, 0.0, 0.001, 0.004, 0.015)


def slow_down(patch: pytest.MonkeyPatch, lane: Lane) -> list[str]:
    """Lets the lane start late, at random. Returns a list that grows with every delayed action."""
    run, delayed, delays = thread_lives._run, [], random.Random(7)

    def late(task: Any, *rest: Any) -> None:
        if task.lane is lane:
            time.sleep(delays.choice(DELAYS_S))
            delayed.append(task.id)
        run(task, *rest)

    patch.setattr(thread_lives, "_run", late)
    return delayed


def streamed(plan: Plan, inputs: Tier, activation: Activation, params: Tier, settles: bool = False) -> Plan:
    """Everything moves: params on the GPU are still updated on host and refreshed."""
    way = {"params": params, "states": Tier.HOST, "inputs": inputs, "activation": activation, "settles": settles}
    blocks = tuple(replace(block, **way) if block.name else block for block in plan.blocks)
    slots = {"num_slots": 0} if params is Tier.GPU else {"num_slots": max(2, plan.num_slots)}
    return replace(plan, blocks=blocks, num_grad_slots=max(2, plan.num_grad_slots), gpu_limit_bytes=2**24, **slots)


PLANS = {
    "inputs on host": (Tier.HOST, Activation.RECOMPUTE, Tier.HOST),
    "kept": (Tier.GPU, Activation.KEEP, Tier.HOST),
    "refreshed": (Tier.HOST, Activation.RECOMPUTE, Tier.GPU),
    "states later": (Tier.HOST, Activation.RECOMPUTE, Tier.HOST, True),
}


# Tied weights have gradients of two blocks: that matters where both move. T5's decoder blocks share an input, the
# encoder's result; so do those of test_inputs_on_disk.py.
SUBJECTS = [
    pytest.param(
        make,
        name,
        marks=()
        if make is models.hand_written  # tied weights are slow in test_from_disk.py and test_rounded_gradients.py
        else pytest.mark.long,
    )
    for make in (models.llama_tied, models.hand_written, models.t5)
    for name in PLANS
]


@pytest.mark.parametrize(("make", "plan_name"), SUBJECTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_slow_lane_changes_nothing(make: Any, plan_name: str) -> None:
    update = "in_backward" if plan_name == "kept" else "deferred"
    losses, weights = train(make, plan_name, update)
    for lane in (Lane.H2D, Lane.D2H, Lane.CPU):
        with pytest.MonkeyPatch.context() as patch:
            delayed = slow_down(patch, lane)
            slow_losses, slow_weights = train(make, plan_name, update)
        assert delayed, f"nothing ran on the lane {lane}"
        assert losses == slow_losses, lane
        assert weights.keys() == slow_weights.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, slow_weights[name]), (lane, name)


def train(make: Any, plan_name: str, update: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    limits = hightide.Limits(gpu="16MiB", host="64MiB")
    plan = hightide.plan(model, optimizer, batch, limits=limits, micro_batch=2, update=update)
    plan = widened(streamed(plan, *PLANS[plan_name]))
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan, update=update)
    losses = []
    for step in range(NUM_STEPS):
        loss = models.loss_of(model, batch)
        loss.backward()
        if update == "deferred" and step:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: value for name, value in model.state_dict().items()}
    hightide.unwrap(model)
    return losses, weights


def widened(plan: Plan) -> Plan:
    """Slots for the widest block, whatever the model."""
    widths = [plan.layout.num_slots(chunk) for chunk in plan.layout.chunks]
    enough = 2 * max(widths) + 2
    return replace(plan, num_slots=enough if plan.num_slots else 0, num_grad_slots=enough)
