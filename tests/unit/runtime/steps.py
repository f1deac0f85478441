"""What the runtime's tests share: a model beside its plain twin, and training steps of both."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hightide
import models
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of

Step = Callable[[nn.Module, torch.optim.Optimizer, Any], torch.Tensor]


@dataclass
class Twins:
    """A wrapped model and the same model in plain PyTorch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    plain: nn.Module
    plain_optimizer: torch.optim.Optimizer
    batch: Any

    @property
    def run(self) -> Run:
        run = run_of(self.model)
        assert run is not None
        return run

    def step(self, step: Step | None = None, batch: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of both; their losses."""
        batch = self.batch if batch is None else batch
        step = step or train_step
        return step(self.model, self.optimizer, batch), step(self.plain, self.plain_optimizer, batch)

    def assert_equal(self, loss: torch.Tensor, expected: torch.Tensor) -> None:
        """The bounds of the design's first invariant."""
        assert abs(loss.item() - expected.item()) <= 1e-6 * abs(expected.item()), (loss.item(), expected.item())
        assert_equal_weights(self.model, self.plain)

    def close(self) -> None:
        hightide.unwrap(self.model)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "eps": 1e-4, **options})


def twins(
    model: nn.Module, batch: Any, *, gpu: str | int = "64MiB", lr: float = 1e-2, edit: Any = None, **options: Any
) -> Twins:
    """`edit(plan) -> plan` changes the plan before it is used."""
    plain = copy.deepcopy(model)
    optimizer = adamw(model, lr=lr)
    options = {"micro_batch": 2, **options}
    limits = hightide.Limits(gpu=gpu, host="64MiB")
    if edit is not None:
        plan = edit(hightide.plan(model, optimizer, batch, limits=limits, **options))
        options = {"plan": plan}
        if plan.uses_disk:  # the file has no name: nothing is left there
            options["limits"] = hightide.Limits(disk=f"{tempfile.gettempdir()}:64MiB")
    else:
        options["limits"] = limits
    model, wrapped = hightide.wrap(model, optimizer, batch, **options)
    return Twins(model, wrapped, plain, adamw(plain, lr=lr), batch)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = models.loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_equal_weights(model: nn.Module, plain: nn.Module) -> None:
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        bound = 1e-5 * expected.abs().max().item() + 1e-6
        difference = (ours[name] - expected).abs().max().item()
        assert difference <= bound, (name, difference, bound)
