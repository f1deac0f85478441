"""A wrapped model that nobody holds any more is freed, whatever state it was in."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
from hightide.ir.activation import Activation
from hightide.ir.tier import Tier
from hightide.runtime.surgery import run_of

SIZE = 256
ROOMS = {"streamed": "2MiB", "resident": "64MiB", "inputs on the host": "64MiB"}


class Interruption(Exception):
    pass


def wrapped(room: str, size: int = SIZE) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(size, size), nn.GELU()) for _ in range(6)))
    x = torch.randn(6, size)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    limits = hightide.Limits(gpu=ROOMS[room] if size == SIZE else "64MiB", host="512MiB")
    if room == "inputs on the host":
        plan = hightide.plan(model, optimizer, x, limits=limits, micro_batch=2)
        blocks = [replace(block, activation=Activation.RECOMPUTE, inputs=Tier.HOST) for block in plan.blocks]
        return *hightide.wrap(model, optimizer, x, plan=replace(plan, blocks=tuple(blocks))), x
    return *hightide.wrap(model, optimizer, x, limits=limits, micro_batch=2), x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def interrupted(*_: Any) -> None:
    raise Interruption


def with_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model, x).backward()
    optimizer.step()
    loss_of(model, x).backward()


def cleared(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def after_a_failed_forward(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    with_gradients(model, optimizer, x)
    model[3].register_forward_hook(interrupted)  # type: ignore[index]
    with pytest.raises(Interruption):
        model(x)


def after_a_failed_backward(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss = loss_of(model, x)
    hidden = loss.grad_fn.next_functions[0][0].next_functions[0][0]  # type: ignore[union-attr]
    hidden.register_prehook(interrupted)
    with pytest.raises(Interruption):
        loss.backward()


def never_stepped(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    pass


def forward_only(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model, x)


WAYS: list[Callable[..., None]] = [
    with_gradients,
    cleared,
    after_a_failed_forward,
    after_a_failed_backward,
    never_stepped,
    forward_only,
]


def watched(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, weakref.ref[Any]]:
    run = run_of(model)
    assert run is not None
    parts = {"run": run, "chunks": run.chunks, "gradients": run.gradients, "gpu": run.gpu, "host": run.host}
    first = next(iter(model.parameters()))
    return {
        name: weakref.ref(part)
        for name, part in {**parts, "model": model, "optimizer": optimizer, "parameter": first}.items()
    }


def still_there(refs: dict[str, weakref.ref[Any]]) -> list[str]:
    """Updates that are under way finish first."""
    deadline = time.monotonic() + 10
    while any(ref() is not None for ref in refs.values()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return [name for name, ref in refs.items() if ref() is not None]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("room", ROOMS)
def test_a_model_that_is_dropped_is_freed(room: str, way: Callable[..., None]) -> None:
    model, optimizer, x = wrapped(room)
    refs = watched(model, optimizer)
    way(model, optimizer, x)
    del model, optimizer
    assert not still_there(refs)


@pytest.mark.parametrize("room", ROOMS)
def test_a_graph_keeps_what_it_needs_and_no_more(room: str) -> None:
    model, optimizer, x = wrapped(room)
    refs = watched(model, optimizer)
    loss = loss_of(model, x)
    del model, optimizer
    gc.collect()
    loss.backward()  # the model lives as long as its graph
    assert refs["run"]() is not None
    del loss
    assert not still_there(refs)


def test_a_gradient_whose_model_is_gone_says_so() -> None:
    model, optimizer, x = wrapped("streamed")
    with_gradients(model, optimizer, x)
    refs, gradient = watched(model, optimizer), next(iter(model.parameters())).grad
    copy = gradient.clone()
    assert torch.equal(gradient, copy)
    del model, optimizer
    assert not still_there(refs)
    for use in (gradient.clone, gradient.norm, lambda: gradient.mul_(2)):
        with pytest.raises(hightide.Refused, match=r"gone with the wrapped model.*p\.grad\.clone"):
            use()
    assert copy.isfinite().all() and "gradient of" in repr(gradient)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def test_many_models_one_after_the_other_take_no_more_memory_than_one() -> None:
    """Each has 6 MiB of parameters, four times that with gradients and states."""

    def once() -> None:
        model, optimizer, x = wrapped("resident", size=512)
        refs = watched(model, optimizer)
        with_gradients(model, optimizer, x)
        del model, optimizer
        assert not still_there(refs)

    for _ in range(2):
        once()
    before = resident_mib()
    for _ in range(5):
        once()
    assert resident_mib() - before < 20, "five models are 120 MiB"
