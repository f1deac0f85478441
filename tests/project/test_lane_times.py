"""bench/lane_times.py: told beside found, of the steps between which the difference lies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import lane_times


def step(seconds: float, waits: list[tuple[str, float]]) -> dict[str, Any]:
    stalls = {"h2d": sum(wait for _, wait in waits)}
    return {"step_s": seconds, "busy_s": {"compute": seconds / 2}, "stall_s": stalls, "waits": waits}


def test_told_fastest_middle_and_slowest_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [step(4.0, [("fetch.late", 1.5)]), step(2.0, []), step(3.0, [])]
    lanes = {"told": step(1.0, []), "found": found}
    (tmp_path / "cases.json").write_text(json.dumps({"w1": {"lanes": lanes}, "other": {"event_s": {}}}))
    (tmp_path / "one.json").write_text(json.dumps({"label": "brought", "lanes": {**lanes, "told": None}}))

    lane_times.main([str(tmp_path / "cases.json")])
    lines = capsys.readouterr().out.splitlines()
    rows = {" ".join(line.split()[:-4]): line.split()[-4:] for line in lines}
    assert lines[0] == "w1: 3 steps" and rows["seconds"] == ["told", "fastest", "middle", "slowest"]
    assert rows["step"] == ["1.000", "2.000", "3.000", "4.000"]
    assert rows["compute busy"] == ["0.500", "1.000", "1.500", "2.000"]
    assert rows["h2d waited for"] == ["0.000", "0.000", "0.000", "1.500"]
    assert lines[-1] == "  slowest: 1.500 s for fetch.late"

    lane_times.main([str(tmp_path / "one.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "brought: 3 steps" and lines[1].split() == ["seconds", "fastest", "middle", "slowest"]
