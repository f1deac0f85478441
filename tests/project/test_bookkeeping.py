"""The cost of bookkeeping must not grow with the number of blocks. A rough guard; for figures, bench/bookkeeping.py."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

import hightide

PATH = Path(__file__).resolve().parents[2] / "bench" / "bookkeeping.py"


@pytest.fixture(scope="module")
def bookkeeping() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bookkeeping", PATH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["bookkeeping"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("placement", ["streamed", "resident"])
def test_the_cost_per_block_does_not_grow(bookkeeping: ModuleType, placement: str) -> None:
    """Of eight times the blocks: a scan over all of them in each tick would show. Other programs on the machine only
    ever add time, so the least of several measurements counts, of either number of blocks."""
    variant = bookkeeping.VARIANTS[placement]
    wrapped = {number: bookkeeping.wrapped(number, variant) for number in (16, 128)}
    seconds: dict[int, list[float]] = {number: [] for number in wrapped}
    for _ in range(15):  # in turns: a busy moment of the machine meets both
        for number, (run, optimizer) in wrapped.items():
            started_s = time.process_time()
            bookkeeping.one_pass(run, optimizer)
            seconds[number].append(time.process_time() - started_s)
    for run, _ in wrapped.values():
        assert run.executor.num_deviations == 0
        hightide.unwrap(run.model)
    few_s, many_s = min(seconds[16]) / 16, min(seconds[128]) / 128
    assert many_s < 1.25 * few_s, f"a block of 128 costs {many_s / few_s:.2f} times as much as one of 16"


def test_growth_is_seen(bookkeeping: ModuleType) -> None:
    rows = [bookkeeping.Row("made up", n, 0.0, float(n**2), float(n), float(n)) for n in (8, 16, 32)]
    assert bookkeeping.growth(rows) == pytest.approx(2.0, rel=1e-4) and bookkeeping.ratio(rows, 8, 32) == 4.0
