"""Forward hooks inside blocks that come and go after wrapping."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
import models
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier

LIMITS = hightide.Limits(gpu="8MiB", host="64MiB")
NUM_SAMPLES = 7


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wrapped(activation: Activation, model: nn.Module, batch: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    plan = hightide.plan(model, optimizer_of(model), batch, limits=LIMITS, micro_batch=3)
    inputs = Tier.HOST if activation is Activation.RECOMPUTE else Tier.GPU
    blocks = tuple(
        replace(block, activation=activation, inputs=inputs) if block.name else block for block in plan.blocks
    )
    return hightide.wrap(model, optimizer_of(model), batch, plan=replace(plan, blocks=blocks))


class Keeper:
    """Keeps what hooks see, or what it computes of it."""

    def __init__(self, computes: bool = False) -> None:
        self.kept: list[Tensor] = []
        self._computes = computes

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept.append(output.square().mean() if self._computes else output)

    def loss(self) -> Tensor:
        return torch.stack([value.square().mean() for value in self.kept]).sum()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize("activation", [Activation.KEEP, Activation.RECOMPUTE])
def test_a_loss_of_what_a_late_hook_keeps_is_refused(activation: Activation, computes: bool, alone: bool) -> None:
    model, batch = models.hand_written(num_samples=NUM_SAMPLES)
    model, _ = wrapped(activation, model, batch)
    keeper = Keeper(computes)
    for layer in model.layers:
        layer.mlp.register_forward_hook(keeper)
    loss = model(**batch)["loss"]
    if alone:
        del loss
    with pytest.raises(hightide.Refused, match=r"middle of the block 'layers\.\d'.*before hightide\.wrap"):
        (keeper.loss() if alone else loss + keeper.loss()).backward()


@pytest.mark.parametrize("activation", [Activation.KEEP, Activation.RECOMPUTE])
def test_late_hooks_that_only_look_change_nothing(activation: Activation) -> None:
    model, batch = models.hand_written(num_samples=NUM_SAMPLES)
    plain = copy.deepcopy(model)
    model, _ = wrapped(activation, model, batch)
    seen: list[Tensor] = []
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    for one in (model, plain):
        one(**batch)["loss"].backward()
    assert len(seen) >= 9  # three micro-batches of three layers, and again where they are recomputed
    assert_same_gradients(plain, model)


@pytest.mark.parametrize("activation", [Activation.KEEP, Activation.RECOMPUTE])
def test_hooks_that_were_tapped_and_are_removed(activation: Activation) -> None:
    model, batch = models.hand_written(num_samples=NUM_SAMPLES)
    plain, keeper = copy.deepcopy(model), Keeper()
    handles = [layer.mlp.register_forward_hook(keeper) for layer in model.layers]
    model, _ = wrapped(activation, model, batch)
    keeper.kept.clear()
    (model(**batch)["loss"] + keeper.loss()).backward()  # they work as long as they are there
    model.zero_grad()
    for handle in handles:
        handle.remove()
    keeper.kept.clear()
    for one in (model, plain):
        one(**batch)["loss"].backward()
    assert not keeper.kept
    assert_same_gradients(plain, model)


@pytest.mark.parametrize("activation", [Activation.KEEP, Activation.RECOMPUTE])
def test_calls_of_hooks_inside_blocks_are_counted(activation: Activation) -> None:
    model, batch = models.hand_written(num_samples=NUM_SAMPLES)
    plain = copy.deepcopy(model)
    model, _ = wrapped(activation, model, batch)
    model(**batch)["loss"].backward()
    assert hightide.stats(model).extra_hook_calls == 0 and "hooks" not in str(hightide.stats(model))
    calls = [itertools.count(), itertools.count()]  # what runs again in backward does not put these back
    for index, one in enumerate((plain, model)):

        def count(*_: Any, index: int = index) -> None:
            next(calls[index])

        for layer in one.layers:
            layer.register_forward_hook(count)
            layer.norm.register_forward_pre_hook(count)
            layer.mlp.register_forward_hook(count)
            layer.mlp.register_forward_hook(count)
        for _ in range(2):
            one(**batch)["loss"].backward()
    stats = hightide.stats(model)
    in_plain, in_wrapped = map(next, calls)
    assert in_plain == 2 * 3 * 4 and stats.extra_hook_calls == in_wrapped - in_plain > 0
    assert f"hooks inside blocks: {stats.extra_hook_calls} calls more" in str(stats)
    with torch.no_grad():
        model(**batch)
    assert hightide.stats(model).extra_hook_calls == stats.extra_hook_calls
    assert all(len(layer.mlp._forward_hooks) == 2 for layer in model.layers)


def assert_same_gradients(plain: nn.Module, model: nn.Module) -> None:
    for name, param in plain.named_parameters():
        assert torch.allclose(model.get_parameter(name).grad.clone(), param.grad, atol=1e-6), name
