"""What a block holds waits on the host: results, strides, types and memory are as if it had stayed."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hightide
import models
from hightide.ir.action import Mode, Op
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower
from hightide.planner.verify.check_plan import check_plan
from hightide.runtime.surgery import run_of
from unit.runtime.steps import train_step, twins

LIMITS = hightide.Limits(gpu="64MiB", host="64MiB")
HELD = (Activation.SELECTIVE, Activation.KEEP)


def swapped(activation: Activation, held: Tier = Tier.HOST, every: int = 1, params: Tier | None = None):
    """Every so many-th block swaps; the others have the same level, and stay."""

    def edit(plan: Plan) -> Plan:
        assert plan.profile is not None
        blocks = []
        for index, (spec, block) in enumerate(zip(plan.profile.blocks, plan.blocks, strict=True)):
            where = held if index % every == 0 and not spec.lazy_head else Tier.GPU
            inputs = where if activation is Activation.KEEP else Tier.GPU
            one = replace(block, activation=activation, held=where, inputs=inputs)
            if params is not None:
                one = replace(one, params=params, states=params)
            blocks.append(one if block.name else block)
        slots = 3 if params is Tier.HOST else plan.num_slots
        limits = {"gpu_limit_bytes": 2**25, "host_limit_bytes": 2**25}
        return replace(plan, blocks=tuple(blocks), num_slots=slots, num_grad_slots=slots, **limits)

    return edit


def trained(name: str, edit: Any, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor], hightide.Stats]:
    model, batch = models.ZOO[name]()
    pair = twins(model, batch, edit=edit)
    losses = [train_step(pair.model, pair.optimizer, batch) for _ in range(steps)]
    found = losses, {key: value.clone() for key, value in pair.model.state_dict().items()}, hightide.stats(pair.model)
    pair.close()
    return found


@pytest.mark.parametrize("activation", HELD)
@pytest.mark.parametrize(
    "name",
    ["llama_tied", *(pytest.param(name, marks=pytest.mark.long) for name in ("t5", "gpt2", "vit", "hand_written"))],
)
def test_swapping_changes_no_bit_and_leaves_the_gpu_freer(name: str, activation: Activation) -> None:
    losses, weights, stats = trained(name, swapped(activation, Tier.GPU, params=Tier.HOST))
    ours, our_weights, our_stats = trained(name, swapped(activation, params=Tier.HOST))
    assert ours == losses
    assert all(torch.equal(value, weights[key]) for key, value in our_weights.items())
    assert our_stats.peak_bytes["gpu"] < stats.peak_bytes["gpu"]
    for one in (stats, our_stats):
        assert one.peak_bytes["gpu"] <= one.plan.forecast.gpu_peak_bytes
        assert one.peak_bytes["host"] <= one.plan.forecast.host_peak_bytes


@pytest.mark.parametrize("every", [1, 2])
def test_plain_pytorch_is_met_with_some_blocks_swapped(every: int) -> None:
    model, batch = models.ZOO["llama"]()
    pair = twins(model, batch, edit=swapped(Activation.KEEP, every=every))
    for _ in range(3):
        pair.assert_equal(*pair.step())
    moved = pair.run.performer.moved_bytes
    assert moved[Lane.D2H] and moved[Lane.H2D]
    pair.close()


def test_what_is_moved_is_what_the_schedule_says() -> None:
    """Parameters and gradients stay, so that everything on the links is what blocks hold."""
    model, batch = models.ZOO["gpt2"]()
    pair = twins(model, batch, edit=swapped(Activation.KEEP, params=Tier.GPU))
    pair.step()
    before = dict(pair.run.performer.moved_bytes)
    pair.step()
    moved = {lane: pair.run.performer.moved_bytes[lane] - before.get(lane, 0) for lane in (Lane.D2H, Lane.H2D)}
    actions = lower(pair.run.profile, pair.run.plan, Mode.TRAIN).actions
    told = sum(action.num_bytes for action in actions if action.op is Op.STASH)
    assert 0 < moved[Lane.H2D] <= moved[Lane.D2H] <= told, "what backward needs at once does not leave, or not yet"
    assert moved[Lane.H2D] >= 0.9 * told
    pair.close()


class Mixed(nn.Module):
    """Saves views of one storage, transposed and strided ones, booleans, integers, and the same tensor twice."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.three = nn.Linear(width, 3 * width)
        self.last = nn.Linear(width, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.three(x).chunk(3, dim=-1)
        mixed = torch.where(a > 0, b * c, c * self.scale)
        best = mixed.topk(8, dim=-1)
        turned = (a.transpose(1, 2) * b.transpose(1, 2)).transpose(1, 2)
        scores = torch.softmax(a @ b.transpose(1, 2), dim=-1) @ c
        odd = mixed[:, ::2].repeat_interleave(2, dim=1)[:, : x.shape[1]]
        picked = torch.zeros_like(x).scatter(-1, best.indices, best.values)
        return x + self.last(torch.tanh(turned * turned) + scores + odd * odd + picked).bfloat16().float()


@pytest.mark.parametrize("micro_batch", [2, 4])
@pytest.mark.parametrize("activation", HELD)
def test_views_strides_and_types_come_back_as_they_were(activation: Activation, micro_batch: int) -> None:
    results = []
    for held in (Tier.GPU, Tier.HOST):
        torch.manual_seed(0)
        model = nn.Sequential(*(Mixed() for _ in range(3)))
        batch = torch.randn(4, 6, 32)
        optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)
        plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=micro_batch)
        model, optimizer = hightide.wrap(model, optimizer, batch, plan=swapped(activation, held)(plan))
        losses = []
        for step in range(4):
            for _ in range(2):  # accumulated
                loss = model(batch).square().mean()
                loss.backward()
                losses.append(loss.item())
            if step == 1:
                with torch.no_grad():
                    losses.append(model.eval()(batch).square().mean().item())
                model.train()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        results.append((losses, model.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[0][1][key]) for key, value in results[1][1].items())


