"""Whatever a block's slots and gradients go through, the streams of a GPU must be ordered by fences, on the plan and
off it. The race detector replaces them on a machine without a GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import race_detector
import torch
from test_layer_drop import Reordered
from torch import nn

import hightide
import models
from each_value import each_value
from hightide.ir.activation import Activation
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.runtime.lanes import thread_lives
from hightide.runtime.surgery import run_of

ORDER = [0, 1, 2, 3, 4]
draw = random.Random(4)
ORDERS: dict[str, list[list[int]]] = {
    "as planned": [ORDER] * 4,
    "left out": [sorted(draw.sample(ORDER, draw.randint(1, 5))) for _ in range(10)],
    "another order": [draw.sample(ORDER, 5) for _ in range(10)],
    "twice": [ORDER if step % 3 else [0, 1, 2, 1, 3, 4, 4] for step in range(9)],
}

KINDS = ("slot", "gradient slot", "home of gradient", "home of parameter")
CASES = each_value(list(ORDERS), ("deferred",), (1, 2))
CASES += [(orders, "in_backward", 1) for orders in ORDERS if orders != "twice"]  # that would break its promise


def streamed(plan: Plan) -> Plan:
    away = {"params": Tier.HOST, "states": Tier.HOST, "inputs": Tier.HOST, "activation": Activation.RECOMPUTE}
    blocks = tuple(
        replace(block, **away, settles=index % 2 == 0) if block.name else block
        for index, block in enumerate(plan.blocks)
    )
    widest = max(plan.layout.num_slots(chunk) for chunk in plan.layout.chunks)
    return replace(plan, blocks=blocks, num_slots=3 * widest, num_grad_slots=2 * widest)


def wrapped(
    update: str, model: nn.Module, batch: Any, edit: Callable[[Plan], Plan] = streamed
) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    limits = hightide.Limits(gpu="16MiB", host="16MiB")
    plan = hightide.plan(model, optimizer, batch, limits=limits, micro_batch=2, update=update)
    return hightide.wrap(model, optimizer, batch, plan=edit(plan), update=update)


@pytest.mark.filterwarnings("ignore:.*did not foresee")
@pytest.mark.parametrize(("orders", "update", "accumulate"), CASES)
def test_no_stream_overtakes_another(
    orders: str, update: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector = race_detector.install(monkeypatch)
    batch = models.vector_batch(num_samples=4)
    model, optimizer = wrapped(update, Reordered().train(), batch)
    for order in ORDERS[orders]:
        for part in range(accumulate):
            model.order = order if part == 0 else order[::-1]
            models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    deviations = hightide.stats(model).deviations
    run_of(model).executor.wait_for_updates()
    hightide.unwrap(model)
    assert (deviations == 0) == (orders == "as planned" and accumulate == 1)
    assert min(detector.num_uses[kind] for kind in KINDS) > 10
    assert not detector.races, "\n".join(sorted(set(detector.races)))


def partly_streamed(plan: Plan, num_grad_slots: int) -> Plan:
    """Every other block on the GPU, where in_backward uses gradients up in their slots."""
    widest = max(plan.layout.num_slots(chunk) for chunk in plan.layout.chunks)
    there = replace(plan, num_grad_slots=num_grad_slots * widest, num_slots=3 * widest)
    away = streamed(plan).blocks
    return replace(there, blocks=tuple(away[at] if at % 2 else block for at, block in enumerate(plan.blocks)))


@pytest.mark.filterwarnings("ignore:.*did not foresee")
@pytest.mark.parametrize(("orders", "num_grad_slots"), each_value(("as planned", "left out", "another order"), (1, 2)))
def test_gradients_that_are_used_up_leave_their_slots_in_order(
    orders: str, num_grad_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for update in ("deferred", "in_backward"):
        with monkeypatch.context() as patched:
            detector = race_detector.install(patched)
            torch.manual_seed(0)
            batch = models.vector_batch(num_samples=4)
            model, optimizer = wrapped(update, Reordered().train(), batch, lambda p: partly_streamed(p, num_grad_slots))
            run = run_of(model)
            used_up = [place.chunk.index for place in run.chunks.placed if place.is_used_up]
            assert bool(used_up) == (update == "in_backward")
            for order in ORDERS[orders]:
                model.order = order
                models.loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            assert not run.chunks.grad_slots.everyone()
            hightide.unwrap(model)
        assert not detector.races, "\n".join(sorted(set(detector.races)))
        results.append(weights)
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.filterwarnings("ignore:.*did not foresee")
@pytest.mark.parametrize("order", [ORDER, ORDER[::-1]], ids=["as planned", "another order"])
@pytest.mark.parametrize("between", ["evaluation", "another forward"])
def test_an_update_waits_for_copies_of_what_it_writes(
    between: str, order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetches for a pass between backward and step() may still be reading when the update begins to write."""
    detector = race_detector.install(monkeypatch)
    batch = models.vector_batch(num_samples=4)
    model, optimizer = wrapped("deferred", Reordered().train(), batch)
    for _ in range(3):
        models.loss_of(model, batch).backward()
        with torch.set_grad_enabled(between == "another forward"):
            model.order = order
            model(**batch)
            model.order = ORDER
        optimizer.step()
        optimizer.zero_grad()
    run_of(model).executor.wait_for_updates()
    hightide.unwrap(model)
    assert detector.num_uses["home of parameter"] > 10
    assert not detector.races, "\n".join(sorted(set(detector.races)))


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = (branch(x).pow(2).mean() for branch in self.branches)
        return left, right


@pytest.mark.filterwarnings("ignore:.*did not foresee")
def test_an_update_waits_for_a_gradient_that_left_off_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first backward of a pass all planned gradients have left; those of the second leave off the plan, and
    the planned updates must wait for them too."""

    def weights() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model, optimizer = wrapped("deferred", TwoBranches(), torch.randn(4, 16))
        for _ in range(3):
            for loss in model(torch.ones(4, 16)):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return hightide.unwrap(model).state_dict()

    expected = weights()
    run = thread_lives._run

    def late(task: Any, *rest: Any) -> None:
        if task.lane is Lane.D2H and task.id.startswith("demand"):
            time.sleep(0.05)
        run(task, *rest)

    monkeypatch.setattr(thread_lives, "_run", late)
    for name, weight in weights().items():
        assert torch.equal(weight, expected[name]), name
