"""Batches that differ from the example, and losses of the user's own."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import SUBJECTS, Loop, assert_streamed, compare, make_optimizer, no_warnings
from torch import Tensor
from torch.nn import functional as F

import hightide
import models
from hightide.ir.activation import Activation

LLAMA = SUBJECTS["llama"]
WRAP = {"micro_batch": 3}
BUILD = partial(LLAMA.build, num_samples=7)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padded_batches_after_unpadded_ones(name: str) -> None:
    """The mask of a full example never reaches the blocks; a padded batch brings one, and with it another probe."""
    subject = SUBJECTS[name]
    batches = [subject.batch(seed=10 + step, num_samples=7, padded=step in (1, 2, 5)) for step in range(6)]
    _, wrapped = compare(partial(subject.build, num_samples=7), lambda: batches, wrap=WRAP | {"room": 1.3})
    assert_streamed(wrapped)
    assert set(wrapped.samples_seen) == {3, 1}, "a padded batch must be split as well"


def test_unpadded_batches_after_padded_ones() -> None:
    batches = [LLAMA.batch(seed=10 + step, num_samples=7, padded=step in (0, 3)) for step in range(6)]
    _, wrapped = compare(partial(LLAMA.build, num_samples=7, padded=True), lambda: batches, wrap=WRAP)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])
    assert set(wrapped.samples_seen) == {3, 1}


def test_batches_without_a_mask_argument() -> None:
    batches = [models.token_batch(seed=10 + step, num_samples=7, mask=step % 2 == 0) for step in range(6)]
    _, wrapped = compare(BUILD, lambda: batches, wrap=WRAP)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])


def test_smaller_and_shorter_batches() -> None:
    def batch(step: int) -> dict[str, Tensor]:
        whole = models.token_batch(seed=10 + step, num_samples=(7, 5, 1, 4, 7, 3)[step])
        return {name: value[:, : (10, 10, 10, 7, 5, 10)[step]] for name, value in whole.items()}

    _, wrapped = compare(BUILD, lambda: [batch(step) for step in range(6)], wrap=WRAP)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])


@pytest.mark.parametrize("num_samples", [5, 7])
def test_what_leaves_a_block_token_by_token_is_split_at_other_lengths(num_samples: int) -> None:
    """A router's logits have a row per token, of which the example had 10 per sample: 7 samples of 6 are 42 rows."""
    whole = [models.token_batch(seed=10 + step, num_samples=num_samples) for step in range(2)]
    batches = [{name: value[:, : (10, 6)[step]] for name, value in batch.items()} for step, batch in enumerate(whole)]
    build = partial(models.qwen3_moe, num_layers=2, num_samples=num_samples)
    limits = hightide.Limits(gpu="16MiB", host="64MiB")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compare(build, lambda: batches, wrap={"limits": limits, "micro_batch": 2 if num_samples == 5 else 5})
    assert not [str(one.message) for one in said if "whole batch" in str(one.message)]


def test_num_items_in_batch() -> None:
    """What transformers' Trainer passes when it accumulates: the loss is a sum over tokens divided by this number."""

    def step(loop: Loop, batch: Any) -> Tensor:
        num_items = sum(int((part["labels"][:, 1:] != -100).sum()) for part in batch)
        total = torch.zeros(())
        for part in batch:
            loss = loop.model(**part, num_items_in_batch=num_items).loss
            loss.backward()
            total += loss.detach()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return total

    def batches() -> list[Any]:
        first = [LLAMA.batch(seed=10 + step, num_samples=7, padded=True) for step in range(5)]
        other = [LLAMA.batch(seed=50 + step, num_samples=4) for step in range(5)]
        return list(zip(first, other, strict=True))

    _, wrapped = compare(partial(LLAMA.build, num_samples=7, padded=True), batches, wrap=WRAP, step=step)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])


def own_loss_step(loop: Loop, batch: Any) -> Tensor:
    """No labels: the loop computes the loss, by `F.cross_entropy` of the logits."""
    logits = loop.model(**{name: value for name, value in batch.items() if name != "labels"})["logits"]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.long), "llama_tied", "gpt2", "plain"])
