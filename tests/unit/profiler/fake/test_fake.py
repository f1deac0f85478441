from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import models
from hightide.profiler.fake.fake import fake_parameters


def everything(model: nn.Module) -> list[tuple[str, int]]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, id(tensor)) for name, tensor in tensors]


def test_the_very_objects_come_back_after_an_exception() -> None:
    model, batch = models.llama(tied=True)
    before, loss = everything(model), models.loss_of(model, batch)
    with pytest.raises(KeyError), fake_parameters(model):
        assert all(isinstance(param, FakeTensor) for param in model.parameters())
        assert all(isinstance(buffer, FakeTensor) for buffer in model.buffers())
        raise KeyError
    assert everything(model) == before
    assert torch.equal(models.loss_of(model, batch), loss)


def test_tied_parameters_stay_tied_and_frozen_ones_frozen() -> None:
    model, _ = models.llama(tied=True)
    model.model.norm.weight.requires_grad_(False)
    with fake_parameters(model):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert isinstance(model.lm_head.weight, nn.Parameter)
        assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["model.norm.weight"]


def test_a_model_on_the_meta_device_runs() -> None:
    with torch.device("meta"):
        model, _ = models.llama()
    batch = models.token_batch(padded=True)
    with fake_parameters(model):
        assert isinstance(models.loss_of(model, batch), FakeTensor)
    assert all(param.is_meta for param in model.parameters())


def test_what_the_model_stored_meanwhile_is_forgotten() -> None:
    class Caching(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            if not hasattr(self, "cache"):
                self.cache = self.weight.sum()
            return super().forward(input) * self.cache

    model = Caching(2, 2)
    with fake_parameters(model):
        model(torch.zeros(1, 2))
    assert not hasattr(model, "cache")
    assert not isinstance(model(torch.zeros(1, 2)), FakeTensor)
