"""Architectures whose tensors take unusual ways, on a real GPU: equal to plain PyTorch there, fp32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from streamed import wrap

import hightide
import models
from hightide.runtime.surgery import run_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [models.qwen3_moe, models.t5, models.gemma2], ids=lambda make: make.__name__)
def test_equal_to_plain_pytorch(make: Any, padded: bool) -> None:
    model, batch = make(padded=padded)
    plain = copy.deepcopy(model).cuda()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4)
    on_gpu = {name: value.cuda() for name, value in batch.items()}
    model, wrapped = wrap(model, batch)
    for _ in range(5):
        losses = []
        for one, update, values in ((plain, optimizer, on_gpu), (model, wrapped, batch)):
            loss = one(**values).loss
            loss.backward()
            update.step()
            update.zero_grad()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[0])
    hightide.unwrap(model)


def test_a_path_that_comes_later_is_probed_with_a_batch_that_is_on_the_gpu() -> None:
    model, batch = models.llama()
    model, _ = wrap(model, batch)
    padded = {name: value.cuda() for name, value in models.token_batch(padded=True).items()}
    model(**padded).loss.backward()
    splits = [split for (_, signature), split in run_of(model).splits.known.items() if "bool[4]" in signature]
    assert splits and all(split.splittable for split in splits), "the layers with a mask are split too"
    hightide.unwrap(model)
