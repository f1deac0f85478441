"""A plan whose forecast was wrong: it is explained, planned again once, and training goes on as if nothing had been."""

from __future__ import annotations

import copy
import gc
import os
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hightide
import hightide.observe.watch
import hightide.posing
import hightide.this_machine
import hightide.wrapping
import models
from hightide.asked import Asked
from hightide.doctor.known import load_machine
from hightide.ir.block import Affine, ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.tier import Lane, Tier
from hightide.observe.timing import Measured, StepTimes
from hightide.observe.watch import Watch
from hightide.planner.advice.correct import MemoryShortage
from hightide.planner.infeasible import InfeasiblePlan
from hightide.runtime.run import Run
from hightide.runtime.surgery import run_of
from hightide.stores.simulated import SimulatedAccelerator
from hightide.stores.store import OutOfMemory
from unit.runtime.steps import adamw, assert_equal_weights, train_step

NUM_STEPS = 8
DISK_BYTES_PER_S = 2e6  # of a disk that is slowed down


def shrunk(line: Affine, factor: float) -> Affine:
    return Affine(int(line.fixed * factor), int(line.per_sample * factor))


def falsified(profile: ModelProfile, factor: float) -> ModelProfile:
    """Blocks are said to take `factor` times the memory that they take."""
    calls = tuple(
        replace(
            call,
            forward_peak=shrunk(call.forward_peak, factor),
            kept=shrunk(call.kept, factor),
            backward_peak=shrunk(call.backward_peak, factor),
        )
        for call in profile.calls
    )
    return replace(profile, calls=calls)


def halve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are said to take half the memory that they take, rehearsed or not."""
    honest = hightide.posing.with_peaks
    monkeypatch.setattr(hightide.posing, "with_peaks", lambda *args: falsified(honest(*args), 0.5))


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> None:
    halve(monkeypatch)
    profile, known = hightide.wrapping.profile_of, {}

    def once(asked: Asked) -> Any:  # per model: that takes most of the time
        if id(asked.model) not in known:
            known[id(asked.model)] = asked.model, profile(asked)
        return known[id(asked.model)][1]

    monkeypatch.setattr(hightide.wrapping, "profile_of", once)


def parts(model: nn.Module) -> tuple[Run, Watch]:
    """Before the plan has changed: then nobody watches any more."""
    run = run_of(model)
    assert run is not None and isinstance(run.observer, Watch)
    return run, run.observer


def forecasts(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "forecast" in str(one.message)]


def trained(
    model: nn.Module, batch: Any, gpu: int | str, host: int | str = "64MiB", disk: str | None = None, **options: Any
) -> tuple[nn.Module, Watch, list[str]]:
    """Trains it beside its plain twin; what was said about forecasts."""
    plain = copy.deepcopy(model)
    plain_optimizer = adamw(plain)
    limits = hightide.Limits(gpu=gpu, host=host, disk=disk)
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, **options)
    run, watch = parts(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(NUM_STEPS):
            torch.manual_seed(3)
            loss = train_step(model, optimizer, batch)
            torch.manual_seed(3)
            expected = train_step(plain, plain_optimizer, batch)
            assert abs(loss.item() - expected.item()) <= 1e-6 * abs(expected.item())
    assert_equal_weights(model, plain)
    assert run.gpu.peak_bytes <= run.plan.gpu_limit_bytes
    assert (run.observer is None) == (watch.num_replans == 1)
    return model, watch, forecasts(caught)


def whole_bytes(model: nn.Module, batch: Any) -> int:
    """What the profile, falsified or not, says that everything on the GPU takes."""
    limits = hightide.Limits(gpu="64MiB", host="64MiB")
    return hightide.plan(model, adamw(model), batch, limits=limits).forecast.gpu_peak_bytes


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_blocks_that_take_twice_what_was_measured(halved: None, dropout: float) -> None:
    model, batch = models.llama(dropout=dropout)
    gpu = whole_bytes(model, batch)
    model, watch, told = trained(model, batch, gpu, micro_batch=models.NUM_SAMPLES)
    assert watch.num_replans == 1 and len(told) == 1
    assert "the memory that they were measured to take" in told[0] and "Planned again, once" in told[0]
    run = run_of(model)
    assert run.num_passes == run.num_steps == NUM_STEPS and run.plan.gpu_limit_bytes == gpu
    hightide.unwrap(model)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_at_any_limit(halved: None, update: str) -> None:
    """Whether forward runs out or backward would: it trains."""
    for share in (0.3, 1.0):
        model, batch = models.gpt2(num_layers=2)
        model, watch, told = trained(model, batch, int(share * whole_bytes(model, batch)), update=update)
        assert watch.num_replans == len(told) == 1
        hightide.unwrap(model)


@pytest.mark.parametrize("gpu", ["200KiB", pytest.param("400KiB", marks=pytest.mark.long), "64MiB"])
def test_a_forecast_that_holds_is_not_spoken_about(gpu: str) -> None:
    model, batch = models.llama()
    model, watch, told = trained(model, batch, gpu, micro_batch=2)
    assert not told and not watch.num_replans
    hightide.unwrap(model)


def test_a_block_that_takes_more_is_no_alarm_where_the_whole_pass_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of a T5 makes the position bias of all the others. It is the only one that takes more memory than
    it is said to take, and what the forecast has too much elsewhere is more than that."""
    honest = hightide.posing.with_peaks

    def first_shrunk(profile: ModelProfile, *args: Any) -> ModelProfile:
        profile = honest(profile, *args)
        first = next(call for call in profile.calls if profile.blocks[call.block].name == "encoder.block.0")
        less = replace(first, forward_peak=shrunk(first.forward_peak, 0.6))
        return replace(profile, calls=tuple(less if call is first else call for call in profile.calls))

    monkeypatch.setattr(hightide.posing, "with_peaks", first_shrunk)
    model, batch = models.t5()
    limits = hightide.Limits(gpu=int(0.4 * whole_bytes(model, batch)), host="64MiB")
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits)
    _, watch = parts(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*forecast")
        loss = models.loss_of(model, batch)
        seen = watch._widths.above(1.5)
        assert len(seen) == 1 and watch._is_comparing
        loss.backward()
        optimizer.step()
        train_step(model, optimizer, batch)
    assert not watch.num_replans
    hightide.unwrap(model)


def test_an_evaluation_which_runs_unsplit_says_nothing_about_training() -> None:
    model, batch = models.llama()
    limits = hightide.Limits(gpu="400KiB", host="64MiB")
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, micro_batch=1)
    with torch.no_grad():
        models.loss_of(model, batch)
    train_step(model, optimizer, batch)
    _, watch = parts(model)
    assert not watch._widths.above(1.01) and not watch.num_replans
    hightide.unwrap(model)


