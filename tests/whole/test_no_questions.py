"""Transformers' question to the GPU, whether sequences are packed, is answered without it where the answer is known."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hightide
import models

LIMITS = hightide.Limits(gpu="64MiB", host="64MiB")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The positions that were asked about."""
    masking = transformers.masking_utils
    original, questions = masking.find_packed_sequence_indices, []

    def ask(position_ids: Tensor) -> Any:
        questions.append(position_ids)
        return original(position_ids)

    monkeypatch.setattr(masking, "find_packed_sequence_indices", ask)
    return questions


def wrapped(model: nn.Module, batch: dict[str, Tensor]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return hightide.wrap(model, optimizer, batch, limits=LIMITS, device="cpu")[0]


def test_tokens_alone_are_not_packed_and_nobody_asks(asked: list[Tensor]) -> None:
    model, batch = models.llama(mask=False)
    plain = copy.deepcopy(model)
    model = wrapped(model, batch)
    asked.clear()
    library = transformers.masking_utils.find_packed_sequence_indices
    loss = model(**batch).loss
    assert not asked
    assert transformers.masking_utils.find_packed_sequence_indices is library, "nothing of it stays patched"
    assert plain(**batch, use_cache=False).loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert asked, "other models are asked as before"


def test_positions_of_the_user_are_looked_at(asked: list[Tensor]) -> None:
    model, batch = models.llama(mask=False)
    length = batch["input_ids"].shape[1]
    packed = torch.arange(length).remainder(length // 2).expand(len(batch["input_ids"]), -1)
    batch = {**batch, "position_ids": packed, "use_cache": False}
    plain = copy.deepcopy(model)
    model = wrapped(model, batch)
    asked.clear()
    loss = model(**batch).loss
    assert len(asked) == 1
    assert plain(**batch).loss.item() == pytest.approx(loss.item(), rel=1e-5)


def test_a_model_around_one_of_transformers_may_pack_by_itself(asked: list[Tensor]) -> None:
    inner, batch = models.llama(mask=False)

    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).remainder(4).expand_as(input_ids)
            return self.inner(input_ids=input_ids, labels=labels, position_ids=positions, use_cache=False)

    model = Packing()
    plain = copy.deepcopy(model)
    batch = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    model = wrapped(model, batch)
    asked.clear()
    loss = model(**batch).loss
    assert asked
    assert plain(**batch).loss.item() == pytest.approx(loss.item(), rel=1e-5)


def test_a_hook_may_pack_by_itself(asked: list[Tensor]) -> None:
    model, batch = models.llama(mask=False)

    def pack(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        tokens = kwargs["input_ids"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).remainder(4).expand_as(tokens)
        return args, {**kwargs, "position_ids": positions}

    plain = copy.deepcopy(model)
    for one in (model, plain):
        one.model.register_forward_pre_hook(pack, with_kwargs=True)
    model = wrapped(model, batch)
    loss = model(**batch, use_cache=False).loss
    assert plain(**batch, use_cache=False).loss.item() == pytest.approx(loss.item(), rel=1e-5)


def test_another_model_can_be_compiled_as_a_whole(asked: list[Tensor]) -> None:
    model, batch = models.llama(mask=False)
    other = copy.deepcopy(model)
    model = wrapped(model, batch)
    model(**batch).loss.backward()
    compiled = torch.compile(other, fullgraph=True, backend="eager")
    with torch.no_grad():
        logits = compiled(input_ids=batch["input_ids"], use_cache=False).logits
        torch.testing.assert_close(logits, other(input_ids=batch["input_ids"], use_cache=False).logits)
