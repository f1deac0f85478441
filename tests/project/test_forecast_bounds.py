"""bench/forecast.py fails when, and only when, one of its bounds is missed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import forecast
from plans import FOLDER, FORECASTS

GIB = 1024**3
TOLD = forecast.Told(1.0, 0.1, {}, gpu_bytes=10 * GIB, host_bytes=40 * GIB, held_out=False)
FOUND = forecast.Found(1.0, gpu_bytes=10 * GIB, host_bytes=40 * GIB, bare_bytes=GIB, stall_s={}, alloc_retries=0)


def test_a_good_forecast_passes(capsys: pytest.CaptureFixture[str]) -> None:
    near = replace(FOUND, step_s=1.04, gpu_bytes=int(9.6 * GIB), host_bytes=41 * GIB)
    assert forecast.print_table({"a": TOLD, "b": TOLD}, {"a": FOUND, "b": near}) == []
    assert "median error 1.9%, worst 3.8% (b)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (replace(FOUND, step_s=1.06), "median error of the step time 5.7%"),
        (replace(FOUND, step_s=1.2), "c: error of the step time 16.7%"),
        (replace(FOUND, gpu_bytes=10 * GIB + 1), "c: GPU forecast -0.0%"),
        (replace(FOUND, gpu_bytes=9 * GIB), "c: GPU forecast"),
        (replace(FOUND, host_bytes=int(41.1 * GIB)), "c: host forecast -1.10 GiB"),
    ],
)
def test_each_bound_is_checked(found: forecast.Found, problem: str) -> None:
    assert any(missed.startswith(problem) for missed in forecast.print_table({"c": TOLD}, {"c": found}))


def test_nothing_measured_is_no_success() -> None:
    assert forecast.print_table({"a": TOLD}, {}) == ["nothing was measured"]


def test_the_plans_are_those_that_the_issue_asks_for() -> None:
    written = FORECASTS.values()
    assert len(FORECASTS) >= 8 and sum(one.held_out for one in written) >= 2
    assert {one.model for one in written} == {"llama-3.2-1b", "llama-3.2-3b"}
    assert {one.gpu for one in written} == {"12GiB", "24GiB", "48GiB"}
    assert {one.sequences * one.length for one in written} == {8192, 32768}
    assert len({one.update for one in written}) == len({one.keep > 0 for one in written}) == 2
    assert all((FOLDER / f"{name}.json").exists() for name in FORECASTS)
