"""Two forwards before one backward, in plans that have room for one: what the earlier graph has waits on the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hightide
from each_value import each_value
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.runtime.several_graphs import SEVERAL_GRAPHS
from hightide.runtime.surgery import run_of
from hightide.stores.store import OutOfMemory

WIDTH, SAMPLES, TOKENS = 32, 6, 24
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor, gate: Tensor) -> Tensor:
        made = self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return (x + gate * made.masked_fill(mask, 0)).transpose(1, 2).contiguous().transpose(1, 2)


class Words(nn.Module):
    """Integers, masks that all layers share, a loose parameter among their inputs, inputs that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, WIDTH)
        self.gate = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.words(ids), (ids % 7 == 0).unsqueeze(-1).expand(-1, -1, WIDTH)
        for layer in self.layers:
            x = layer(x, mask, self.gate)
        found: Tensor = self.out(x).mean(1)
        return found


def both(model: nn.Module, one: Tensor, other: Tensor) -> Tensor:
    return F.softplus(-model(one)).mean() + F.softplus(model(other)).mean()


def alike(model: nn.Module, one: Tensor, other: Tensor) -> Tensor:
    """Fewer samples in one of three."""
    return (model(one) - model(other)).square().mean() + 0.1 * model(one[:2]).square().mean()


def again(model: nn.Module, one: Tensor, other: Tensor) -> Tensor:
    """What it says decides what it reads next."""
    found = model(one)
    return (model(other + found.argmax(-1, keepdim=True)) * found).square().mean()


LOOPS: dict[str, Loss] = {"both": both, "alike": alike, "again": again}


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def draw() -> Tensor:
        return torch.randint(0, 30, (SAMPLES, TOKENS), generator=generator)

    return [(draw(), draw()) for _ in range(count)]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Words()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def tightest(**options: Any) -> int:
    model, optimizer = made()
    with pytest.raises(InfeasiblePlan) as refused:
        hightide.plan(model, optimizer, batches()[0][0], limits=hightide.Limits(gpu=1, host="64MiB"), **options)
    assert refused.value.num_bytes is not None
    return refused.value.num_bytes


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss) -> list[Tensor]:
    losses = []
    torch.manual_seed(5)
    for one, other in batches():
        loss = loss_of(model, one, other)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(value.detach().clone() for value in model.state_dict().values())]


def wrapped(gpu: int | str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = made()
    return hightide.wrap(
        model, optimizer, batches()[0][0], limits=hightide.Limits(gpu=gpu, host="64MiB"), micro_batch=2, **options
    )


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
@pytest.mark.parametrize(("name", "more"), each_value(list(LOOPS), (1.0, 1.4, 3.0)))
def test_they_fit_and_have_the_bits_of_a_plan_with_room(name: str, more: float) -> None:
    model, optimizer = wrapped("64MiB")
    expected = trained(model, optimizer, LOOPS[name])
    hightide.unwrap(model)
    model, optimizer = wrapped(int(more * tightest(micro_batch=2)))
    with pytest.warns(UserWarning, match="went to the host, and come back in backward"):
        found = trained(model, optimizer, LOOPS[name])
    stats = hightide.stats(model)
    assert stats.peak_bytes["gpu"] <= stats.plan.gpu_limit_bytes
    hightide.unwrap(model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
def test_a_plan_for_all_is_made_between_two_steps() -> None:
    model, optimizer = wrapped(2 * tightest(micro_batch=2))
    before, run = hightide.stats(model).plan, run_of(model)
    assert run is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained(model, optimizer, both)
        put = run.host.breakdown()
        trained(model, optimizer, both)
    said = [str(warning.message) for warning in told]
    assert sum(f"graphs of {2 * SAMPLES} samples were alive" in text for text in said) == 1
    assert sum("went to the host" in text for text in said) == 1
    after = hightide.stats(model).plan
    assert (before.num_samples, after.num_samples) == (SAMPLES, 2 * SAMPLES)
    assert run.host.breakdown() == put
    hightide.unwrap(model)


LEVELS = [
    (Activation.RECOMPUTE, Tier.GPU, Tier.GPU),
    (Activation.KEEP, Tier.GPU, Tier.GPU),
    (Activation.KEEP, Tier.HOST, Tier.HOST),
    (Activation.SELECTIVE, Tier.GPU, Tier.GPU),
    (Activation.SELECTIVE, Tier.HOST, Tier.GPU),
    (Activation.SELECTIVE, Tier.HOST, Tier.HOST),
]


@pytest.mark.filterwarnings("ignore:block .* was called in an order")
@pytest.mark.parametrize(("level", "micro_batch"), each_value(LEVELS, [2, SAMPLES]))
def test_nothing_stays_on_the_gpu_whatever_is_held_where(
    level: tuple[Activation, Tier, Tier], micro_batch: int
) -> None:
    activation, inputs, held = level
    model, optimizer = made()
    plan = hightide.plan(
        model, optimizer, batches()[0][0], limits=hightide.Limits(gpu="64MiB", host="64MiB"), micro_batch=micro_batch
    )
    blocks = [replace(one, activation=activation, inputs=inputs, held=held) for one in plan.blocks]
    same = [block if not block.name else other for block, other in zip(plan.blocks, blocks, strict=True)]
    results = []
    for puts_away in (False, True):
        model, optimizer = made()
        model, optimizer = hightide.wrap(model, optimizer, batches()[0][0], plan=replace(plan, blocks=tuple(same)))
        run = run_of(model)
        assert run is not None
        (one, other), *_ = batches()
        torch.manual_seed(5)
        empty = run.gpu.device_used_bytes
        found = model(one)
        if puts_away:
            for call in list(run.passes.graphs.open_calls):
                call.put_away()
            left = run.gpu.device_used_bytes - empty
            assert left <= 2 * one.numel() * one.element_size() + SAMPLES * TOKENS * WIDTH + 2048, "ids, mask, output"
        (found.square().mean() + model(other).square().mean()).backward()
        results.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
        optimizer.zero_grad()
        del found
        assert "block inputs" not in run.host.breakdown() and "activations" not in run.host.breakdown()
        hightide.unwrap(model)
    assert len(results[0]) == len(results[1]) > 30
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_graph_that_was_put_away_and_dropped_leaves_nothing() -> None:
    model, _ = wrapped("64MiB")
    run = run_of(model)
    assert run is not None
    before = run.host.breakdown(), run.gpu.device_used_bytes
    found = model(batches()[0][0])
    for call in list(run.passes.graphs.open_calls):
        call.put_away()
    assert run.host.breakdown() != before[0]
    del found, call
    model(batches()[0][0])
    assert (run.host.breakdown(), run.gpu.device_used_bytes) == before
    hightide.unwrap(model)


def test_where_the_host_has_no_room_either_the_error_says_why() -> None:
    model, optimizer = made()
    limits = hightide.Limits(gpu=tightest(micro_batch=2), host="64MiB")
    plan = hightide.plan(model, optimizer, batches()[0][0], limits=limits, micro_batch=2)
    host = plan.forecast.host_peak_bytes
    limits = hightide.Limits(gpu=limits.gpu, host=host)
    model, optimizer = hightide.wrap(model, optimizer, batches()[0][0], limits=limits, micro_batch=2)
    with pytest.raises(OutOfMemory) as raised:
        trained(model, optimizer, both)
    assert raised.value.__notes__ == [SEVERAL_GRAPHS]
    hightide.unwrap(model)
