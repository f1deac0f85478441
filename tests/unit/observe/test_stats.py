"""`print(hightide.stats(model))` is a table that people can read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import hightide
import models
from hightide.free_memory import warn_of_reserve
from hightide.ir.action import Mode
from hightide.ir.machine import MatmulRates
from hightide.ir.plan import Forecast
from hightide.planner.lower import lower
from hightide.planner.predict.light import needed_flop
from hightide.planner.predict.peaks import peaks, reserved_bytes
from hightide.planner.solution import Solution
from hightide.profiler.trial.quiet import float32_precision
from hightide.runtime.plan_stores import forecast_on
from hightide.runtime.surgery import run_of
from hightide.this_machine import measured_products
from unit.planner.profiles import plan_with, stack

GIB = 2**30


def test_a_run_is_printed_with_its_measured_numbers() -> None:
    model, batch = models.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    limits = hightide.Limits(gpu="320KiB", host="1GiB")
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, micro_batch=1)
    assert str(hightide.stats(model)).startswith("0 steps\n")
    for _ in range(2):
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = hightide.stats(model)
    text = str(stats)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert text.startswith(f"2 steps, the last took {stats.step_s:.3f} s\n")
    assert rows["tier"] == ["limit", "forecast", "peak", "in", "use", "now"]
    assert rows["gpu"][:2] == ["320", "KiB"] and rows["host"][:2] == ["1.0", "GiB"]
    assert set(stats.moved_bytes) == {"h2d", "d2h"} <= set(rows)
    assert f"deviations from the plan {stats.deviations}" in text
    assert f"updates on the host: {stats.update_kernel} kernel" in text
    hightide.unwrap(model)


def test_large_numbers_keep_the_columns_and_80_characters() -> None:
    model, batch = models.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=hightide.Limits(gpu="64MiB", host="1GiB"))
    sizes = {"gpu": 1023 * GIB, "host": 1023 * GIB}
    lanes = {"h2d": 10**15, "d2h": 10**15}
    stats = replace(
        hightide.stats(model),
        num_steps=1_000_000,
        step_s=12345.678,
        peak_bytes=sizes,
        used_bytes=sizes,
        moved_bytes=lanes,
        stall_s={"h2d": 123456.789, "cpu": 1.0, "compute": 0.0},
        evictions=10**9,
    )
    lines = str(stats).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.endswith(" s") and "steps" not in line] == ["cpu", "d2h", "h2d"]
    hightide.unwrap(model)


def test_of_a_real_gpu_what_torch_reserves_is_forecast_beside_what_it_reserved() -> None:
    model, batch = models.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=hightide.Limits(gpu="64MiB", host="1GiB"))
    stats = hightide.stats(model)
    assert stats.forecast.gpu_reserved_bytes is None and "reserved" not in str(stats)
    forecast = replace(stats.forecast, gpu_peak_bytes=1000 * 2**20, gpu_reserved_bytes=1020 * 2**20)
    lines = str(replace(stats, forecast=forecast, peak_bytes={"gpu": 1010 * 2**20, "host": 1})).splitlines()
    gpu = next(line for line in lines if line.startswith("gpu "))
    assert gpu.split()[3:7] == ["1020", "MiB", "1010", "MiB"]
    assert "gpu forecast and peak: reserved by torch; 1000 MiB of the forecast are tensors" in lines
    assert max(map(len, lines)) <= 80
    hightide.unwrap(model)


def test_a_plan_of_another_kind_of_device_is_forecast_in_the_bytes_of_this_one() -> None:
    profile = stack()
    schedule = lower(profile, plan_with(profile), Mode.TRAIN)
    peak_bytes, reserved = peaks(schedule).gpu_peak_bytes, reserved_bytes(schedule)
    simulated = replace(plan_with(profile), forecast=Forecast(peak_bytes, 6, step_s=0.5))
    real = replace(simulated, forecast=replace(simulated.forecast, gpu_reserved_bytes=reserved))
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for solution in (Solution.of(profile, plan) for plan in (simulated, real)):
        assert forecast_on(solution, cpu) == simulated.forecast
        assert forecast_on(solution, cuda) == real.forecast


def test_a_plan_whose_tensors_fit_is_not_refused_for_what_torch_reserves_but_warned_of(recwarn: Any) -> None:
    forecast = Forecast(1000 * 2**20, 6, gpu_reserved_bytes=1020 * 2**20)
    warn_of_reserve(forecast, 1020 * 2**20)
    warn_of_reserve(replace(forecast, gpu_reserved_bytes=None), 1000 * 2**20)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"expected to reserve 1020 MiB.* a limit that is 10.0 MiB lower"):
        warn_of_reserve(forecast, 1010 * 2**20)


RATES = MatmulRates(bfloat16=4e9, float16=4e9, float32=1e9, tf32=2e9)


def wrapped() -> tuple[Any, Any, Any]:
    """As on a GPU that doctor has measured."""
    model, batch = models.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=hightide.Limits(gpu="64MiB", host="1GiB"))
    run_of(model).products = RATES
    return model, optimizer, batch


def taken(batch: Any, num_samples: int, length: int | None = None) -> Any:
    return {name: value[:num_samples, :length] for name, value in batch.items()}


def test_the_simulated_accelerator_has_no_speed_of_light() -> None:
    model, optimizer, batch = wrapped()
    run_of(model).products = None
    models.loss_of(model, batch).backward()
    optimizer.step()
    stats = hightide.stats(model)
    assert stats.light_s is None and stats.light_share is None and "light" not in str(stats)
    assert measured_products(torch.device("cpu")) is None
    hightide.unwrap(model)


def test_the_share_of_the_speed_of_light_is_of_all_samples_of_a_step() -> None:
    model, optimizer, batch = wrapped()
    profile, whole = run_of(model).profile, len(batch["input_ids"])
    assert hightide.stats(model).light_s is None, "no step yet"
    for parts in ([whole], [whole - 1], [whole, 1]):
        for number in parts:
            models.loss_of(model, taken(batch, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert hightide.stats(model).light_s == pytest.approx(needed_flop(profile, sum(parts)) / 1e9)
    stats = hightide.stats(model)
    assert stats.light_share == pytest.approx(stats.light_s / stats.step_s)
    text = str(replace(stats, step_s=2 * stats.light_s))
    assert text.splitlines()[0].endswith("s: 50% of the speed of light")
    hightide.unwrap(model)


def test_a_step_whose_operations_nobody_has_counted_has_no_share() -> None:
    model, optimizer, batch = wrapped()
    whole, length = batch["input_ids"].shape

    def light_after(*loops: Any) -> float | None:
        for loop in loops:
            loop()
        optimizer.step()
        optimizer.zero_grad()
        return hightide.stats(model).light_s

    def trained(**part: Any) -> None:
        models.loss_of(model, taken(batch, whole, **part)).backward()

    def looked_at() -> None:
        model(**batch)  # with a graph that nobody uses

    assert light_after(trained) is not None
    assert light_after(lambda: trained(length=length // 2)) is None
    assert light_after(looked_at, trained) is None
    with torch.no_grad():
        looked_at()
    assert light_after(trained) is not None, "an evaluation is no part of a step"
    hightide.unwrap(model)


def test_the_rate_is_that_of_the_dtype_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, batch = wrapped()
    flop = needed_flop(run_of(model).profile, len(batch["input_ids"]))

    def light_s(autocast: bool) -> float | None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = models.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return hightide.stats(model).light_s

    assert light_s(autocast=False) == pytest.approx(flop / RATES.float32)
    assert light_s(autocast=True) == pytest.approx(flop / RATES.bfloat16)
    with float32_precision("high"):
        assert light_s(autocast=False) == pytest.approx(flop / 2e9)
    hightide.unwrap(model)


def test_a_recorded_step_has_its_share() -> None:
    model, optimizer, batch = wrapped()
    with hightide.record(model) as recording:
        for _ in range(2):
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    timeline = recording.timeline
    flop = needed_flop(run_of(model).profile, len(batch["input_ids"]))
    assert timeline.light_s == pytest.approx(flop / 1e9)
    assert timeline.light_share == pytest.approx(timeline.light_s / timeline.step_s)
    hightide.unwrap(model)
