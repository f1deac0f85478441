"""fp16 with torch's GradScaler: as a plain loop with fp32 masters, skipped steps and changing scales included."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier

LR, NUM_STEPS, BROKEN_STEP = 1e-3, 8, 3
GPU_LIMIT = "512MiB"


def streamed(plan: Plan) -> Plan:
    away = {"params": Tier.HOST, "states": Tier.HOST, "inputs": Tier.GPU, "activation": Activation.RECOMPUTE}
    blocks = tuple(replace(block, **away) if block.name else block for block in plan.blocks)
    widest = max(plan.layout.num_slots(chunk) for chunk in plan.layout.chunks)
    return replace(plan, blocks=blocks, num_slots=2 * widest, num_grad_slots=2 * widest)


class MasterLoop:
    """Plain PyTorch: fp16 weights, fp32 masters that the optimizer and the scaler see."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters = [param.detach().float() for param in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, eps=1e-4)

    def step(self, scaler: torch.amp.GradScaler, loss: torch.Tensor) -> None:
        scaler.scale(loss).backward()
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            master.grad, param.grad = None if param.grad is None else param.grad.float(), None
        scaler.step(self.optimizer)
        scaler.update()
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            param.data.copy_(master)


def check_scaled_training(device: str | None, edit: Callable[[Plan], Plan]) -> None:
    model, batch = models.hand_written(num_layers=3)
    model, batch = model.half(), {name: value.half() for name, value in batch.items()}
    kind = device or "cpu"
    plain = MasterLoop(copy.deepcopy(model).to(kind))
    here = {name: value.to(kind) for name, value in batch.items()}
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-4)
    limits = hightide.Limits(gpu=GPU_LIMIT, host="64MiB")
    plan = edit(hightide.plan(model, optimizer, batch, limits=limits, micro_batch=2, device=device))
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan, device=device)
    # A scale that rises every second step, and falls at an infinity.
    options = {"init_scale": 256.0, "growth_interval": 2}
    scaler, plain_scaler = (torch.amp.GradScaler(kind, **options) for _ in range(2))
    scales = []
    for step in range(NUM_STEPS):
        factor = math.inf if step == BROKEN_STEP else 1.0
        before = model.state_dict() if step == BROKEN_STEP else {}
        loss, expected = models.loss_of(model, batch), models.loss_of(plain.model, here)
        assert abs(loss.item() - expected.item()) <= 0.01 * abs(expected.item()), step
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        plain.step(plain_scaler, expected * factor)
        scales.append(scaler.get_scale())
        assert scales[-1] == plain_scaler.get_scale(), step
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items()), "not skipped"
    assert scales[BROKEN_STEP] == scales[BROKEN_STEP - 1] / 2 and scales[-1] > scales[BROKEN_STEP]
    weights = hightide.unwrap(model).state_dict()
    for (name, _), expected in zip(model.named_parameters(), plain.masters, strict=True):
        error = (weights[name].to(kind).float() - expected).abs()
        assert error.max() <= 2 * NUM_STEPS * LR and error.mean() <= 0.25 * LR, (name, error.max(), error.mean())


@pytest.mark.parametrize("edit", [lambda plan: plan, streamed], ids=["resident", "streamed"])
def test_a_grad_scaler_trains_an_fp16_model(edit: Callable[[Plan], Plan]) -> None:
    check_scaled_training(None, edit)


def test_gradients_of_an_fp16_model_read_as_fp32_sums_and_come_back_as_its_own() -> None:
    model, batch = models.hand_written()
    model, batch = model.half(), {name: value.half() for name, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    model, _ = hightide.wrap(model, optimizer, batch, limits=hightide.Limits(gpu="16MiB", host="16MiB"))
    models.loss_of(model, batch).backward()
    weight = model.layers[0].mlp[0].weight
    assert weight.dtype == torch.float16 and weight.grad.dtype == torch.float32
    assert weight.grad.clone().dtype == torch.float32
    assert model.scale.grad.dtype == torch.float32  # loose
    hightide.unwrap(model)
    assert {param.grad.dtype for param in model.parameters()} == {torch.float16}
    model.zero_grad()
    models.loss_of(model, batch).backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float16}
