"""bench/figures.py: what is found of what is wanted, over several calls that are cut off."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import figures
import throughput
from figures import Case, Figure, Results

PRINTS = """import json, sys; print('noise'); print(json.dumps({"event_s": {"median": float(sys.argv[1])}}))"""


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    (tmp_path / "prints.py").write_text(PRINTS)
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    cases = {"slow": Case("prints.py 4", 10), "fast": Case("prints.py 2", 10), "hanging": Case("hangs.py", 1)}
    monkeypatch.setattr(figures, "BENCH", tmp_path)
    monkeypatch.setattr(figures, "CASES", cases)
    return Figure("1.5", 1.5, True, ("slow", "fast"), figures.ratio, "some")


def test_a_ratio_is_of_one_call_alone(two: Figure, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Results(tmp_path / "found.json", "nowhere")
    first.call = "an earlier call"
    first.run([Figure("", 0, True, ("slow",), figures.step_s, "some")], 60)
    assert not figures.is_found(two, first.of)

    second = Results(tmp_path / "found.json", "nowhere")
    assert second.of == first.of
    second.run([two], 60)
    assert {case["call"] for case in second.of.values()} == {second.call}
    figures.print_figures(second.of, {"twice": two})
    assert capsys.readouterr().out.splitlines()[-1].split() == ["twice", "1.5", "2.000"]


def test_what_hangs_or_does_not_fit_the_budget_is_no_figure(two: Figure, tmp_path: Path) -> None:
    results = Results(tmp_path / "found.json", "nowhere")
    hanging = Figure("", 0, True, ("hanging",), figures.step_s, "some")
    results.run([hanging], 5)
    assert results.of["hanging"]["error"] == "not finished in 1 s"
    results.run([two], 5)
    assert "slow" not in results.of


def test_every_case_of_a_figure_is_a_command_that_its_program_takes() -> None:
    for name in {name for figure in figures.FIGURES.values() for name in figure.cases}:
        program, *options = figures.CASES[name].command.format(disk="folder").split()
        assert (figures.BENCH / program).exists()
        if program in ("throughput.py", "trainer_throughput.py"):
            throughput.parse(options)
