"""A run goes on under another plan: to the bit as if it had begun under it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import hightide
import models
from hightide.ir.plan import Activation, Plan
from hightide.ir.tier import Tier
from hightide.planner.lower import lower_all
from hightide.planner.place import widest_tick
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of
from unit.runtime.steps import adamw, train_step
from unit.runtime.test_unwrap import WithBuffers

ROOMY = hightide.Limits(gpu="64MiB", host="64MiB")
LIMITS = {"cpu": ROOMY, "cuda": hightide.Limits(gpu="1GiB", host="64MiB")}
KINDS = {
    "resident": (Tier.GPU, Tier.GPU),
    "streamed": (Tier.HOST, Tier.HOST),
    "updated on host": (Tier.GPU, Tier.HOST),
}


def placed(plan: Plan, kind: str) -> Plan:
    params, states = KINDS[kind]
    blocks = tuple(
        replace(block, params=params, states=states, activation=Activation.RECOMPUTE, inputs=params)
        if block.name
        else block
        for block in plan.blocks
    )
    plan = replace(plan, blocks=blocks, loss_kept_tokens=0)
    slots, grad_slots = widest_tick(plan, {call.block for call in profile_of(plan).calls})
    return replace(plan, num_slots=slots + (slots > 0), num_grad_slots=grad_slots)


def profile_of(plan: Plan) -> Any:
    assert plan.profile is not None
    return plan.profile


def move(run: Run, plan: Plan) -> None:
    run.move_to(run.profile, plan, lower_all(run.profile, plan))


def wrapped(kind: str, dtype: torch.dtype, device: str = "cpu", **options: Any) -> tuple[Any, Any, Run, Any]:
    model, batch = models.hand_written(num_layers=3)
    model, batch = model.to(dtype), {name: value.to(dtype) for name, value in batch.items()}
    optimizer = adamw(model)
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS[device], micro_batch=2, device=device, **options)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=placed(plan, kind), device=device)
    run = run_of(model)
    assert run is not None
    return model, optimizer, run, batch


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    masters = optimizer.state_dict().get("hightide_masters", {})
    return [*model.state_dict().values(), *moments, *masters.values()]


@pytest.mark.parametrize(
    ("before", "after", "update", "dtype"),
    [
        ("resident", "streamed", "deferred", torch.float32),
        ("resident", "streamed", "in_backward", torch.bfloat16),
        ("streamed", "resident", "deferred", torch.bfloat16),
        ("streamed", "resident", "in_backward", torch.float32),
        ("updated on host", "resident", "deferred", torch.float16),
        ("streamed", "updated on host", "in_backward", torch.float16),
        ("resident", "updated on host", "deferred", torch.bfloat16),
        ("updated on host", "streamed", "deferred", torch.float32),
    ],
)
def test_values_states_and_counters_move(before: str, after: str, update: str, dtype: torch.dtype) -> None:
    check_moving(before, after, update, dtype, "cpu")


def check_moving(before: str, after: str, update: str, dtype: torch.dtype, device: str) -> None:
    ours = wrapped(before, dtype, device, update=update)
    theirs = wrapped(after, dtype, device, update=update)
    for step in range(4):
        if step == 2:
            move(ours[2], placed(ours[2].plan, after))
            assert (ours[2].plan.blocks, ours[2].num_steps) == (theirs[2].plan.blocks, 2)
        assert torch.equal(train_step(*ours[:2], ours[3]), train_step(*theirs[:2], theirs[3]))
    for mine, other in zip(states(*ours[:2]), states(*theirs[:2]), strict=True):
        assert torch.equal(mine, other)
    assert hightide.stats(ours[0]).deviations == 0
    hightide.unwrap(ours[0])
    hightide.unwrap(theirs[0])


@pytest.mark.parametrize("after", KINDS)
def test_gradients_that_wait_for_more_move_too(after: str) -> None:
    outcomes = []
    for moves in (False, True):
        model, optimizer, run, batch = wrapped("streamed", torch.float32)
        models.loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # a factor that is not applied yet
        first = {name: param.grad.norm().item() for name, param in model.named_parameters()}
        if moves:
            move(run, placed(run.plan, after))
            assert {name: param.grad.norm().item() for name, param in model.named_parameters()} == first
        models.loss_of(model, batch).backward()
        optimizer.step()
        outcomes.append(states(model, optimizer))
        hightide.unwrap(model)
    assert all(torch.equal(plain, moved) for plain, moved in zip(*outcomes, strict=True))


def test_loose_parameters_keep_their_gradients() -> None:
    outcomes = []
    for moves in (False, True):
        torch.manual_seed(0)
        model, batch = WithBuffers(), torch.randn(4, 8)
        optimizer = adamw(model)
        model, optimizer = hightide.wrap(model, optimizer, batch, limits=ROOMY, micro_batch=2)
        run = run_of(model)
        assert run is not None and any(block.loose for block in run.profile.blocks)
        model(batch).backward()
        if moves:
            move(run, placed(run.plan, "streamed"))
        optimizer.step()
        model(batch).backward()
        optimizer.step()
        outcomes.append(states(model, optimizer))
        hightide.unwrap(model)
    assert all(torch.equal(plain, moved) for plain, moved in zip(*outcomes, strict=True))


def test_a_graph_of_before_says_that_its_plan_is_gone() -> None:
    model, _, run, batch = wrapped("streamed", torch.float32)
    loss = models.loss_of(model, batch)
    move(run, placed(run.plan, "resident"))
    models.loss_of(model, batch)
    with pytest.raises(RuntimeError, match="plan was changed"):
        loss.backward()
    hightide.unwrap(model)


def test_old_host_memory_is_given_back_on_the_way() -> None:
    """Bytes that were moved read as zero where they lay."""
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3)))
    batch = torch.randn(2, 128)
    plan = hightide.plan(model, adamw(model), batch, limits=ROOMY)
    model, _ = hightide.wrap(model, adamw(model), batch, plan=placed(plan, "streamed"))
    run = run_of(model)
    assert run is not None
    flats = [run.chunks.home(spec.index) for spec in run.chunks.specs]
    assert all(flat.count_nonzero() > flat.numel() * 0.9 for flat in flats)
    move(run, placed(run.plan, "resident"))
    assert all(flat.count_nonzero() < flat.numel() // 4 for flat in flats)
    hightide.unwrap(model)
