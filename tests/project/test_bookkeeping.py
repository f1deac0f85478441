"""The cost of bookkeeping must not grow with the number of blocks. A rough guard; for figures, bench/bookkeeping.py."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

import hightide

OWN = str(Path(hightide.__file__).parent)
MOST = 1.25  # times as much for a block among many as for one among few
PATH = Path(__file__).resolve().parents[2] / "bench" / "bookkeeping.py"


@pytest.fixture(scope="module")
def bookkeeping() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bookkeeping", PATH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["bookkeeping"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_of(work: Callable[[], object]) -> int:
    """Lines of hightide's own code that the calling thread runs, rounds of loops too: no clock sees as small a scan."""
    count = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OWN):
            return None
        if event == "line":
            next(count)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return next(count)


@pytest.mark.parametrize("placement", ["streamed", "resident"])
def test_the_cost_per_block_does_not_grow(bookkeeping: ModuleType, placement: str) -> None:
    """Of eight times the blocks: a scan over all of them in each tick shows in the lines that are run, whatever runs
    below them in the time. Other programs on the machine only ever add time, so the least of several measurements
    counts, of either number of blocks, and of more of them where that does not settle it."""
    variant = bookkeeping.VARIANTS[placement]
    wrapped = {number: bookkeeping.wrapped(number, variant) for number in (16, 128)}
    seconds: dict[int, list[float]] = {number: [] for number in wrapped}
    for turn in range(75):  # in turns: a busy moment of the machine meets both
        for number, (run, optimizer) in wrapped.items():
            started_s = time.process_time()
            bookkeeping.one_pass(run, optimizer)
            seconds[number].append(time.process_time() - started_s)
        few_s, many_s = min(seconds[16]) / 16, min(seconds[128]) / 128
        if turn >= 8 and many_s < MOST * few_s:
            break
    num_lines = {number: lines_of(lambda pair=pair: bookkeeping.one_pass(*pair)) for number, pair in wrapped.items()}
    for run, _ in wrapped.values():
        assert run.executor.num_deviations == 0
        hightide.unwrap(run.model)
    few, many = num_lines[16] / 16, num_lines[128] / 128
    assert few > 100 and many < 1.02 * few, f"a block of 128 takes {many:.0f} lines of Python, one of 16 {few:.0f}"
    assert many_s < MOST * few_s, f"a block of 128 costs {many_s / few_s:.2f} times as much as one of 16"


def test_growth_is_seen(bookkeeping: ModuleType) -> None:
    rows = [bookkeeping.Row("made up", n, 0.0, float(n**2), float(n), float(n)) for n in (8, 16, 32)]
    assert bookkeeping.growth(rows) == pytest.approx(2.0, rel=1e-4) and bookkeeping.ratio(rows, 8, 32) == 4.0
