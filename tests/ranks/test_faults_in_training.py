"""A few faults of ranks that train; for many of them, bench/rank_faults.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from started_ranks import StartedRanks

PATH = Path(__file__).resolve().parents[2] / "bench" / "rank_faults.py"
FAST = [("killed", 2), ("other order", 2), ("one backward more", 3), ("evaluates alone before a barrier", 2)]
KINDS = (
    *("stopped", "raises", "bad batch", "slow", "ends early", "reads alone", "nan", "skips a block", "late"),
    *("one backward more", "one step less", "one step more", "one block more", "accumulates more", "steps early"),
    *("leaves early to save", "evaluates alone", "generates alone", "steps in vain"),
    *("leaves early to a barrier", "evaluates alone before a barrier", "saves alone before a barrier"),
)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_faults", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def faults() -> Iterator[StartedRanks]:
    ranks = StartedRanks("rank_faults", PATH.parent)
    yield ranks
    ranks.close()


LONG = [(kind, world) for world in (2, 4) for kind in KINDS if (kind, world) not in FAST]


@pytest.mark.parametrize(("kind", "world"), [*FAST, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)])
def test_nobody_hangs(bench: ModuleType, faults: StartedRanks, kind: str, world: int) -> None:
    assert bench.round_of(faults, kind, world, seed=7, quick=True) == []


def test_what_a_round_finds_wrong(bench: ModuleType) -> None:
    ended = bench.EndedRank(status=1, stdout="", stderr="RankFailure: lost", ended_s=101.0, timed_out=False)
    struck = bench.EndedRank(status=-9, stdout="100.0\n", stderr="", ended_s=100.0, timed_out=False)
    assert bench.problems_of("killed", 0, [struck, ended]) == ["rank 1 ended with 1, and said 'RankFailure: lost'"]
    late = bench.EndedRank(status=1, stdout="", stderr="", ended_s=300.0, timed_out=False)
    assert bench.problems_of("killed", 0, [struck, late]) == ["rank 1 hung"]
    assert "did not happen" in bench.problems_of("killed", 1, [struck, ended])[0]
    outside = (
        "torch.distributed.barrier() waits: rank 1, at a, waited: rank 0 (at b) waits, to which rank 1 has not come"
    )
    told = bench.EndedRank(status=1, stdout="", stderr=f"{outside}\nRuntimeError: closed", ended_s=101, timed_out=False)
    kind = "evaluates alone before a barrier"
    assert bench.problems_of(kind, 0, [struck, told])[0].startswith("rank 0 ended with -9")
    assert bench.problems_of(kind, 0, [struck, ended])[1].startswith("rank 1 ended with 1")


def test_every_kind_of_fault_is_tried(bench: ModuleType) -> None:
    assert {*KINDS, *(kind for kind, _ in FAST)} == set(bench.KINDS)
