"""A measured step as a timeline: the same form as a simulated one.

[Note: the time of a GPU] While a recording is on, the lanes set events around what they put on their streams, and each
tick notes what the GPU holds; nothing waits for them. When it ends, the GPU is waited for once, one more event is set
at a moment that the host's clock knows, and all others are counted back from there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hightide.ir.action import Op, Schedule
from hightide.ir.tier import Lane
from hightide.ir.timeline import Level, Part, Timeline
from hightide.planner.compare import compare
from hightide.planner.simulate import Span
from hightide.planner.tide import base_parts, step_timeline
from hightide.runtime.queues import Record
from hightide.runtime.run import Run

PARTS = (Part.PERSISTENT, Part.SLOTS, Part.GRADIENTS, Part.REST)


class Recording:
    """What was recorded, once the recording has ended."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """Of the last step."""
        if self._timeline is None:
            raise ValueError("nothing is recorded yet; read the timeline after the `with` block")
        return self._timeline


@contextmanager
def record(run: Run) -> Iterator[Recording]:
    """Steps inside are recorded; at the end it waits for the GPU and for what is left of the updates."""
    recording, first_pass = Recording(), run.lanes.pass_index + 1
    run.lanes.streams.recording = True
    try:
        yield recording
    finally:
        run.lanes.streams.recording = False
    run.executor.wait_for_updates()
    clock = _clock(run.gpu.device)
    recording._timeline = _last_step(run, [one for one in run.lanes.records if one.pass_index >= first_pass], clock)


def _clock(device: torch.device) -> Callable[[torch.cuda.Event], float]:
    """What the host's clock showed when the GPU passed an event. See [Note: the time of a GPU]."""
    if device.type != "cuda":
        return lambda event: 0.0  # without a GPU there are no events
    torch.cuda.synchronize(device)
    now = torch.cuda.Event(enable_timing=True)
    now.record(torch.cuda.current_stream(device))
    now.synchronize()
    now_s = time.perf_counter()
    return lambda event: now_s - event.elapsed_time(now) / 1e3


def _last_step(run: Run, records: list[Record], clock: Callable[[torch.cuda.Event], float]) -> Timeline:
    schedules = [program.schedule for program in run.executor.programs.values()]
    steps = {tick.id for schedule in schedules for tick in schedule.ticks if tick.op is Op.STEP}
    stepped = {record.pass_index for record in records if record.id in steps}
    last = max(stepped, default=0)
    if last - 1 not in {record.pass_index for record in records}:
        raise ValueError(f"a recording shows a step that follows another; this one has {len(stepped)}, do at least 2")
    spans = [_span(record, clock) for record in records]
    ended_s = [
        max(span.end_s for span in spans if span.pass_index == index and span.lane is Lane.COMPUTE)
        for index in (last - 1, last)
    ]
    done = [record for record in records if record.pass_index == last]
    schedule = min(schedules, key=lambda one: len(compare(one, done)))  # a pass may change it in the middle
    return step_timeline(
        run.plan,
        schedule,
        [span for span in spans if span.pass_index <= last],
        (ended_s[0], ended_s[1]),
        PARTS,
        _levels(run, schedule, [(_span(record, clock), record.gpu_bytes) for record in done], ended_s[0]),
        run.gpu.device_peak_bytes,
        f"measured on {_name(run.gpu.device)}",
    )


def _span(record: Record, clock: Callable[[torch.cuda.Event], float]) -> Span:
    begin_s, end_s = (record.started_s, record.ended_s) if record.events is None else map(clock, record.events)
    return Span(record.pass_index, record.lane, record.id, begin_s, end_s)


def _levels(
    run: Run, schedule: Schedule, done: list[tuple[Span, tuple[int, int] | None]], begin_s: float
) -> tuple[Level, ...]:
    """What the GPU holds is known at both ends of each tick, and drawn as if nothing happened in between."""
    base = base_parts(run.plan, schedule.gpu_base_bytes)
    fixed = tuple(base[part] for part in PARTS if part is not Part.REST)
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
