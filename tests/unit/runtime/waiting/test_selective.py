"""Between recomputing and keeping: what is dear is held, what is cheap is repeated, and no result changes."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hightide
import models
from each_value import each_value
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, Selective, Work
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.runtime.waiting.selective import HeldResults
from unit.runtime.steps import train_step, twins

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def with_level(activation: Activation, inputs: Tier = Tier.GPU):
    def edit(plan: Plan) -> Plan:
        near = Tier.GPU if activation is Activation.KEEP else inputs
        blocks = [replace(one, activation=activation, inputs=near) if one.name else one for one in plan.blocks]
        return replace(plan, blocks=tuple(blocks), gpu_limit_bytes=2**24)

    return edit


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def products_in_backward(activation: Activation) -> int:
    model, batch = models.ZOO["llama"]()
    pair = twins(model, batch, edit=with_level(activation))
    loss = models.loss_of(pair.model, batch)
    with Operations() as seen:
        loss.backward()
    pair.close()
    return sum(seen.counts[product] for product in PRODUCTS)


def test_no_product_is_repeated_by_backward() -> None:
    again, selective, kept = (products_in_backward(activation) for activation in Activation)
    assert selective == kept < again


def test_memory_lies_between_and_is_foreseen() -> None:
    peaks, kept = [], []
    for activation in Activation:
        model, batch = models.ZOO["llama"]()
        pair = twins(model, batch, edit=with_level(activation))
        for _ in range(2):
            pair.assert_equal(*pair.step())
        stats = hightide.stats(pair.model)
        assert stats.peak_bytes["gpu"] <= stats.plan.forecast.gpu_peak_bytes
        peaks.append(stats.peak_bytes["gpu"])
        assert pair.run.plan.profile is not None
        kept.append(pair.run.plan.profile.calls[1].held(activation).at(6))
        pair.close()
    assert peaks[0] < peaks[1] < peaks[2]
    assert 0 == kept[0] < kept[1] < kept[2]


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("t5", Tier.HOST),
        ("llama_tied", Tier.HOST),
        *(pytest.param(name, Tier.GPU, marks=pytest.mark.long) for name in ("llama_tied", "gpt2", "vit", "t5")),
        *(pytest.param(name, Tier.HOST, marks=pytest.mark.long) for name in ("gpt2", "vit", "hand_written")),
    ],
)
def test_every_level_gives_the_same_bits(name: str, inputs: Tier) -> None:
    results = []
    for activation in Activation:
        model, batch = models.ZOO[name]()
        pair = twins(model, batch, edit=with_level(activation, inputs))
        losses = [train_step(pair.model, pair.optimizer, batch) for _ in range(3)]
        results.append((losses, {key: value.clone() for key, value in pair.model.state_dict().items()}))
        pair.close()
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(value, results[0][1][key]) for key, value in weights.items())


class InPlace(nn.Module):
    """Writes over what a product has made: what was held is not what the product gave."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h.mul_(2.0).add_(1.0)
        return x + self.second(torch.sigmoid(h) * torch.tanh(h))


class Dropping(nn.Module):
    """Random numbers after a product, and between two."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(torch.tanh(self.first(x)), 0.3)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return x + nn.functional.dropout(self.second(h), 0.3)


class Unseen(nn.Module):
    """Writes that the version of a product's result does not tell."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h.data.mul_(0.5)
        return x + self.second(torch.sigmoid(h) * torch.tanh(h))