def test_two_forwards_before_a_backward_are_left_alone(halved: None) -> None:
    """The second must not be begun again under another plan: the first one's graph would be gone."""
    model, batch = models.hand_written()
    limits = hightide.Limits(gpu=int(1.3 * whole_bytes(model, batch)), host="64MiB")
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, micro_batch=1)
    first = models.loss_of(model, batch)
    plan = parts(model)[0].plan
    second = models.loss_of(model, batch)
    assert parts(model)[0].plan is plan
    (first + second).backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*forecast")
        optimizer.step()
    hightide.unwrap(model)


class CountsCalls(nn.Module):
    """A buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16)) for _ in range(4))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls.add_(1)
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


def test_a_forward_that_cannot_be_repeated_is_not(halved: None) -> None:
    model, batch = CountsCalls(), torch.randn(64, 16)
    limits = hightide.Limits(gpu=whole_bytes(model, batch), host="64MiB")
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, micro_batch=64)
    _, watch = parts(model)
    with pytest.raises(OutOfMemory, match="Limits") as caught:
        model(batch).backward()
    assert any("goes on" in note for note in caught.value.__notes__)
    assert model.num_calls == 1
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="Planned again, once"):
        model(batch).backward()  # the user has caught the error, and goes on
    optimizer.step()
    assert model.num_calls == 2 and watch.num_replans == 1
    hightide.unwrap(model)


def test_a_plan_that_is_due_comes_before_a_larger_batch_is_planned_for(halved: None) -> None:
    """Else it would take the place of the plan that holds the batch."""
    model, batch = CountsCalls(), torch.randn(64, 16)
    limits = hightide.Limits(gpu=whole_bytes(model, batch), host="64MiB")
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits)
    run, _ = parts(model)
    with pytest.raises(OutOfMemory):
        model(batch).backward()
    optimizer.zero_grad()
    larger = torch.randn(80, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(larger).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.plan.num_samples == 80 and len(forecasts(caught)) == 1
    hightide.unwrap(model)


def test_what_fits_no_plan_is_said_with_its_numbers(halved: None) -> None:
    model, batch = models.llama()
    optimizer = adamw(model)
    with pytest.raises(InfeasiblePlan) as least:
        hightide.plan(model, optimizer, batch, limits=hightide.Limits(gpu=1, host="64MiB"), micro_batch=4)
    limits = hightide.Limits(gpu=least.value.num_bytes, host="64MiB")
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, micro_batch=4)
    with pytest.raises((InfeasiblePlan, OutOfMemory), match=r"bytes.*Limits\(gpu"):
        models.loss_of(model, batch).backward()
    hightide.unwrap(model)


def test_a_refusal_speaks_of_the_users_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of what blocks do not explain by itself."""
    model, batch = models.llama()
    limit = 400 * 1024
    model, _ = hightide.wrap(model, adamw(model), batch, limits=hightide.Limits(gpu=limit, host="64MiB"))
    _, watch = parts(model)
    with pytest.raises(InfeasiblePlan) as refused:
        watch._leaner(MemoryShortage(100 * 2**20, watch._num_ticks), must=True)
    message = str(refused.value)
    assert f"no plan fits {limit} bytes" in message and refused.value.num_bytes > 2**20
    assert f"{refused.value.num_bytes - limit} bytes" in message and f"Limits(gpu={refused.value.num_bytes})" in message
    assert "MiB) of it are kept free for what blocks do not explain" in message
    hightide.unwrap(model)


