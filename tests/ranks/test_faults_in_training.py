"""A few faults of ranks that train; for many of them, bench/rank_faults.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from started_ranks import StartedRanks

PATH = Path(__file__).resolve().parents[2] / "bench" / "rank_faults.py"
FAST = [("killed", 2), ("other order", 2)]
KINDS = ("stopped", "raises", "bad batch", "slow", "ends early", "reads alone", "nan", "skips a block", "late")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_faults", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("kind", "world"),
    [*FAST, *(pytest.param(kind, world, marks=pytest.mark.long) for world in (2, 4) for kind in KINDS)],
)
def test_nobody_hangs(bench: ModuleType, kind: str, world: int) -> None:
    started = StartedRanks("rank_faults", PATH.parent)
    try:
        assert bench.round_of(started, kind, world, seed=7, quick=True) == []
    finally:
        started.close()


def test_what_a_round_finds_wrong(bench: ModuleType) -> None:
    ended = bench.EndedRank(status=1, stdout="", stderr="RankFailure: lost", ended_s=101.0, timed_out=False)
    struck = bench.EndedRank(status=-9, stdout="100.0\n", stderr="", ended_s=100.0, timed_out=False)
    assert bench.problems_of("killed", 0, [struck, ended]) == ["rank 1 ended with 1, and said 'RankFailure: lost'"]
    late = bench.EndedRank(status=1, stdout="", stderr="", ended_s=300.0, timed_out=False)
    assert bench.problems_of("killed", 0, [struck, late]) == ["rank 1 hung"]
    assert "did not happen" in bench.problems_of("killed", 1, [struck, ended])[0]
