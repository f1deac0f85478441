"""A measured step as a timeline: the same form as a simulated one.

[Note: the time of a GPU] While a recording is on, the lanes set events around what they put on their streams, and each
tick notes what the GPU holds; nothing waits for them. When it ends, the GPU is waited for, one more event is set at a
moment that the host's clock knows, and all others are counted back from there. The host sees an event a little late,
and much later while other processes use the GPU: of several tries the one that was seen soonest counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from hightide.ir.action import Op, Schedule
from hightide.ir.tier import Lane
from hightide.ir.timeline import Level, MemoryPart, Timeline
from hightide.observe.stats import light_s_of
from hightide.planner.predict.simulator import Span
from hightide.planner.predict.tide import base_parts, step_timeline
from hightide.planner.verify.compare_records import compare
from hightide.runtime.lanes.queues import LaneRecord
from hightide.runtime.run import Run
from hightide.runtime.step_work import Computed
from hightide.stores.store import LapPeak

NUM_CLOCK_TRIES = 16
PARTS = (MemoryPart.PERSISTENT, MemoryPart.SLOTS, MemoryPart.GRADIENTS, MemoryPart.REST)


class Recording:
    """What was recorded, once the recording has ended."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None
        self._missing = "nothing is recorded yet; read the timeline after the `with` block"

    @property
    def timeline(self) -> Timeline:
        """Of the last step."""
        if self._timeline is None:
            raise ValueError(self._missing)
        return self._timeline


@contextmanager
def record(run: Run) -> Iterator[Recording]:
    """Steps inside are recorded; at the end it waits for the GPU and for what is left of the updates."""
    if run.between_passes is not None:
        raise ValueError("this model is being recorded already, and by one recording at a time; end that one first")
    recording, passes = Recording(), _SteppedPasses(run)
    run.between_passes = passes.end_pass
    run.lanes.streams.recording = True
    try:
        yield recording
        passes.end_pass()
        run.lanes.streams.recording = False
        run.executor.wait_for_updates()
        if passes.has_step_before:
            recording._timeline = _last_step(run, passes, _clock(run.gpu.device))
        else:
            recording._missing = (
                f"a recording shows a step that follows another; this one has {passes.num_steps}, do at least 2"
            )
    finally:
        run.lanes.streams.recording = False
        run.between_passes = None
        run.lanes.keep_pass(None)


class _SteppedPasses:
    """Which pass stepped last, however many others (evaluations) follow, and what the GPU held in it at most. A step of
    several passes ends with it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps = {
            tick.id for program in run.executor.programs.values() for tick in program.ticks if tick.op is Op.STEP
        }
        self.first_pass = run.lanes.pass_index + 1
        self.before = self.last_pass = 0  # the pass before the last step, and the one that stepped
        self.num_steps = 0
        self.peak = run.gpu.lap()
        self.work: Computed | None = None
        self._trained: list[tuple[int, LapPeak]] = []  # passes since the last step, and what the GPU held in them
        run.lanes.keep_pass(None, num_before=2 * run.plan.accumulate + 1)  # and a few evaluations between

    def end_pass(self) -> None:
        lanes, peak = self._run.lanes, self._run.gpu.lap()
        index = lanes.pass_index
        if index < self.first_pass or not self._run.executor.is_training:
            return
        self._trained.append((index, peak))
        if any(record.id in self._steps for record in lanes.records_of(index)):
            passes = self._trained[-self._run.plan.accumulate :]
            self.before, self.last_pass, self.num_steps = passes[0][0] - 1, index, self.num_steps + 1
            self.peak = max((lap for _, lap in passes), key=lambda lap: lap.tensor_bytes)
            self.work = self._run.work.last_step
            self._trained.clear()
            lanes.keep_pass(index)

    @property
    def has_step_before(self) -> bool:
        """Before all passes of the last step."""
        return self.before >= self.first_pass


def _clock(device: torch.device) -> Callable[[torch.cuda.Event], float]:
    """What the host's clock showed when the GPU passed an event. See [Note: the time of a GPU]."""
    if device.type != "cuda":
        return lambda event: 0.0  # without a GPU there are no events
    torch.cuda.synchronize(device)
    _, now_s, now = min((_marked(device) for _ in range(NUM_CLOCK_TRIES)), key=lambda mark: mark[0])
    return lambda event: now_s - event.elapsed_time(now) / 1e3


def _marked(device: torch.device) -> tuple[float, float, torch.cuda.Event]:
    """An event of now, what the host's clock shows then, and by how much that may be late."""
    event = torch.cuda.Event(enable_timing=True)
    began_s = time.perf_counter()
    event.record(torch.cuda.current_stream(device))
    event.synchronize()
    seen_s = time.perf_counter()
    return seen_s - began_s, seen_s, event


def _last_step(run: Run, passes: _SteppedPasses, clock: Callable[[torch.cuda.Event], float]) -> Timeline:
    last, before = passes.last_pass, passes.before
    records = [record for record in run.lanes.records if passes.first_pass <= record.pass_index <= last]
    spans = [_span(record, clock) for record in records]
    ended_s = [
        max(span.end_s for span in spans if span.pass_index == index and span.lane is Lane.COMPUTE)
        for index in (before, last)
    ]
    done = [record for record in records if record.pass_index > before]
    schedules = {index: _followed(run, done, index) for index in range(before + 1, last + 1)}
    timeline = step_timeline(
        run.plan,
        schedules,
        spans,
        (ended_s[0], ended_s[1]),
        PARTS,
        _levels(run, schedules[last], [(_span(record, clock), record.gpu_bytes) for record in done], ended_s[0]),
        (passes.peak.tensor_bytes, passes.peak.reserved_bytes),
        f"measured on {_name(run.gpu.device)}",
    )
    return replace(timeline, light_s=light_s_of(run, passes.work))


def _followed(run: Run, done: list[LaneRecord], index: int) -> Schedule:
    """The schedule that a pass went by: it may have changed it in the middle."""
    schedules = [program.schedule for program in run.executor.programs.values()]
    records = [record for record in done if record.pass_index == index]
    return min(schedules, key=lambda one: len(compare(one, records)))


def _span(record: LaneRecord, clock: Callable[[torch.cuda.Event], float]) -> Span:
    begin_s, end_s = (record.started_s, record.ended_s) if record.events is None else map(clock, record.events)
    return Span(record.pass_index, record.lane, record.id, begin_s, end_s)


def _levels(
    run: Run, schedule: Schedule, done: list[tuple[Span, tuple[int, int] | None]], begin_s: float
) -> tuple[Level, ...]:
    """What the GPU holds is known at both ends of each tick, and drawn as if nothing happened in between."""
    base = base_parts(run.solution.placement, schedule.gpu_base_bytes)
    fixed = tuple(base[part] for part in PARTS if part is not MemoryPart.REST)
    samples = [
        sample
        for span, held in done
        if held is not None
        for sample in zip((span.start_s, span.end_s), held, strict=True)
    ]
    rests = [(at_s, max(0, num_bytes - sum(fixed))) for at_s, num_bytes in sorted(samples)]
    return tuple(Level(at_s - begin_s, (*fixed, rest)) for at_s, rest in rests)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the simulated accelerator"
