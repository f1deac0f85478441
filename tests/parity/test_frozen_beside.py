"""Two models, each within its limits: one trains, the other is a frozen reference (DPO)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hightide
import models
from hightide.ir.tier import Tier
from hightide.runtime.surgery import run_of
from unit.runtime.steps import adamw, assert_equal_weights

NUM_PAIRS = 3
POLICY, REFERENCE = 500 * 1024, 180 * 1024


def log_probabilities(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None]).sum((1, 2))


def dpo_loss(model: nn.Module, reference: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    policy = log_probabilities(model, ids)
    with torch.no_grad():
        before = log_probabilities(reference, ids)
    ratio = policy - before
    return -F.logsigmoid(0.1 * (ratio[:NUM_PAIRS] - ratio[NUM_PAIRS:])).mean()


@pytest.mark.filterwarnings("ignore:hightide. the operation:UserWarning")
def test_dpo_equals_plain_pytorch_within_both_limits() -> None:
    model = models.llama()[0]
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    plain, plain_reference = copy.deepcopy(model), copy.deepcopy(reference)
    ids = models.token_batch(num_samples=2 * NUM_PAIRS)["input_ids"]
    example: dict[str, Any] = {"input_ids": ids}
    reference = hightide.wrap_frozen(reference, example, limits=hightide.Limits(gpu=REFERENCE, host="1MiB"))
    limits = hightide.Limits(gpu=POLICY, host="64MiB")
    model, optimizer = hightide.wrap(model, adamw(model), example, limits=limits)
    plain_optimizer = adamw(plain)
    for seed in range(3):
        ids = models.token_batch(seed, num_samples=2 * NUM_PAIRS)["input_ids"]
        losses = [dpo_loss(model, reference, ids), dpo_loss(plain, plain_reference, ids)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()
    assert_equal_weights(model, plain)
    run, its = run_of(model), run_of(reference)
    assert run is not None and its is not None
    assert run.gpu.peak_bytes <= POLICY and its.gpu.peak_bytes <= REFERENCE
    param_bytes = sum(param.nbytes for param in plain.parameters())
    assert its.plan.forecast.host_peak_bytes < 1.2 * param_bytes, "no gradients, no states"
    assert any(block.params is Tier.HOST for block in its.plan.blocks), "it streams"
    assert_equal_weights(reference, plain_reference)
    with torch.no_grad():
        for ours, theirs in ((model, plain), (reference, plain_reference)):
            found = ours.eval().generate(ids[:1, :4], max_new_tokens=4, do_sample=False)
            assert found.equal(theirs.eval().generate(ids[:1, :4], max_new_tokens=4, do_sample=False))
    for one in (model, reference):
        hightide.unwrap(one)
    assert not any(param.requires_grad for param in reference.parameters())


def test_called_with_gradients_a_frozen_model_hands_them_on() -> None:
    """A reward model: gradients go through it to what was computed before."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))).requires_grad_(False)
    plain, x = copy.deepcopy(layers), torch.randn(6, 16)
    frozen = hightide.wrap_frozen(layers, x.clone().requires_grad_(), limits=hightide.Limits(gpu="32KiB", host="1MiB"))
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    for model, value in zip((frozen, plain), inputs, strict=True):
        model(value).pow(2).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    hightide.unwrap(frozen)


def test_what_is_not_frozen_is_refused() -> None:
    model, batch = models.llama(num_layers=2)
    with pytest.raises(ValueError, match=r"parameters require gradients.*requires_grad_\(False\)"):
        hightide.wrap_frozen(model, batch)
    with pytest.raises(ValueError, match="0 parameters"):
        hightide.wrap_frozen(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.zeros(2, 2))
