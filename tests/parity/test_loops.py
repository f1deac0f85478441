"""Users' loops as they are: accumulation, zero_grad wherever it stands, skipped steps, gradients changed by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import SUBJECTS, Loop, Trained, assert_streamed, compare, make_optimizer, make_step, streamed, wrap
from torch import Tensor

import hightide
import models
from each_value import each_value
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier

LLAMA = SUBJECTS["llama"]
TIED = SUBJECTS["llama_tied"]
WRAP = {"micro_batch": 3}


def check(subject: Any = LLAMA, num_steps: int = 3, wrapping: dict[str, Any] = WRAP, **options: Any) -> Trained:
    build = partial(subject.build, num_samples=7)
    _, wrapped = compare(build, lambda: subject.batches(num_steps), wrap=wrapping, **options)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])
    return wrapped


def test_accumulation_with_states_on_the_gpu() -> None:
    """Some blocks are persistent: their gradients never leave the GPU between the two backwards."""
    build = partial(LLAMA.build, num_samples=7)
    model, batch = build()
    plan = streamed(hightide.plan(model, make_optimizer(model), batch, **WRAP), Activation.RECOMPUTE)
    stays = {"params": Tier.GPU, "states": Tier.GPU}
    blocks = tuple(replace(block, **stays) if at % 2 else block for at, block in enumerate(plan.blocks))
    _, wrapped = compare(
        build,
        lambda: list(zip(LLAMA.batches(5, seed=10), LLAMA.batches(5, seed=50), strict=True)),
        wrap={"plan": replace(plan, blocks=blocks)},
        clip="torch",
        accumulate=2,
    )
    assert wrapped.stats is not None and wrapped.stats.deviations == 0
    assert wrapped.stats.moved_bytes["d2h"] > 0, "the gradients of the others do"


@pytest.mark.parametrize(("name", "zero_grad"), each_value(("llama", "llama_tied"), ("before", "between", "after")))
def test_zero_grad_wherever_it_stands(name: str, zero_grad: str) -> None:
    check(SUBJECTS[name], zero_grad=zero_grad, clip="torch")


@pytest.mark.parametrize("zero_grad", ["before", "between"])
def test_zero_grad_wherever_it_stands_in_backward(zero_grad: str) -> None:
    check(wrapping=WRAP | {"update": "in_backward"}, zero_grad=zero_grad)


def test_zero_grad_of_the_model() -> None:
    def step(loop: Loop, batch: Any) -> Tensor:
        loop.model.zero_grad()
        loss = models.loss_of(loop.model, batch)
        loss.backward()
        loop.optimizer.step()
        return loss

    check(step=step)


@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_zero_grad_that_keeps_zeros(whose: str) -> None:
    def step(loop: Loop, batch: Any) -> Tensor:
        loss = models.loss_of(loop.model, batch)
        loss.backward()
        loop.optimizer.step()
        (loop.model if whose == "model" else loop.optimizer).zero_grad(set_to_none=False)
        return loss

    check(step=step)


def test_a_step_on_gradients_that_were_zeroed_still_decays() -> None:
    """torch.optim updates a parameter whose gradient is zero, and skips one whose gradient is None."""

    def step(loop: Loop, batch: Any) -> Tensor:
        loss = models.loss_of(loop.model, batch)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=loop.index % 2 == 0)
        loop.optimizer.step()  # every second time on zeros, else on nothing
        loop.optimizer.zero_grad()
        return loss

    check(step=step)


def test_skipped_steps_drop_their_gradients() -> None:
    def step(loop: Loop, batch: Any) -> Tensor:
        loss = models.loss_of(loop.model, batch)
        loss.backward()
        if loop.index % 3 != 1:
            loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    check(step=step, num_steps=7)


def test_skipped_steps_keep_their_gradients() -> None:
    """No zero_grad either: the next backward adds to what is there, scaled as it was."""

    def step(loop: Loop, batch: Any) -> Tensor:
        loss = models.loss_of(loop.model, batch)
        loss.backward()
        loop.norms.append(float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.7)))
        if loop.index % 3 != 1:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        return loss

    check(step=step, num_steps=7)


def test_a_forward_without_backward_leaves_no_trace() -> None:
    def step(loop: Loop, batch: Any) -> Tensor:
        discarded = models.loss_of(loop.model, batch)
        del discarded
        loss = models.loss_of(loop.model, batch)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    build = partial(LLAMA.build, num_samples=7)
    compare(build, lambda: LLAMA.batches(5), wrap=WRAP | {"room": 3.0}, step=step)


def test_gradients_scaled_by_hand() -> None:
    def step(loop: Loop, batch: Any) -> Tensor:
        loss = models.loss_of(loop.model, batch)
        (loss * 8).backward()
        for param in loop.model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.125)
        loop.norms.append(float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    check(TIED, step=step)


def test_gradients_taken_away_by_hand() -> None:
    """`p.grad = None` makes the optimizer skip a parameter; its step count stays behind."""

    def step(loop: Loop, batch: Any) -> Tensor:
        loss = models.loss_of(loop.model, batch)
        loss.backward()
        if loop.index % 2 == 0:
            for name, param in loop.model.named_parameters():
                if ".1." in name and "proj" in name:
                    param.grad = None
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    wrapped = check(step=step, num_steps=4)
    steps = {int(entry["step"]) for entry in wrapped.optimizer.state_dict()["state"].values()}
    assert steps == {2, 4}


def test_step_with_a_closure() -> None:
    def step(loop: Loop, batch: Any) -> Tensor:
        def closure() -> Tensor:
            loop.optimizer.zero_grad()
            loss = models.loss_of(loop.model, batch)
            loss.backward()
            return loss

        return loop.optimizer.step(closure)  # type: ignore[arg-type,return-value]

    check(step=step)


def test_gradients_can_be_read() -> None:
    """What a wrapped parameter shows as `.grad` has the values of the plain one."""
    plain, example = LLAMA.build(num_samples=7)
    model, _ = LLAMA.build(num_samples=7)
    model, _ = wrap(model, make_optimizer(model), example, **WRAP)
    models.loss_of(plain, example).backward()
    models.loss_of(model, example).backward()
    for (name, expected), (_, param) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert param.grad is not None and expected.grad is not None
        torch.testing.assert_close(
            param.grad.clone(), expected.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_clipping_by_the_largest_element() -> None:
    def step(loop: Loop, batch: Any) -> Tensor:
        loss = models.loss_of(loop.model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01, norm_type=float("inf"))
        loop.norms.append(float(norm))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    check(step=step)


def test_hyper_parameters_are_those_of_the_step() -> None:
    """Updates run after step() has returned; what the user does to the groups then must not reach them."""
    inner = make_step()

    def step(loop: Loop, batch: Any) -> Tensor:
        loss = inner(loop, batch)
        for group in loop.optimizer.param_groups:
            group["lr"] = 1e-3 * (2 + loop.index % 3)
            group["weight_decay"] = 0.1 * (loop.index % 2)
            group["betas"] = (0.9 - 0.05 * (loop.index % 2), 0.999)
        return loss

    check(step=step, groups=2)