@pytest.mark.parametrize("error", [MemoryError("no host memory"), OutOfMemory])
def test_a_run_that_cannot_be_moved_goes_on_as_it_was(
    halved: None, monkeypatch: pytest.MonkeyPatch, error: BaseException | type[OutOfMemory]
) -> None:
    if isinstance(error, type):
        error = OutOfMemory(Tier.GPU, "slots", 10, 5, 10, {})
    moves = []

    def move_to(self: Run, *_: Any) -> None:
        moves.append(self.executor.come_to_rest())  # as the real one does first
        raise error

    monkeypatch.setattr(Run, "move_to", move_to)
    model, batch = models.gpt2(num_layers=2)
    limits = hightide.Limits(gpu=whole_bytes(model, batch), host="64MiB")
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, micro_batch=models.NUM_SAMPLES)
    run, watch = parts(model)
    plan = run.plan
    unmoved = r"forecast.*could not be moved to another one \(\w+: "
    with pytest.raises(OutOfMemory), pytest.warns(UserWarning, match=unmoved) as caught:  # the plan stays too small
        train_step(model, optimizer, batch)
    assert len(forecasts(list(caught))) == len(moves) == 1 and not watch.num_replans
    assert run.plan is plan and run.observer is None
    gc.collect()  # the error of above is in its own traceback, with all that the pass held
    small = {name: value[:2] for name, value in batch.items()}
    assert torch.isfinite(train_step(model, optimizer, small))
    hightide.unwrap(model)


