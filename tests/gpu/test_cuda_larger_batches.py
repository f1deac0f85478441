"""Batches larger than the example on a real GPU: the run moves to a plan that holds them, eager and compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hightide
import models
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
