"""How long the steps of a run take, lane by lane, read off records that were made anyway: nothing waits for the GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from hightide.ir.tier import Lane
from hightide.planner.predict.step_seconds import StepForecast
from hightide.runtime.lanes.queues import LaneRecord
from hightide.runtime.run import Run

WARM_STEPS = 3  # the first compile, and fill caches; and their memory is looked at (watch.py), which takes time itself
NUM_TIMED = 3
LEAST_SHARE = 0.01  # of a step, that a lane must be busy for, or its speed is not worth a word
LEAST_S = 1e-9  # a lane that did nothing in no time has no speed


@dataclass(frozen=True)
class Measured:
    step_s: float
    lane_s: dict[Lane, float]  # in which each was busy, for one step's actions


class StepTimes:
    """Of whole batches with as many backwards per step as were planned, which is what a plan forecasts."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._records: dict[int, list[LaneRecord]] = {}  # of consecutive steps, by their last pass
        self._last_pass = -1
        run.lanes.keep_pass(None, num_before=2 * run.plan.accumulate)

    def begin_pass(self) -> None:
        if self._run.num_steps >= WARM_STEPS:
            self._run.lanes.streams.timing = True

    def stop(self) -> None:
        self._records.clear()
        self._run.lanes.streams.timing = False

    def end_step(self) -> Measured | None:
        """None: not yet. A step is whole when the next one has ended: its updates run until then."""
        lanes, number = self._run.lanes, self._run.plan.accumulate
        index, before = lanes.pass_index, self._last_pass
        self._last_pass = index
        if index != before + number or not self._run.passes.is_whole_batch or self._run.num_steps <= WARM_STEPS:
            self._records.clear()
            return None
        passes = range(before - number + 1, before + 1)
        self._records[before] = [record for one in passes for record in lanes.records_of(one)]
        if not self._is_timed(self._records[before]):
            self._records.clear()
        passed = [one for one, records in sorted(self._records.items()) if all(map(_has_passed, records))]
        if len(passed) <= NUM_TIMED:
            return None
        return measure([self._records[one] for one in passed[-NUM_TIMED - 1 :]])

    def _is_timed(self, records: Sequence[LaneRecord]) -> bool:
        """The host's clock says nothing about what a GPU does."""
        on_host = self._run.gpu.device.type == "cpu"
        return on_host or all(record.events is not None for record in records if not record.lane.on_host)


def measure(steps: Sequence[Sequence[LaneRecord]]) -> Measured:
    """Of consecutive steps; the first one only says when the second begins."""
    ends = [max((r for r in records if r.lane is Lane.COMPUTE), key=lambda r: r.ended_s) for records in steps]
    between_s = [_between_s(first, second) for first, second in pairwise(ends)]
    busy: dict[Lane, list[float]] = {lane: [] for lane in Lane}
    for records in steps[1:]:
        total_s: dict[Lane, float] = defaultdict(float)
        for record in records:
            total_s[record.lane] += _busy_s(record)
        for lane in Lane:
            busy[lane].append(total_s[lane])
    return Measured(median(between_s), {lane: median(seconds) for lane, seconds in busy.items()})


def lanes_off(measured: Measured, step: StepForecast, most_off: float) -> dict[Lane, float]:
    """How many times their forecast lanes were busy, of those that were off and are much of a step."""
    found = {}
    for lane, expected_s in step.simulated.action_s.items():
        seconds = measured.lane_s[lane]
        if expected_s and max(seconds, expected_s) >= LEAST_SHARE * measured.step_s:
            factor = max(seconds, LEAST_S) / expected_s
            if abs(factor - 1) > most_off:
                found[lane] = factor
    return found


def _has_passed(record: LaneRecord) -> bool:
    return record.events is None or all(event.query() for event in record.events)


def _busy_s(record: LaneRecord) -> float:
    if record.events is None:
        return record.ended_s - record.started_s
    return record.events[0].elapsed_time(record.events[1]) / 1e3


def _between_s(first: LaneRecord, second: LaneRecord) -> float:
    if first.events is None or second.events is None:
        return second.ended_s - first.ended_s
    return first.events[1].elapsed_time(second.events[1]) / 1e3
