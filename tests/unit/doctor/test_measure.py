"""The examination as a whole, small: what it measures is complete and feeds the simulator."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hightide.doctor import measure, rates
from hightide.doctor.measure import Effort, Report, examine
from hightide.doctor.pace import Pace
from hightide.doctor.update_speed import update_arrays
from hightide.ir.action import Mode
from hightide.ir.codec import from_json, to_json
from hightide.ir.machine import UPDATE_BYTES, Machine, subsets
from hightide.ir.tier import Lane
from hightide.planner.lower import lower
from hightide.planner.predict.simulator import simulate
from hightide.runtime.lanes.update_threads import UpdateThreads
from hightide.stores.host_arena import HostArena
from unit.planner.profiles import plan_with, stack

CPU = torch.device("cpu")
SMALL = Effort(buffer_bytes=1 << 20, update_numel=1 << 18, dram_numel=1 << 18, window_s=0.01)


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    """Products and copies of a moment: how fast they are is not asked here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rates, "MEASURE_S", 0.01)
        patched.setattr(rates, "LONG_ENOUGH_S", 0.0)
        yield


@pytest.fixture(scope="module")
def report(_short: None) -> Report:
    return examine(CPU, effort=SMALL)


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for entry in value.values() for number in numbers(entry)]
    if isinstance(value, list | tuple):
        return [number for entry in value for number in numbers(entry)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_every_set_of_lanes_is_measured(report: Report) -> None:
    assert [speeds.busy for speeds in report.machine.speeds] == subsets()
    assert len(numbers(asdict(report.machine))) > 20
    assert all(math.isfinite(number) and number > 0 for number in numbers(asdict(report.machine)))


def test_the_update_is_given_in_parameters_too(report: Report) -> None:
    assert report.machine.host is not None
    touched = report.machine.speeds_of({Lane.CPU})[Lane.CPU]
    assert report.machine.host.update_params_per_s == pytest.approx(touched / UPDATE_BYTES)


def test_the_first_part_of_an_update_is_measured_against_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    paces = iter([13.0, 12.0, 26.0, 20.0])  # of the whole, of its first part, and again

    def paced(lanes: object, works: Any, window_s: float) -> Any:
        assert all(work() > 0 for work in works.values())
        return {Lane.CPU: Pace(next(paces), ())}

    monkeypatch.setattr(measure, "measure_together", paced)
    operands = update_arrays(1024, lambda numel, dtype: torch.empty(numel, dtype=dtype))
    found = measure._first_part(SimpleNamespace(update_threads=UpdateThreads(1, 10.0)), operands, 0.0)  # type: ignore[arg-type]
    assert found == pytest.approx((13 / 12 + 26 / 20) / 2 * 26 / 18)


def test_it_is_measured_here_and_has_no_estimates(report: Report) -> None:
    machine = report.machine
    assert machine.is_measured and machine.is_simulated and machine.unpinned is None and machine.fingerprint is not None
    assert from_json(Report, to_json(report)) == report


def test_a_measured_machine_feeds_the_simulator(report: Report) -> None:
    profile = stack(4, dtype="bfloat16")
    schedule = lower(profile, plan_with(profile), Mode.TRAIN)
    machine = from_json(Machine, to_json(report.machine))
    assert simulate(schedule, lambda action: 1e-3, machine).step_s >= len(schedule.ticks) * 1e-3


def test_what_pinning_says_becomes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(HostArena):
        def pin(self) -> None:
            warnings.warn("123 bytes of host memory could not be pinned", stacklevel=1)

    monkeypatch.setattr(measure, "HostArena", Refusing)
    found = examine(CPU, effort=SMALL)
    assert "123 bytes of host memory could not be pinned" in found.warnings[0].problem
    assert "ulimit" in found.warnings[0].remedy


def test_settings_of_torch_stay(report: Report) -> None:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    examine(CPU, effort=SMALL)
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before


@pytest.mark.long  # others may have the cores
@pytest.mark.timeout(150)
def test_the_default_takes_less_than_half_a_minute() -> None:
    """11 s on two cores that others use too. A second try, for a machine that was overloaded in the first."""
    assert any(examine(CPU).took_s < 30 for _ in range(2))
