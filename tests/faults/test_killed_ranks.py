"""Ranks that are killed under torchrun, which starts all again: see bench/rank_kills.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "rank_kills.py"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_that_is_started_again_has_the_losses_of_one_that_never_ended(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("rank_kills", BENCH)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    hits, problems = bench.measured(tmp_path, world=2, num_steps=12, num_kills=2, seed=1)
    assert not problems and hits >= 1
