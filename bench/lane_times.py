"""Why a step takes longer than it was told to: what each lane does and what compute waits for, told beside found.

    python bench/throughput.py --gpu 24GiB --host 112GiB --gradients param --clip 1.0 --lanes 6 > found.json
    python bench/lane_times.py found.json

`found.json` may be the file of `bench/figures.py --save` too; then every case in it that has lanes is shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import hightide
from hightide.ir.timeline import Timeline
from hightide.planner.predict.tide import simulated_timeline
from hightide.planner.solution import Searched
from hightide.report.summary import worst_waits
from hightide.runtime.surgery import run_of

NUM_WAITS = 5


def measure(model: nn.Module, steps: Callable[[int], None], count: int) -> dict[str, Any]:
    """`count` steps, each recorded behind one that is not looked at. `told` is None where the plan was brought."""
    solution = run_of(model).solution
    told = None
    if isinstance(solution, Searched):
        told = _facts(simulated_timeline(solution, solution.step.simulated, solution.problem.machine))
    found = []
    for _ in range(count):
        with hightide.record(model) as recording:
            steps(2)
        found.append(_facts(recording.timeline))
    return {"told": told, "found": found}


def _facts(timeline: Timeline) -> dict[str, Any]:
    return {
        "step_s": timeline.step_s,
        "busy_s": {str(one.lane): one.busy_s for one in timeline.lanes},
        "stall_s": {str(one.lane): one.stall_s for one in timeline.lanes},
        "waits": worst_waits(timeline, NUM_WAITS),
    }


def print_table(name: str, lanes: dict[str, Any]) -> None:
    """Told, and of what was found the fastest, the one in the middle and the slowest step."""
    found = sorted(lanes["found"], key=lambda one: one["step_s"])
    columns = {"fastest": found[0], "middle": found[len(found) // 2], "slowest": found[-1]}
    if lanes["told"] is not None:
        columns = {"told": lanes["told"], **columns}
    print(f"{name}: {len(found)} steps\n{'seconds':22}" + "".join(f"{column:>10}" for column in columns))
    print(_row("step", [one["step_s"] for one in columns.values()]))
    for part, text in (("busy_s", "busy"), ("stall_s", "waited for")):
        for lane in dict.fromkeys(lane for one in columns.values() for lane in one[part]):
            seconds = [one[part].get(lane, 0.0) for one in columns.values()]
            if any(seconds):
                print(_row(f"{lane} {text}", seconds))
    for column in columns:
        for about, seconds in columns[column]["waits"]:
            print(f"  {column}: {seconds:.3f} s for {about}")


def _row(name: str, seconds: list[float]) -> str:
    return f"{name:22}" + "".join(f"{one:10.3f}" for one in seconds)


def main(paths: list[str]) -> int:
    for path in paths:
        results = json.loads(Path(path).read_text())
        cases = {results.get("label", "run"): results} if "lanes" in results else results
        for name, result in cases.items():
            if isinstance(result, dict) and "lanes" in result:
                print_table(name, result["lanes"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
