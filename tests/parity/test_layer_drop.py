"""A block order that changes from step to step: slower, with a warning, never wrong."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from harness import SUBJECTS, Loop, Trained, compare
from torch import Tensor, nn
from torch.nn import functional as F

import models

WRAP = {"micro_batch": 3, "room": 1.1}
NUM_STEPS = 7


class Reordered(models.HandWritten):
    """Runs its layers in the order that it is told."""

    def __init__(self) -> None:
        super().__init__(num_layers=5)
        self.order = list(range(5))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.first(x) * self.scale
        for index in self.order:
            hidden = self.layers[index](hidden, gate=self.scale)
        prediction = self.head(hidden)
        return {"prediction": prediction} if labels is None else {"loss": F.mse_loss(prediction, labels)}


def reordered(order: list[int] | None = None) -> models.Pair:
    torch.manual_seed(0)
    model = Reordered().train()
    model.order = order or model.order
    return model, models.vector_batch(num_samples=7)


def train_in_order(
    orders: list[list[int]], example: list[int] | None = None, **options: Any
) -> tuple[Trained, Trained]:
    def step(loop: Loop, batch: Any) -> Tensor:
        loop.model.order = orders[loop.index]  # type: ignore[assignment]
        loss = models.loss_of(loop.model, batch)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    batches = SUBJECTS["hand_written"].batches(len(orders))
    wrap = WRAP | options
    return compare(partial(reordered, example), lambda: batches, wrap=wrap, step=step, groups=2)


def within_limits(trained: Trained) -> None:
    assert trained.stats is not None
    assert trained.stats.peak_bytes["gpu"] <= trained.stats.plan.gpu_limit_bytes
    assert trained.stats.peak_bytes["host"] <= trained.stats.plan.host_limit_bytes


def num_updates(trained: Trained) -> dict[int, int]:
    return {key: int(entry["step"]) for key, entry in trained.optimizer.state_dict()["state"].items()}


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_random_layers_are_left_out(update: str) -> None:
    draw = random.Random(3)
    orders = [sorted(draw.sample(range(5), draw.randint(1, 5))) for _ in range(NUM_STEPS)]
    plain, wrapped = train_in_order(orders, update=update)
    assert wrapped.stats is not None and wrapped.stats.deviations > 0
    within_limits(wrapped)
    steps = num_updates(wrapped)
    assert steps == num_updates(plain)
    assert len(set(steps.values())) > 1


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_layers_in_another_order_each_step(update: str) -> None:
    draw = random.Random(4)
    orders = [draw.sample(range(5), 5) for _ in range(NUM_STEPS)]
    with pytest.warns(UserWarning, match="order that the plan did not foresee") as caught:
        _, wrapped = train_in_order(orders, update=update)
    assert len([one for one in caught if "did not foresee" in str(one.message)]) == 1, "one warning is enough"
    assert wrapped.stats is not None and wrapped.stats.deviations > 0
    within_limits(wrapped)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_block_twice_as_the_example_had_it(update: str) -> None:
    """Foreseen: the plan has two calls, and the gradient is final after the second backward."""
    order = [0, 1, 2, 1, 3, 4]
    _, wrapped = train_in_order([order] * NUM_STEPS, example=order, update=update)
    assert wrapped.stats is not None and wrapped.stats.deviations == 0
    assert wrapped.stats.evictions >= 2 * NUM_STEPS
    within_limits(wrapped)


def test_a_block_twice_in_some_steps() -> None:
    orders = [[0, 1, 2, 3, 4] if step % 3 else [0, 1, 2, 1, 3, 4, 4] for step in range(NUM_STEPS)]
    _, wrapped = train_in_order(orders)
    assert wrapped.stats is not None and wrapped.stats.deviations > 0
    within_limits(wrapped)


def test_a_block_twice_in_some_steps_is_updated_after_its_last_backward() -> None:
    """In backward, as the plan says; but not by the gradient of the one call that the plan knows."""
    orders = [[0, 1, 2, 3, 4] if step % 3 != 2 else [0, 1, 2, 1, 3, 4] for step in range(6)]
    _, wrapped = train_in_order(orders, update="in_backward")
    within_limits(wrapped)


def test_accumulation_over_different_orders() -> None:
    draw = random.Random(5)
    orders = [[draw.sample(range(5), draw.randint(2, 5)) for _ in range(2)] for _ in range(8)]

    def step(loop: Loop, batch: Any) -> Tensor:
        total = torch.zeros(())
        for part, order in zip(batch, orders[loop.index], strict=True):
            loop.model.order = order  # type: ignore[assignment]
            loss = models.loss_of(loop.model, part)
            loss.backward()
            total += loss.detach()
        loop.norms.append(float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return total

    subject = SUBJECTS["hand_written"]
    batches = list(zip(subject.batches(8, seed=10), subject.batches(8, seed=50), strict=True))
    _, wrapped = compare(reordered, lambda: batches, wrap=WRAP, step=step)
    assert wrapped.stats is not None and wrapped.stats.deviations > 0
    within_limits(wrapped)


def test_random_layers_of_a_llama_are_left_out() -> None:
    """Tied weights, two parameter groups and clipping, with every decoder layer a coin toss."""
    subject = SUBJECTS["llama_tied"]

    def step(loop: Loop, batch: Any) -> Tensor:
        draw = random.Random(loop.index)
        kept = [layer for layer in loop.all_layers if draw.random() < 0.6] or loop.all_layers[:1]  # type: ignore[attr-defined]
        loop.model.model.layers = nn.ModuleList(kept)  # type: ignore[union-attr]
        loop.model.config.use_cache = False  # type: ignore[union-attr]  # it counts on the layers' own numbers
        loss = models.loss_of(loop.model, batch)
        loss.backward()
        loop.norms.append(float(torch.nn.utils.clip_grad_norm_(loop.everything, 0.5)))  # type: ignore[attr-defined]
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.model.model.layers = nn.ModuleList(loop.all_layers)  # type: ignore[attr-defined,union-attr]
        return loss

    def first(loop: Loop, batch: Any) -> Tensor:
        if loop.index == 0:
            loop.all_layers = list(loop.model.model.layers)  # type: ignore[attr-defined,union-attr]
            loop.everything = list(loop.model.parameters())  # type: ignore[attr-defined]
        return step(loop, batch)

    _, wrapped = compare(
        partial(subject.build, num_samples=7), lambda: subject.batches(NUM_STEPS), wrap=WRAP, step=first, groups=2
    )
    assert wrapped.stats is not None and wrapped.stats.deviations > 0
    within_limits(wrapped)