class Dropping(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(width, width), nn.Linear(width, width)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(torch.tanh(self.linear(x)), 0.3)
        if self.fails:
            raise ArithmeticError("in mid-forward")
        return x + nn.functional.dropout(self.other(h * h), 0.2)


def dropping(activation: Activation, held: Tier) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Dropping() for _ in range(3))), torch.randn(4, 6, 32)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=2)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=swapped(activation, held)(plan))
    return model, optimizer, batch


@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_and_autocast_do_not_depend_on_where_things_wait(autocast: bool) -> None:
    results = []
    for held in (Tier.GPU, Tier.HOST):
        model, optimizer, batch = dropping(Activation.KEEP, held)
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    assert results[0] == results[1]


@pytest.mark.parametrize("activation", HELD)
def test_nothing_stays_behind_after_a_failure_or_without_a_backward(activation: Activation) -> None:
    results = []
    for held in (Tier.GPU, Tier.HOST):
        model, optimizer, batch = dropping(activation, held)
        run = run_of(model)
        assert run is not None
        torch.manual_seed(3)
        losses = [one_step(model, optimizer, batch)]
        gc.collect()
        before = run.gpu.used_bytes, run.host.used_bytes
        for _ in range(3):
            losses.append(model(batch).sum().item())  # a forward without a backward
        model[2].fails = True
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                model(batch)
        model[2].fails = False
        for _ in range(3):
            losses.append(one_step(model, optimizer, batch))
            gc.collect()  # what failed is held by its exception; then, by copies under way, until the next pass
        assert (run.gpu.used_bytes, run.host.used_bytes) == before
        results.append(losses)
    assert results[0] == results[1]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_a_kept_tensor_that_is_written_over_while_it_is_away_is_noticed() -> None:
    """As plain PyTorch does: a block's output that its own graph needs."""

    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Saves() for _ in range(3))
            self.writes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
                if self.writes:
                    x = x.mul_(0.5)
            return x

    model, batch = Model(), torch.randn(4, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=4)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=swapped(Activation.KEEP)(plan))
    model(batch).sum().backward()
    optimizer.zero_grad()
    model.writes = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(batch).sum().backward()


def test_a_plan_says_where_what_is_held_waits_and_wrong_ones_are_refused() -> None:
    model, batch = models.ZOO["llama"]()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS)
    assert plan.profile is not None

    def refused(match: str, at: int = 1, **changes: Any) -> None:
        blocks = (*plan.blocks[:at], replace(plan.blocks[at], **changes), *plan.blocks[at + 1 :])
        with pytest.raises(InfeasiblePlan, match=match):
            check_plan(plan.profile, replace(plan, blocks=blocks))

    refused("recomputes, so that nothing is held", activation=Activation.RECOMPUTE, held=Tier.HOST)
    refused("its inputs are among them", activation=Activation.KEEP, held=Tier.HOST, inputs=Tier.GPU)
    refused("its inputs are among them", activation=Activation.KEEP, held=Tier.GPU, inputs=Tier.HOST)
    refused("activations on the disk", activation=Activation.KEEP, held=Tier.DISK)
    head = next(block.index for block in plan.profile.blocks if block.lazy_head)
    refused("fused with the loss", head, activation=Activation.KEEP, held=Tier.HOST, inputs=Tier.HOST)


def test_a_plan_that_swaps_goes_through_a_file_and_is_told_in_words(tmp_path: Path) -> None:
    model, batch = models.ZOO["llama"]()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = swapped(Activation.SELECTIVE, every=2)(hightide.plan(model, optimizer, batch, limits=LIMITS))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and any(block.held is Tier.HOST for block in loaded.blocks)
    model, _ = hightide.wrap(model, optimizer, batch, plan=loaded)
    told = hightide.stats(model).plan.explain()
    assert "swap" in told and "in part" in told
