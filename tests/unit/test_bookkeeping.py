"""The cost of bookkeeping must not grow with the number of blocks. A rough guard; for figures, bench/bookkeeping.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    """Four times the blocks: a scan over all blocks in each tick would cost four times as much a block. Other programs
    on the machine only ever add time, so one good attempt of three is enough."""
    ratios = []
    for _ in range(3):
        rows = [bookkeeping.measure(placement, number, num_passes=10) for number in (16, 64)]
        ratios.append(bookkeeping.ratio(rows, 16, 64))
        if ratios[-1] < 2:
            return
    raise AssertionError(f"{placement}: a block of 64 costs {min(ratios):.2f} times as much as one of 16")


def test_growth_is_seen(bookkeeping: ModuleType) -> None:
    rows = [bookkeeping.Row("made up", n, 0.0, float(n**2), float(n), float(n)) for n in (8, 16, 32)]
    assert bookkeeping.growth(rows) == pytest.approx(2.0, rel=1e-4) and bookkeeping.ratio(rows, 8, 32) == 4.0
