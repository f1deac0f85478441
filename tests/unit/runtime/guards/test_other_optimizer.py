"""An optimizer over the parameters of a wrapped model, as transformers' Trainer makes one, is told what to use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
from hightide.ir.refusal import Refused

BATCH = (torch.ones(8, 16),)
GPU = {"resident": "4MiB", "streamed": "16KiB"}


class Own(torch.optim.Optimizer):
    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad)


def wrapped(plan: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    limits = hightide.Limits(gpu=GPU[plan], host="64MiB")
    return hightide.wrap(model, torch.optim.AdamW(model.parameters()), BATCH, device="cpu", limits=limits)


@pytest.mark.parametrize(
    ("plan", "kind", "options"),
    [
        ("resident", torch.optim.AdamW, {"fused": True}),  # the default of the Trainer: it scales gradients
        ("streamed", torch.optim.AdamW, {"fused": True}),
        ("streamed", torch.optim.SGD, {}),
        ("streamed", Own, {}),
    ],
)
def test_another_optimizer_is_told_which_one_to_use(plan: str, kind: Any, options: dict[str, Any]) -> None:
    model, _ = wrapped(plan)
    other = kind(model.parameters(), **options)
    model(*BATCH).sum().backward()
    told = (
        rf"step\(\) of another {kind.__name__} .*optimizers=\(optimizer, None\).*hightide.Trainer .*before it is wrap"
    )
    with pytest.raises(Refused, match=told):
        other.step()


def test_a_closure_of_the_right_one_that_reads_what_is_away_is_told_of_that() -> None:
    model, optimizer = wrapped("streamed")

    def closure() -> float:
        model(*BATCH).sum().backward()
        norm: Tensor = model.get_submodule("2.0").weight.norm()
        return norm.item()

    with pytest.raises(Refused, match=r"norm of the parameter '2.0.weight', whose values are elsewhere"):
        optimizer.step(closure)