class Deepens(nn.Module):
    """One of its blocks, whose graph grows when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.depth = nn.Linear(16, 64), nn.Linear(64, 16), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        for _ in range(self.depth):
            y = y.sin()
        return x + self.outer(y)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Deepens() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def test_a_later_pass_that_runs_out_is_answered_once() -> None:
    """Long after the comparison has ended."""
    model, batch = Stack(), torch.randn(64, 16)
    limits = hightide.Limits(gpu=int(1.1 * whole_bytes(model, batch)), host="64MiB")
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, blocks=[Deepens])
    run, watch = parts(model)

    def step() -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    assert not watch._is_comparing and run.observer is watch
    for layer in model.layers:
        layer.depth = 6
    with pytest.warns(UserWarning, match="Planned again, once"):
        step()
    step()
    assert watch.num_replans == 1 and run.observer is None and run.num_steps == run.num_passes == 7
    hightide.unwrap(model)


class Draws(nn.Module):
    """Draws from every generator, and writes down what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16)) for _ in range(4))
        self.drawn: list[tuple[float, float, float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


def test_a_forward_that_is_begun_again_draws_the_same_numbers(halved: None) -> None:
    model, batch = Draws(), torch.randn(64, 16)
    limits = hightide.Limits(gpu=int(1.2 * whole_bytes(model, batch)), host="64MiB")
    model, _ = hightide.wrap(model, adamw(model), batch, limits=limits, micro_batch=64)
    model.drawn.clear()
    with pytest.warns(UserWarning, match="Planned again, once"):
        model(batch).backward()
    first, second = model.drawn
    assert first == second
    model(batch)
    assert model.drawn[2] != second
    hightide.unwrap(model)


def test_other_runs_on_the_device_are_not_this_ones_memory(halved: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedAccelerator, "is_alone", False, raising=False)
    model, batch = models.llama()
    limits = hightide.Limits(gpu=whole_bytes(model, batch), host="64MiB")
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, micro_batch=models.NUM_SAMPLES)
    run, watch = parts(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*forecast")
        with pytest.raises(OutOfMemory):
            train_step(model, optimizer, batch)
    assert run.observer is watch and watch._ran_out is None
    hightide.unwrap(model)


# -- time ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that was measured, of blocks that were rehearsed."""
    machine, estimate = replace(hightide.this_machine.simulated_machine(), estimates=()), hightide.posing.estimate
    monkeypatch.setattr(hightide.this_machine, "simulated_machine", lambda: machine)
    monkeypatch.setattr(
        hightide.posing, "estimate", lambda *args: replace(estimate(*args), source="measured, for this test")
    )


def slow_steps(monkeypatch: pytest.MonkeyPatch, factors: dict[Lane, float], step: float) -> None:
    """Steps take `step` times their forecast, and each lane its factor."""

    def end_step(self: StepTimes) -> Measured | None:
        if self._run.num_steps < 3:
            return None
        assert isinstance(self._run.observer, Watch)
        forecast = self._run.observer._step
        lanes = forecast.simulated.action_s
        return Measured(
            step * forecast.step_s, {lane: factors.get(lane, 1.0) * seconds for lane, seconds in lanes.items()}
        )

    monkeypatch.setattr(StepTimes, "end_step", end_step)


def test_a_slow_link_is_explained_and_planned_around(promised: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch, {Lane.H2D: 3000.0, Lane.D2H: 3000.0}, step=30.0)
    monkeypatch.setattr(hightide.posing, "SMALL_NUMEL", 0)  # a thorough search
    model, batch = models.hand_written(num_layers=2)
    gpu = int(0.6 * whole_bytes(model, batch))
    model, watch, told = trained(model, batch, gpu)
    assert watch.num_replans == 1 and len(told) == 1
    assert "h2d was busy for" in told[0] and "d2h was busy for" in told[0] and "compute" not in told[0]
    hightide.unwrap(model)


def test_a_slow_disk_is_explained_and_planned_around(
    promised: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For real: each request takes the time of a disk that is far slower than told. Other lanes are as forecast."""
    told_disk = load_machine("h200").disk
    assert told_disk is not None
    fast = {name: 1e3 * rate for name, rate in vars(told_disk).items() if name.endswith("_bytes_per_s")}
    machine = replace(hightide.this_machine.simulated_machine(), disk=replace(told_disk, **fast))
    monkeypatch.setattr(hightide.this_machine, "simulated_machine", lambda: machine)

    def throttled(real: Callable[..., int]) -> Callable[..., int]:
        def moved(file: int, buffers: Any, offset: int) -> int:
            time.sleep(sum(map(len, buffers)) / DISK_BYTES_PER_S)
            return real(file, buffers, offset)

        return moved

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, throttled(getattr(os, name)))
    end_step, seen = StepTimes.end_step, []

    def as_forecast_beside_disks(self: StepTimes) -> Measured | None:
        measured = end_step(self)
        if measured is None:
            return None
        assert isinstance(self._run.observer, Watch)
        seen.append((self._run.observer._solution.passes.last, measured))
        lanes = self._run.observer._step.simulated.action_s
        disk = {lane: measured.lane_s[lane] for lane in (Lane.DISK_READ, Lane.DISK_WRITE)}
        return Measured(measured.step_s, {**lanes, **disk})

    monkeypatch.setattr(StepTimes, "end_step", as_forecast_beside_disks)
    model, batch = models.hand_written(num_layers=4)
    whole = whole_bytes(model, batch)
    roomy = hightide.plan(model, adamw(model), batch, limits=hightide.Limits(gpu=int(0.6 * whole), host="64MiB"))
    host = int(0.55 * roomy.forecast.host_peak_bytes)
    model, watch, told = trained(model, batch, whole // 2, host, f"{tmp_path}:64MiB", update="in_backward")
    (schedule, measured), *_ = seen
    for lane in (Lane.DISK_READ, Lane.DISK_WRITE):
        num_bytes = sum(action.num_bytes for action in schedule.lane(lane))
        assert num_bytes and measured.lane_s[lane] >= 0.9 * num_bytes / DISK_BYTES_PER_S
    assert watch.num_replans == 1 and len(told) == 1
    assert "disk_read was busy for" in told[0] and "disk_write was busy for" in told[0] and "h2d" not in told[0]
    assert "`hightide doctor --disk FOLDER` measures again" in told[0]
    plan = hightide.stats(model).plan
    assert sum(block.states is Tier.DISK for block in plan.blocks) == 0, "what can do without the slow disk does"
    hightide.unwrap(model)


def test_estimated_costs_promise_no_time(promised: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a measured machine too: blocks could not be rehearsed."""
    estimate = hightide.posing.estimate
    monkeypatch.setattr(
        hightide.posing, "estimate", lambda *args: replace(estimate(*args), source="estimated for this test")
    )
    slow_steps(monkeypatch, dict.fromkeys(Lane, 3.0), step=3.0)
    model, batch = models.llama()
    model, watch, told = trained(model, batch, "400KiB")
    assert not watch.num_replans and not told
    hightide.unwrap(model)


def test_time_outside_of_the_plan_is_nobodys_fault(promised: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch, {}, step=2.0)
    model, batch = models.llama()
    model, watch, told = trained(model, batch, "400KiB")
    assert not watch.num_replans and len(told) == 1 and "outside of the plan" in told[0]
    hightide.unwrap(model)


@pytest.mark.parametrize(("update", "why"), [("deferred", "loop that clips"), ("in_backward", "they overlap more")])
def test_a_step_that_is_faster_loses_no_time_outside(
    promised: None, monkeypatch: pytest.MonkeyPatch, update: str, why: str
) -> None:
    """A loop that never clips calls step() while the GPU is in backward."""
    slow_steps(monkeypatch, {}, step=0.5)
    model, batch = models.llama()
    model, watch, told = trained(model, batch, "400KiB", update=update)
    assert not watch.num_replans and len(told) == 1 and why in told[0] and "outside" not in told[0]
    hightide.unwrap(model)


def test_a_gpu_that_waits_for_python_is_not_planned_around(promised: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's events then show a slow compute lane, which is not its fault."""
    estimate = hightide.posing.estimate

    def slow_python(*args: Any) -> Costs:
        costs = estimate(*args)
        calls = tuple(replace(cost, issue_s=1.0) for cost in costs.calls)
        return replace(costs, calls=calls, source="measured, for this test")

    monkeypatch.setattr(hightide.posing, "estimate", slow_python)
    slow_steps(monkeypatch, {Lane.COMPUTE: 1e6}, step=1.3)
    model, batch = models.llama()
    model, watch, told = trained(model, batch, "400KiB")
    assert not watch.num_replans and len(told) == 1 and "The GPU waits for Python" in told[0]
    hightide.unwrap(model)


def test_a_tenth_more_is_within_the_promise(promised: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch, dict.fromkeys(Lane, 1.1), step=1.1)
    model, batch = models.llama()
    model, watch, told = trained(model, batch, "400KiB")
    assert not watch.num_replans and not told
    hightide.unwrap(model)


def test_steps_are_timed_lane_by_lane(promised: None) -> None:
    """For real: a forecast for a GPU is not what this machine does, and the warning has measured seconds."""
    model, batch = models.llama()
    model, watch, told = trained(model, batch, "300KiB", micro_batch=2)
    assert len(told) == 1 and "a step takes" in told[0]
    assert watch.num_replans == ("Planned again" in told[0])
    assert run_of(model).lanes.streams.timing is False
    hightide.unwrap(model)


class EndsWide(nn.Module):
    """Layers that are alike, and one that is wider than all of them together."""

    def __init__(self) -> None:
        super().__init__()
        widths = [256] * 6 + [1024]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16)) for width in widths
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


def test_what_comes_after_the_block_that_ran_out_is_taken_to_be_as_wide(halved: None) -> None:
    """The pass is begun again once: it must not run out in a block that nobody had come to."""
    model, batch = EndsWide(), torch.randn(64, 16)
    model, watch, told = trained(model, batch, int(0.8 * whole_bytes(model, batch)), micro_batch=64)
    assert watch.num_replans == len(told) == 1
    hightide.unwrap(model)