class Recurrent(nn.Module):
    """It writes over parts of a product, which are no views of it: `unsafe_split`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gru(x)[0]


class TwoOutputs(nn.Module):
    """The first output is a held result itself, or without bias an alias of it, and the model writes over it."""

    def __init__(self, bias: bool = True, width: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        self.rest = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        return h, self.rest(torch.sigmoid(h) * torch.tanh(h))


class Overwrites(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoOutputs(bias) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            first, second = block(x)
            x = x + first.mul_(0.5) + second
        return x


@pytest.mark.parametrize(
    ("kind", "micro_batch"),
    each_value(("in place", "dropping", "unseen", "recurrent", "overwrites", "overwrites an alias"), (2, 6)),
)
def test_what_is_written_over_or_drawn_is_as_in_plain_pytorch(kind: str, micro_batch: int) -> None:
    results = []
    for activation in Activation:
        torch.manual_seed(0)
        kinds = {"in place": InPlace, "dropping": Dropping, "unseen": Unseen, "recurrent": Recurrent}
        block = kinds.get(kind)
        model = Overwrites(kind == "overwrites") if block is None else nn.Sequential(*(block() for _ in range(3)))
        batch = torch.randn(6, 5, 32)
        optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)
        limits = hightide.Limits(gpu="64MiB", host="64MiB")
        plan = hightide.plan(model, optimizer, batch, limits=limits, micro_batch=micro_batch)
        assert plan.profile is not None
        assert all(call.selective is not None for call in plan.profile.calls)
        model, optimizer = hightide.wrap(model, optimizer, batch, plan=with_level(activation)(plan))
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, model.state_dict()))
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(value, results[0][1][key]) for key, value in weights.items())


def test_a_forward_without_a_backward_leaves_nothing() -> None:
    model, batch = models.ZOO["llama"]()
    pair = twins(model, batch, edit=with_level(Activation.SELECTIVE))
    pair.assert_equal(*pair.step())
    gc.collect()
    before = pair.run.gpu.used_bytes
    for _ in range(3):
        loss = models.loss_of(pair.model, batch)
        assert pair.run.gpu.used_bytes > before
        del loss
        gc.collect()
    assert pair.run.gpu.used_bytes == before
    pair.assert_equal(*pair.step())
    pair.close()


def test_results_are_held_in_the_order_of_their_making_and_no_more_than_asked() -> None:
    rule = Selective(Affine(), Work(), flop_per_byte=8, num_held=3)
    weight, x = torch.randn(64, 64), torch.randn(8, 64)
    thin = torch.randn(64, 2)

    def products() -> list[torch.Tensor]:
        return [x @ weight, (x @ thin) @ thin.T, x @ weight.T, x @ (2 * weight)]

    held = HeldResults(rule)
    forward, replay = held.contexts()
    with forward:
        made = products()
    with Operations() as seen, replay:
        again = products()
    assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True))
    assert [one.data_ptr() == other.data_ptr() for one, other in zip(made, again, strict=True)] == [
        True,
        False,  # too few operations for its bytes
        True,
        False,  # three are held already, one of them inside of the second
    ]
    assert seen.counts[aten.mm.default] == 2


class Force(nn.Module):
    """Takes a gradient in the middle of its forward, as models of energies do."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_(True)
            energy = torch.tanh(self.second(torch.tanh(self.first(y)))).square().sum()
            (force,) = torch.autograd.grad(energy, y, create_graph=True)
        return x + self.last(torch.tanh(force))


@pytest.mark.parametrize("activation", Activation)
def test_a_gradient_that_is_taken_in_the_middle_of_forward(activation: Activation) -> None:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(1)
        for _ in range(2):
            x = torch.randn(4, 32, generator=draw).requires_grad_(True)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {key: value.clone() for key, value in model.state_dict().items()}

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Force() for _ in range(3)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    plain, (model, optimizer), batch = trained(*made()), made(), (torch.randn(4, 32),)
    limits = hightide.Limits(gpu="16MiB", host="64MiB")
    plan = hightide.plan(model, optimizer, batch, limits=limits, micro_batch=4)
    blocks = tuple(replace(block, activation=activation) for block in plan.blocks)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=replace(plan, blocks=blocks))
    ours = trained(model, optimizer)
    assert max(float((ours[key] - value).abs().max()) for key, value in plain.items()) < 1e-6
    hightide.unwrap(model)
