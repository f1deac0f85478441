"""Gradients on the GPU that their updates use up in backward: any loop goes as with states on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
from hightide.ir.tier import Tier
from hightide.runtime.surgery import run_of

LIMITS = hightide.Limits(gpu="16MiB", host="16MiB")
WHERE = ("gpu", "host")


def wrapped(model: nn.Module, batch: Tensor, where: str, params: list[nn.Parameter] | None = None) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(params or model.parameters(), lr=3e-3, eps=1e-4)
    options: dict[str, Any] = {"update": "in_backward"}
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=2, **options)
    if where == "host":
        away = {"params": Tier.HOST, "states": Tier.HOST}
        blocks = tuple(replace(block, **away) if block.name else block for block in plan.blocks)
        plan = replace(plan, blocks=blocks, num_slots=6, num_grad_slots=6)
    wrapped_model, wrapped_optimizer = hightide.wrap(model, optimizer, batch, plan=plan, **options)
    chunks = run_of(wrapped_model).chunks
    assert any(place.is_used_up for place in chunks.placed) == (where == "gpu")
    return wrapped_model, wrapped_optimizer


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(branch(x).pow(2).mean() for branch in self.branches)


@pytest.mark.filterwarnings("ignore:.*did not foresee")
@pytest.mark.parametrize("where", WHERE)
def test_two_losses_of_one_forward_may_have_a_step_each(where: str) -> None:
    torch.manual_seed(0)
    model, batch = TwoBranches(), torch.randn(4, 16)
    plain = TwoBranches()
    plain.load_state_dict(model.state_dict())
    reference = torch.optim.AdamW(plain.parameters(), lr=3e-3, eps=1e-4)
    ours, optimizer = wrapped(model, batch, where)
    for _ in range(3):
        for trained, updates in ((ours, optimizer), (plain, reference)):
            first, second = trained(batch)
            first.backward()
            updates.step()
            updates.zero_grad()
            second.backward()
            updates.step()
            updates.zero_grad()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
    hightide.unwrap(ours)


class Bomb(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Bomb.armed:
            raise KeyError("boom")
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(Bomb.apply(self.a(x)).relu())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("between", ["nothing", "evaluation", "another forward"])
def test_after_an_exception_in_backward_step_does_the_same_wherever_states_are(
    between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = []
    for where in WHERE:
        torch.manual_seed(0)
        batch = torch.randn(4, 16)
        model, optimizer = wrapped(Stack(), batch, where)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        loss = model(batch)
        with monkeypatch.context() as armed, pytest.raises(KeyError):
            armed.setattr(Bomb, "armed", True)
            loss.backward()
        if between != "nothing":
            with torch.set_grad_enabled(between == "another forward"):
                model(batch)
        optimizer.step()
        optimizer.zero_grad()
        changed.append({name for name, value in model.state_dict().items() if not torch.equal(value, before[name])})
        for _ in range(2):  # and it goes on
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        hightide.unwrap(model)
    assert changed[0] == changed[1] != set()


def test_a_gradient_that_the_optimizer_does_not_know_is_named() -> None:
    model, batch = Stack(), torch.randn(4, 16)
    owned = [param for name, param in model.named_parameters() if not name.endswith("bias")]
    model, optimizer = wrapped(model, batch, "host", owned)
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"model.zero_grad\(\) \(the optimizer does not know 'layers.*bias'"):
        model(batch).backward()
    model.zero_grad()
    hightide.unwrap(model)
