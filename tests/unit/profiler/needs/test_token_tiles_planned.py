"""One very long sequence in the memory of a small GPU. Parity is tested in tests/parity/test_token_tiles.py."""

from __future__ import annotations

import pytest

from hightide.cli.workload import load_workload
from hightide.doctor.known import load_machine
from hightide.ir.plan import Update
from hightide.ir.units import parse_bytes
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.estimate import estimate
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.search import search
from hightide.profiler.needs import token_tiles


def test_a_step_of_one_very_long_sequence_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(gpu: str) -> int:
        profile = load_workload("llama-3.2-3b", 1, 131072, None, None).profile()
        assert profile.tokens_per_sample == 131072
        machine = load_machine("h200")
        terms = Terms(parse_bytes(gpu, "gpu"), parse_bytes("112GiB", "host"), Update.DEFERRED)
        return search(Problem(profile, estimate(profile, machine), machine, terms)).plan.forecast.gpu_bytes

    assert 12 * 2**30 < told("24GiB") <= 24 * 2**30
    monkeypatch.setattr(token_tiles, "LONG", 1 << 40)
    with pytest.raises(InfeasiblePlan):
        told("24GiB")
