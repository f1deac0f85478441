"""Batches larger than the example on a real GPU: the run moves to a plan that holds them, eager and compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hightide
import models
from hightide.runtime.surgery import run_of
from unit.runtime.steps import adamw, assert_equal_weights, train_step

pytestmark = pytest.mark.gpu


def tokens(num_samples: int, length: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_samples * length)
    ids = torch.randint(3, models.VOCABULARY, (num_samples, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.filterwarnings("ignore:a batch of:UserWarning")
@pytest.mark.parametrize("compile", [False, True])
def test_longer_batches_and_an_evaluation(compile: bool) -> None:
    model = models.llama()[0]
    plain = copy.deepcopy(model).cuda()
    limits = hightide.Limits(gpu="256MiB", host="256MiB")
    lr = 1e-3  # compiled blocks round otherwise; with steps ten times as large that alone reaches the bound of weights
    model, optimizer = hightide.wrap(model, adamw(model, lr=lr), tokens(4, 8), limits=limits, compile=compile)
    plain_optimizer = adamw(plain, lr=lr)
    for num_samples, length in ((4, 8), (4, 30), (2, 12), (16, 30), (4, 8)):
        batch = tokens(num_samples, length)
        on_gpu = {name: value.cuda() for name, value in batch.items()}
        loss, expected = train_step(model, optimizer, batch), train_step(plain, plain_optimizer, on_gpu)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        larger = tokens(64, 30)
        on_gpu = {name: value.cuda() for name, value in larger.items()}
        torch.testing.assert_close(model(**larger).loss, plain(**on_gpu).loss, rtol=1e-4, atol=1e-5)
    assert hightide.stats(model).plan.num_samples >= 4
    hightide.unwrap(model)
    assert_equal_weights(model.cpu(), plain.cpu())


def test_a_frozen_model_beside_one_that_trains() -> None:
    model = models.llama()[0]
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    expected = copy.deepcopy(reference).cuda()
    limits = hightide.Limits(gpu="256MiB", host="64MiB")
    reference = hightide.wrap_frozen(reference, tokens(4, 8), limits=limits)
    model, optimizer = hightide.wrap(model, adamw(model), tokens(4, 8), limits=limits)
    train_step(model, optimizer, tokens(4, 8))
    batch = {name: value.cuda() for name, value in tokens(4, 8).items()}
    with torch.no_grad():
        torch.testing.assert_close(reference(**batch).loss, expected(**batch).loss, rtol=1e-5, atol=1e-6)
    for one in (model, reference):
        hightide.unwrap(one)


@pytest.mark.filterwarnings("ignore:a batch of:UserWarning")
def test_a_mask_on_the_gpu_is_looked_into_where_transformers_does_so_too() -> None:
    model = models.llama()[0]
    plain = copy.deepcopy(model).cuda()
    full = {name: value.cuda() for name, value in tokens(4, 30).items()}
    full["attention_mask"] = torch.ones_like(full["input_ids"])
    left_out = full["attention_mask"].clone()
    left_out[1, 20:] = 0
    limits = hightide.Limits(gpu="256MiB", host="256MiB")
    model, optimizer = hightide.wrap(model, adamw(model), full, limits=limits)
    run = run_of(model)
    assert run is not None and "attention_mask 4x30 of ones" in str(run.batches)
    plain_optimizer = adamw(plain)
    for batch in (full, full | {"attention_mask": left_out}, full):
        loss, expected = train_step(model, optimizer, batch), train_step(plain, plain_optimizer, batch)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert str(run.batches).endswith("attention_mask 4x30")
    hightide.unwrap(model)
    assert_equal_weights(model.cpu(), plain.cpu())


def test_nobody_waits_for_a_mask_that_a_model_of_ones_own_does_not_look_into() -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x).tanh()
            return (x * mask[..., None]).pow(2).mean()

    batch = {"x": torch.randn(8, 16, 64, device="cuda"), "mask": torch.ones(8, 16, dtype=torch.long, device="cuda")}
    model = Masked()
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=hightide.Limits(gpu="256MiB", host="256MiB"))
    run = run_of(model)
    assert run is not None and "mask 8x16 of ones" in str(run.batches)
    try:
        for step in range(5):
            if step == 3:
                torch.cuda.set_sync_debug_mode("error")
            model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    hightide.unwrap(model)
