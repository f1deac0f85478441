"""The model's own gradient checkpointing is off while hightide profiles and trains, and as before when it is done."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hightide
import models
from hightide.profiler.switches.checkpointing import is_on, was_on

LIMITS = hightide.Limits(gpu="64MiB", host="64MiB")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def checkpointed(reentrant: bool, **options: Any) -> models.Pair:
    model, batch = models.llama(mask=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant}, **options)
    return model, batch


def state_of(model: nn.Module) -> list[Any]:
    """Which modules recompute, and how."""
    return [
        (name, module.gradient_checkpointing, module._gradient_checkpointing_func.keywords)
        for name, module in model.named_modules()
        if hasattr(module, "_gradient_checkpointing_func")
    ]


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_is_off_while_the_model_is_profiled_and_on_again_after_plan(reentrant: bool) -> None:
    model, batch = checkpointed(reentrant)
    plain, _ = models.llama(mask=False)
    before = state_of(model)
    assert any(flag for _, flag, _ in before)
    plan = partial(hightide.plan, batch=batch, limits=LIMITS, micro_batch=2)
    # Transformers hangs a hook on the embedding, which is then no plain one; nothing is decided by that here.
    assert plan(model, optimizer_of(model)).decisions == plan(plain, optimizer_of(plain)).decisions
    assert state_of(model) == before and not any(was_on(module) for module in model.modules())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_refused_wrap_leaves_it_on(reentrant: bool) -> None:
    model, batch = checkpointed(reentrant, every_n_layers=2)
    before = state_of(model)
    with pytest.raises(ValueError, match="GPU"):
        hightide.wrap(model, optimizer_of(model), batch, limits=hightide.Limits(gpu=1000, host="64MiB"))
    assert state_of(model) == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_wrapped_it_is_off_and_equal_to_plain_and_unwrapped_it_is_on_again(reentrant: bool) -> None:
    model, batch = checkpointed(reentrant, every_n_layers=2)
    plain, before = copy.deepcopy(model), state_of(model)
    model, _ = hightide.wrap(model, optimizer_of(model), batch, limits=LIMITS, micro_batch=2)
    assert not model.is_gradient_checkpointing
    for one in (model, plain):
        one(**batch).loss.backward()
    for name, param in plain.named_parameters():
        assert torch.allclose(model.get_parameter(name).grad.clone(), param.grad, atol=1e-6), name
    assert state_of(hightide.unwrap(model)) == before


def test_a_model_around_one_of_transformers() -> None:
    inner, batch = checkpointed(False)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **batch: Any) -> Any:
            return self.inner(**batch)

    model = Around()
    model, _ = hightide.wrap(model, optimizer_of(model), batch, limits=LIMITS)
    assert not is_on(model)
    model(**batch).loss.backward()


def test_switching_it_on_after_wrapping_changes_nothing_and_says_so() -> None:
    """As transformers' Trainer does, with gradient_checkpointing=True."""
    model, batch = models.llama(mask=False)
    model, _ = hightide.wrap(model, optimizer_of(model), batch, limits=LIMITS)
    with pytest.warns(UserWarning, match="plan"):
        model.gradient_checkpointing_enable()
    assert not model.is_gradient_checkpointing
    model(**batch).loss.backward()


def test_a_layer_that_is_switched_on_by_hand_is_refused() -> None:
    model, batch = models.llama(mask=False)
    model, _ = hightide.wrap(model, optimizer_of(model), batch, limits=LIMITS)
    model.model.layers[1].gradient_checkpointing = True
    with pytest.raises(hightide.Refused, match="gradient_checkpointing_disable"):
        model(**batch)
