"""`hightide.verify` on a real GPU: what is equal there is found equal, what is not is not, and nothing stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from streamed import rehearsed_llama
from torch import nn

import hightide
import models
from hightide.runtime.gradients.gradients import Gradients

pytestmark = pytest.mark.gpu


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("name", ["hand_written", "plain", "vit", "gpt2", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_models_are_equal(name: str, dropout: float) -> None:
    model, batch = models.ZOO[name](dropout=dropout, num_samples=7)
    before = torch.cuda.get_rng_state()
    verdict = hightide.verify(model, adamw(model), batch)
    assert verdict.equal, str(verdict)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert all(param.device.type == "cpu" for param in model.parameters())


@pytest.mark.parametrize("options", [{"compile": True}, {"update": "in_backward"}, {"gradients": "param"}])
def test_other_ways_to_wrap_are_equal(options: dict[str, Any]) -> None:
    model, batch = models.llama(num_samples=7)
    verdict = hightide.verify(model, adamw(model), batch, **options)
    assert verdict.equal, str(verdict)


def test_a_model_and_a_batch_on_the_gpu_are_equal() -> None:
    model, batch = models.llama(num_samples=7)
    model.cuda()
    verdict = hightide.verify(model, adamw(model), {name: value.cuda() for name, value in batch.items()})
    assert verdict.equal, str(verdict)


def test_a_model_that_is_rehearsed_is_equal_within_limits() -> None:
    model, batch = rehearsed_llama()
    verdict = hightide.verify(model, adamw(model), batch, limits=hightide.Limits(gpu="2GiB", host="16GiB"))
    assert verdict.equal, str(verdict)


def test_a_model_that_does_not_fit_the_gpu_is_made_smaller() -> None:
    model, batch = rehearsed_llama()
    verdict = hightide.verify(model, adamw(model), batch, memory="900MiB")
    assert verdict.equal, str(verdict)
    assert any("of 16" in text for text in verdict.changed)


def test_a_gradient_that_is_scaled_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    harvest, name = Gradients.harvest, "layers.1.mlp.0.weight"

    def wrong(self: Gradients, chunk: int, block: int | None) -> None:
        parameter = self._chunks.parameters[name]
        if any(entry.param == name for entry in self._entries[chunk]) and parameter.grad is not None:
            parameter.grad.data.mul_(1.001)
        harvest(self, chunk, block)

    monkeypatch.setattr(Gradients, "harvest", wrong)
    model, batch = models.hand_written(num_samples=6)
    verdict = hightide.verify(model, adamw(model), batch)
    assert verdict.first is not None and (verdict.first.what, verdict.first.where) == ("gradient", name), str(verdict)


def test_precision_of_products_is_as_before() -> None:
    model, batch = models.hand_written(num_samples=6)
    torch.backends.cudnn.allow_tf32 = True
    before = torch.get_float32_matmul_precision()
    hightide.verify(model, adamw(model), batch)
    assert torch.get_float32_matmul_precision() == before and torch.backends.cudnn.allow_tf32
