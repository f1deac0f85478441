"""The same runtime on a real GPU: equal to plain PyTorch on the same GPU, fp32, 20 steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier

pytestmark = pytest.mark.gpu

NUM_STEPS = 20


def everything_moves(plan: Plan) -> Plan:
    blocks = tuple(
        replace(block, params=Tier.HOST, states=Tier.HOST, inputs=Tier.HOST, activation=Activation.RECOMPUTE)
        if block.name
        else block
        for block in plan.blocks
    )
    return replace(plan, blocks=blocks, num_slots=4, num_grad_slots=4)


def kept_and_streamed(plan: Plan) -> Plan:
    blocks = tuple(
        replace(block, params=Tier.HOST, states=Tier.HOST, activation=Activation.KEEP) if block.name else block
        for block in plan.blocks
    )
    return replace(plan, blocks=blocks, num_slots=4, num_grad_slots=4)


EDITS: dict[str, Callable[[Plan], Plan]] = {
    "resident": lambda plan: plan,
    "everything moves": everything_moves,
    "kept": kept_and_streamed,
}


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("make", [models.llama, models.llama_tied, models.gpt2], ids=lambda make: make.__name__)
def test_equal_to_plain_pytorch(make: Any, edit: str, update: str) -> None:
    model, batch = make()
    plain = copy.deepcopy(model).cuda()
    on_gpu = {name: value.cuda() for name, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4)
    limits = hightide.Limits(gpu="512MiB", host="64MiB")  # cuBLAS alone takes 64 MiB
    plan = hightide.plan(model, optimizer, batch, limits=limits, micro_batch=2, update=update, device="cuda")
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=EDITS[edit](plan), update=update, device="cuda")
    for _ in range(NUM_STEPS):
        loss = step(model, optimizer, batch, clip=update == "deferred")
        expected = step(plain, plain_optimizer, on_gpu, clip=update == "deferred")
        assert abs(loss - expected) <= 1e-6 * abs(expected)
    weights = model.state_dict()
    for name, weight in plain.state_dict().items():
        bound = 1e-5 * weight.abs().max().item() + 1e-6
        assert (weights[name].cuda() - weight).abs().max().item() <= bound, name
    assert hightide.stats(model).deviations == 0
    hightide.unwrap(model)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], clip: bool) -> float:
    loss = model(**batch).loss
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