def test_own_cross_entropy_of_the_logits(name: str) -> None:
    """Without labels the logits are there, and a cross-entropy of them is still fused: no full logits, no warning."""
    subject = SUBJECTS[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*logits.*")
        compare(
            partial(subject.build, num_samples=7),
            lambda: subject.batches(5),
            wrap=WRAP | {"room": 1.5},
            step=own_loss_step,
        )


def test_a_loss_that_needs_all_logits() -> None:
    """z-loss: a function of the logits that is not cross-entropy. They are computed, with a warning, and are right."""

    def step(loop: Loop, batch: Any) -> Tensor:
        output = loop.model(**batch)
        loss = output.loss + 1e-2 * output.logits.logsumexp(dim=-1).square().mean()
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    with pytest.warns(UserWarning, match="logits"):
        compare(BUILD, lambda: LLAMA.batches(5), wrap=WRAP | {"room": 2.5}, step=step)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_loss_over_hidden_states(use_cache: bool) -> None:
    """The inner model is called alone; a cache that each recomputation fills once more would be wrong."""

    def build() -> models.Pair:
        model, batch = BUILD()
        model.config.use_cache = use_cache  # type: ignore[union-attr]
        return model, batch

    def step(loop: Loop, batch: Any) -> Tensor:
        hidden = loop.model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]  # type: ignore[operator]
        loss = F.mse_loss(hidden, torch.randn(hidden.shape, generator=torch.Generator().manual_seed(loop.index)))
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    model, batch = build()
    limits = hightide.Limits(gpu="4MiB", host="64MiB")
    plan = hightide.plan(model, make_optimizer(model), batch, limits=limits, micro_batch=3)
    blocks = tuple(replace(block, activation=Activation.RECOMPUTE) for block in plan.blocks)
    compare(build, lambda: LLAMA.batches(5), wrap={"plan": replace(plan, blocks=blocks)}, step=step)


def test_one_tensor_as_the_batch() -> None:
    batches = [models.vector_batch(seed=10 + step, num_samples=7)["x"] for step in range(8)]
    _, wrapped = compare(partial(models.sequential, num_samples=7), lambda: batches, wrap=WRAP, groups=2)
    assert wrapped.stats is not None and wrapped.stats.deviations == 0


def test_positional_arguments() -> None:
    subject = SUBJECTS["hand_written"]

    def build() -> Any:
        model, batch = subject.build(num_samples=7)
        return model, (batch["x"], batch["labels"])

    def step(loop: Loop, batch: Any) -> Tensor:
        loss = loop.model(batch["x"], batch["labels"])["loss"]
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    with no_warnings():
        _, wrapped = compare(build, lambda: subject.batches(5), wrap=WRAP, step=step)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])


def test_batches_that_the_user_keeps_do_not_fill_the_gpu() -> None:
    """A list of batches in host memory is the user's; only the one in use counts."""
    batches = LLAMA.batches(18)
    _, wrapped = compare(BUILD, lambda: batches, wrap=WRAP)
    assert wrapped.stats is not None
    batch_bytes = sum(value.nbytes for value in batches[0].values())
    spare_bytes = wrapped.stats.plan.gpu_limit_bytes - wrapped.stats.peak_bytes["gpu"]
    assert spare_bytes < 14 * batch_bytes, "with this much room all batches would fit; the test shows nothing"


def test_the_same_tensor_as_input_and_label() -> None:
    def batches() -> list[Any]:
        ids = [models.token_batch(seed=10 + step, num_samples=7)["input_ids"] for step in range(5)]
        return [{"input_ids": one, "labels": one} for one in ids]

    def build() -> Any:
        return models.llama(num_layers=3)[0], batches()[0]

    _, wrapped = compare(build, batches, wrap=WRAP)
    assert_streamed(wrapped, micro_batches=[3, 3, 1])
