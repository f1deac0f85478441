"""The first steps of a run against its forecast, on a real GPU."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
import hightide.posing
import models
from gpu.streamed import rehearsed_llama, silence_transformers
from hightide.ir.machine import Machine
from hightide.ir.tier import Lane
from hightide.observe.timing import Measured
from hightide.observe.watch import Watch
from hightide.planner.advice.correct import _scaled_machine
from hightide.stores import device_limit
from unit.observe.test_watch import forecasts, halve, parts
from unit.runtime.steps import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # the machine may have to be measured first

MIB, GIB = 2**20, 2**30
NUM_STEPS = 14  # by then memory was looked at, and times were compared
ROOMY = hightide.Limits(gpu=64 * GIB, host=16 * GIB)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def whole_bytes(model: nn.Module, batch: Any) -> int:
    """Of tensors, where everything stays on the GPU, as it is forecast."""
    plan = hightide.plan(model, adamw(model), batch, limits=ROOMY, device="cuda")
    return plan.forecast.gpu_peak_bytes


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, num_steps: int) -> list[Tensor]:
    return [train_step(model, optimizer, batch) for _ in range(num_steps)]


@pytest.mark.parametrize("room", [1.0, 1.3])  # forward runs out, or it fits and backward would run out
def test_blocks_that_take_twice_what_was_measured(room: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = rehearsed_llama()
    plain = copy.deepcopy(model).cuda()
    expected = train(plain, adamw(plain), {name: value.cuda() for name, value in batch.items()}, 6)
    expected_weights = {name: value.cpu() for name, value in plain.state_dict().items()}
    del plain
    torch.cuda.empty_cache()
    halve(monkeypatch)
    limits = hightide.Limits(gpu=int(room * whole_bytes(model, batch)) + 256 * MIB, host=16 * GIB)
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, device="cuda")
    run, watch = parts(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = train(model, optimizer, batch, 6)
    told = forecasts(caught)
    assert watch.num_replans == len(told) == 1 and "Planned again, once" in told[0], told
    assert run.observer is None and run.num_passes == run.num_steps == 6
    outside_bytes = device_limit._devices[0].outside_bytes  # of the plain run: workspaces of cuBLAS, its losses
    assert hightide.stats(model).peak_bytes["gpu"] <= limits.gpu_bytes + outside_bytes
    for loss, its_twin in zip(losses, expected, strict=True):
        torch.testing.assert_close(loss.cpu(), its_twin.cpu(), rtol=1e-5, atol=0)
    weights = hightide.unwrap(model).state_dict()
    for name, weight in expected_weights.items():
        bound = 1e-4 * weight.abs().max().item() + 1e-5
        assert (weights[name].cpu() - weight).abs().max().item() <= bound, name


class Frozen(nn.Module):
    """800 MB of weights that nobody updates: all that a step does is to fetch them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(12))
        for layer in self.layers:
            layer.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


@pytest.mark.alone
def test_a_link_that_is_slower_than_forecast_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = hightide.posing.machine_of

    def too_fast(device: torch.device, is_small: bool) -> Machine:
        return _scaled_machine(honest(device, is_small), {Lane.H2D: 0.1, Lane.D2H: 0.1})

    monkeypatch.setattr(hightide.posing, "machine_of", too_fast)
    model, batch = Frozen(), torch.randn(32, 4096)
    optimizer = torch.optim.AdamW([layer.bias for layer in model.layers], lr=1e-3)
    limits = hightide.Limits(gpu=512 * MIB, host=16 * GIB)
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, device="cuda")
    _, watch = parts(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(NUM_STEPS):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    told = forecasts(caught)
    assert len(told) == 1 and "a step takes" in told[0] and "h2d was busy for" in told[0], told
    assert watch.num_replans == ("Planned again, once" in told[0]) and not watch._is_comparing
    hightide.unwrap(model)


@pytest.mark.alone
@pytest.mark.parametrize("share", [None, 0.5], ids=["resident", "streamed"])
def test_an_honest_forecast_is_not_spoken_about(share: float | None) -> None:
    model, batch = rehearsed_llama(width=2048, num_layers=3)  # a layer takes the GPU 60 ms: Python is not the limit
    limits = ROOMY if share is None else hightide.Limits(gpu=int(share * whole_bytes(model, batch)), host=16 * GIB)
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, device="cuda")
    run, watch = parts(model)
    plan = run.plan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, batch, NUM_STEPS)
    assert not forecasts(caught)
    assert run.plan is plan and not watch.num_replans
    assert watch._times is not None and not watch._is_comparing and not run.lanes.streams.timing
    hightide.unwrap(model)


def test_the_watch_does_not_wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it looks at memory, nor where it times steps."""
    silence_transformers(monkeypatch)
    monkeypatch.setattr(hightide.posing, "SMALL_NUMEL", 0)
    compared: list[Measured] = []
    monkeypatch.setattr(Watch, "_compared", lambda self, measured: compared.append(measured))  # no replanning
    model, batch = models.llama(mask=False)  # transformers asks the GPU about a mask
    limits = hightide.Limits(gpu=2 * GIB, host=8 * GIB)
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, device="cuda")
    _, watch = parts(model)
    try:
        for step in range(NUM_STEPS):
            if step == 2:  # by now every workspace and pinned buffer exists
                torch.cuda.set_sync_debug_mode("error")
                assert watch._sees_memory
            train_step(model, optimizer, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(compared) == 1 and compared[0].step_s > 0 and not watch.num_replans
    hightide.unwrap(model)


def test_a_plan_of_the_users_is_warned_of_what_torch_reserves() -> None:
    model, batch = models.llama()
    plan = hightide.plan(model, adamw(model), batch, limits=ROOMY, device="cuda")
    limit_bytes = (plan.forecast.gpu_peak_bytes + plan.forecast.gpu_bytes) // 2
    with pytest.warns(UserWarning, match="torch is expected to reserve"):
        model, _ = hightide.wrap(
            model, adamw(model), batch, plan=replace(plan, gpu_limit_bytes=limit_bytes), device="cuda"
        )
    hightide.unwrap(model)
