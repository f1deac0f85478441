"""Operations are counted on tensors without values; formulas are the judge."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import models
from hightide.ir.block import CallSpec, ModelProfile
from hightide.profiler.model.model_profile import profile_model

B, T, H, FFN, KV = models.NUM_SAMPLES, models.NUM_TOKENS, models.HIDDEN, 48, 16  # of models.llama


def call_of(profile: ModelProfile, name: str) -> CallSpec:
    index = next(block.index for block in profile.blocks if block.name == name)
    return next(call for call in profile.calls if call.block == index)


@pytest.mark.parametrize("num_samples", [1, 4, 7])
def test_a_linear_is_its_products(num_samples: int) -> None:
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    profile, _ = profile_model(model, None, torch.zeros(6, 24))
    first, second = profile.calls
    product = 2 * num_samples * 24 * 40
    assert first.forward.flop.at(num_samples) == product
    assert first.backward.flop.at(num_samples) == product  # of the weight; the batch needs no gradient
    assert second.backward.flop.at(num_samples) == 2 * 2 * num_samples * 40 * 8
    assert first.recompute.flop.at(num_samples) == 0  # its output is not needed, and its input waits
    assert first.forward.touched_bytes.at(num_samples) == 4 * (24 * 40 + 40 + num_samples * (24 + 40))


def test_a_llama_layer_stops_recomputing_before_its_last_projection() -> None:
    model, batch = models.llama(mask=False)
    call = call_of(profile_model(model, None, batch)[0], "model.layers.1")
    weights = 2 * H * H + 2 * H * KV + 3 * H * FFN
    attention = 4 * T * T * H // 2  # scores and values, causal
    forward = B * T * 2 * weights + B * attention
    assert call.forward.flop.at(B) == forward
    assert call.recompute.flop.at(B) == forward - B * T * 2 * H * FFN
    # Attention's backward makes the scores again: five products for two.
    assert call.backward.flop.at(B) == B * T * 4 * weights + B * attention * 5 // 2


def test_what_is_touched_grows_with_the_samples_and_not_with_questions() -> None:
    model, batch = models.llama(mask=False)
    call = call_of(profile_model(model, None, batch)[0], "model.layers.1")
    for work in (call.forward, call.recompute, call.backward):
        assert 0 < work.touched_bytes.at(1) < work.touched_bytes.at(B) < B * work.touched_bytes.at(1)
    assert call.recompute.touched_bytes.at(B) < call.forward.touched_bytes.at(B)


def test_frozen_blocks_have_no_backward() -> None:
    model, batch = models.llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    call = call_of(profile_model(model, None, batch)[0], "model.layers.0")
    assert call.backward.flop.at(B) == call.recompute.flop.at(B) == 0 < call.forward.flop.at(B)


def test_equal_calls_are_of_one_kind() -> None:
    model, batch = models.llama(num_layers=4)
    profile, _ = profile_model(model, None, batch)
    kinds: dict[str, set[int]] = {}
    for call in profile.calls:
        kinds.setdefault(profile.blocks[call.block].kind, set()).add(call.kind)
    assert all(len(numbers) == 1 for numbers in kinds.values())
    assert sorted(number for (number,) in kinds.values()) == list(range(len(kinds)))
