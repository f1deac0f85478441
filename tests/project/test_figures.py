"""bench/figures.py: what is found of what is wanted, over several calls that are cut off."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from math import isnan
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import checkpoint
import figures
import throughput
from figure_cases import CALLS, CASES, FIGURES, Case, Figure, above_limits, beside_plan, of_floor, ratio, step_s
from figures import Results, Runner

ROOT = Path(__file__).parents[2]
PRINTS = """
import json, sys
print("noise")
print({"of": "a library"})
number = float(sys.argv[1]) if sys.argv[1].isdigit() else float(len(sys.argv[1]))
print(json.dumps({"event_s": {"median": number}}))
"""
STARTS = """
import os, sys, time
if child := os.fork():
    open(sys.argv[1] + "/child", "w").write(str(child))
time.sleep(60)
"""


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    (tmp_path / "prints.py").write_text(PRINTS)
    (tmp_path / "starts.py").write_text(STARTS)
    (tmp_path / "fails.py").write_text("raise ValueError('as told')")
    cases = {
        "slow": Case("prints.py 4", 3, 10),
        "fast": Case("prints.py 2", 3, 10),
        "hanging": Case(f"starts.py {tmp_path}", 1, 3),
        "failing": Case("fails.py", 1, 10),
        "old": Case("prints.py {old}", 1, 10, needs="old"),
    }
    monkeypatch.setattr(figures, "BENCH", tmp_path)
    monkeypatch.setattr(figures, "CASES", cases)
    return Figure("1.5", 1.5, True, ("slow", "fast"), ratio, "some")


def of(*cases: str) -> Figure:
    return Figure("", 0, True, cases, step_s, "some")


def begun(tmp_path: Path, old: str | None = None) -> Results:
    return Results([tmp_path / "found.json", tmp_path / "more" / "found.json"], Runner(str(tmp_path), old=old))


def test_a_ratio_is_of_one_call_alone(two: Figure, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = begun(tmp_path)
    first.call = "an earlier call"
    first.run([of("slow")], 60)
    assert not figures.is_found(two, first.of)

    second = begun(tmp_path)
    assert second.of == first.of
    second.run([two], 60)
    assert {case["call"] for case in second.of.values()} == {second.call}
    figures.print_figures(second.of, {"twice": two})
    assert capsys.readouterr().out.splitlines()[-1].split() == ["twice", "1.5", "2.000"]
    assert json.loads((tmp_path / "more" / "found.json").read_text()) == second.of


def test_what_hangs_is_ended_with_its_children(two: Figure, tmp_path: Path) -> None:
    results = begun(tmp_path)
    results.run([of("hanging")], 5)
    assert results.of["hanging"]["error"] == "not finished in 3 s"
    child = int((tmp_path / "child").read_text())
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_what_a_case_leaves_behind_is_gone_before_the_next(two: Figure, tmp_path: Path) -> None:
    left, lock = tmp_path / "figures-scratch" / "large", tmp_path / "figures-extensions" / "adam" / "lock"
    for path in (left, lock):
        path.parent.mkdir(parents=True)
        path.touch()
    begun(tmp_path).run([of("fast")], 60)
    assert not left.exists() and not lock.exists()


def test_what_fails_says_why_and_runs_again(two: Figure, tmp_path: Path) -> None:
    results = begun(tmp_path)
    results.run([of("failing")], 5)
    assert results.of["failing"]["error"] == "exit 1" and "as told" in results.of["failing"]["stderr"]
    assert not figures.is_found(of("failing"), results.of)


def test_what_does_not_fit_the_budget_or_lacks_something_is_not_begun(two: Figure, tmp_path: Path) -> None:
    results = begun(tmp_path)
    results.run([two], 2)
    results.run([two], 5)  # for one of the two, whose ratio would be none
    results.run([of("old")], 60)
    assert results.of == {}
    with_old = begun(tmp_path, old=str(tmp_path))
    with_old.run([of("old")], 60)
    assert with_old.of["old"]["event_s"] == {"median": float(len(str(tmp_path)))}
    assert with_old.of["old"]["printed"] == "noise\n{'of': 'a library'}"


def test_a_figure_that_cannot_be_taken_costs_no_other(two: Figure, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"slow": {"event_s": {"median": 4.0}, "call": "one"}, "fast": {"call": "one"}}
    figures.print_figures(results, {"lacking": two, "there": of("slow")})
    lacking, there = capsys.readouterr().out.splitlines()[-2:]
    assert "KeyError('event_s')" in lacking and there.split()[-1] == "4.000"


def test_counts_of_tests_are_read() -> None:
    text = "FAILED a.py::b - E\n2 failed, 10 passed, 1 skipped, 1 error in 3.21s (0:00:03)\n"
    assert figures.pytest_counts(text) == {"passed": 10, "failed": 3, "skipped": 1, "names": ["FAILED a.py::b - E"]}
    assert figures.pytest_counts("5 passed in 1.00s")["failed"] == 0
    assert "failed" not in figures.pytest_counts("Killed")  # it did not come to its end


def test_a_disk_is_held_against_its_floor_and_its_bytes() -> None:
    run = {
        "moved_bytes_per_step": {"disk_read": 6e9, "disk_write": 6e9},
        "device_bytes_per_step": {"read": 6.06e9, "write": 6e9},
        "step_s": 5.0,
        "tier_peak_bytes": {"gpu": 10, "host": 25, "disk": 3},
        "limit_bytes": {"gpu": 12, "host": 24, "disk": 4},
    }
    assert of_floor({"best_gb_per_s": 3.0}, run) == pytest.approx(0.8)
    assert beside_plan(run) == pytest.approx(0.01)
    assert above_limits(run) == 1
    assert isnan(of_floor({"best_gb_per_s": 3.0}, {**run, "moved_bytes_per_step": {}}))


def test_forecasts_of_what_was_held_out_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    held_out = [name for name, case in CASES.items() if case.held_out]
    assert len(held_out) == 2
    run = {"event_s": {"median": 1.0}, "forecast": {"step_s": 1.02}, "call": "one"}
    other = {**run, "forecast": {"step_s": 1.08}}
    figures.print_runs({"w1-24": other, **dict.fromkeys(held_out, run)}, [of("w1-24", *held_out)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [[name, "*"] for name in held_out]
    assert "3 runs: off by 2.0% in the median" in lines[-2] and "8.0% at worst" in lines[-2]
    assert "2 runs held out" in lines[-1] and "2.0% at worst" in lines[-1]


def test_every_group_is_in_a_call_and_every_call_fits() -> None:
    groups = {figure.group for figure in FIGURES.values()}
    assert groups - figures.BY_NAME_ONLY == {group for call in CALLS for group in call}
    for call in CALLS:
        in_one_call = all(figure.in_one_call for figure in FIGURES.values() if figure.group in call)
        assert not in_one_call or figures.expected_s(call) <= figures.CALL_S, call
    assert all(case.expected_s <= case.limit_s <= figures.CALL_S for case in CASES.values())
    assert sum(map(figures.expected_s, CALLS[:3])) <= 1650  # half an hour, less what starting a machine takes


def parse(command: str) -> None:
    """By the program's own parser."""
    program, *options = shlex.split(command.format(disk="folder", old="folder"))
    if program == "pytest":
        files = [option for option in options if option.startswith("tests/")]
        assert files and all((ROOT / file).exists() for file in files)
    elif program == "checkpoint.py":
        throughput.parse(checkpoint.parse(options)[1])
    elif program != "hightide":
        module = "throughput" if program == "trainer_throughput.py" else program.removesuffix(".py")
        importlib.import_module(module).parse(options)


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_a_command_that_its_program_takes(name: str) -> None:
    case = CASES[name]
    parse(case.command)
    if case.tiny is not None:
        parse(f"{case.command} {case.tiny}")


def test_what_a_program_does_not_take_is_seen() -> None:
    with pytest.raises(SystemExit):
        parse("throughput.py --gpus 24GiB")


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_every_case_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--rehearse", "--disk", str(tmp_path)]) == 0, capsys.readouterr().out[-3000:]
