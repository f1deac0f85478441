"""The cost of a checkpoint to a run, told beforehand.

[Note: a save beside training] As in runtime/saving/copy_on_update.py: a reader takes chunk after chunk, in the order in
which updates will come, as fast as the disk writes. It never waits for training, but for updates of the saved step, so
it is known beforehand when it comes by where. Of a chunk that is updated before, the rest goes aside into host memory
that the plan leaves free. Where there is none, the update waits until the reader has made room, or has come by, and all
later updates are late with it. After one step each chunk is read or aside: the following steps wait for nothing. What
leaves the GPU does so ahead, at the speed of the link. Copies of the host are made by the cpu lane before its updates:
the step that has them is simulated again with as many bytes more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hightide.ir.action import Op, Schedule
from hightide.ir.block import DTYPE_BYTES
from hightide.ir.chunk import ChunkSpec
from hightide.ir.machine import UPDATE_BYTES, UPDATE_TRAFFIC_BYTES, Machine
from hightide.ir.passes import Passes
from hightide.ir.save_sizes import buffer_bytes
from hightide.ir.tier import Lane, Tier
from hightide.ir.units import format_bytes, format_seconds
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import Peaks
from hightide.planner.predict.simulator import NUM_STEPS
from hightide.planner.predict.step_seconds import StepForecast, forecast_step_s
from hightide.planner.problem import Problem

ASSUMED_WRITE_BYTES_PER_S = 1e9  # where nobody has said how fast the disk is
FIRST_USE_BYTES_PER_S = 3.3e9  # of memory that comes from the system, and is pinned (an H200's host, see docs/log.md)
LEAST_SHARE = 0.1  # of a disk's speed that training leaves, at the least
AS_MUCH = 0.01  # that saving may cost


@dataclass(frozen=True)
class SavedChunk:
    """A chunk of a save, in the order of reading."""

    num_bytes: int
    ready_s: float  # when its values of the saved step are there, from the end of that step on
    update_s: float | None  # when its next update begins, if nothing holds it up. None: it has none
    on_gpu: bool = False  # it is updated there


@dataclass(frozen=True)
class HeldUp:
    """Training by a save, during the step that follows it."""

    written_s: float  # when the reader is through
    waited_s: float  # that updates have waited, for room or for what leaves the GPU
    copied_bytes: tuple[int, ...]  # by chunk, that its update put aside
    aside_bytes: int  # of all chunks together at one moment, at most


@dataclass(frozen=True)
class SaveForecast:
    num_bytes: int
    written_s: float  # beside training
    held_s: float  # that training is held up
    step_s: float
    spare_bytes: int  # of host memory
    write_bytes_per_s: float
    speed_source: str  # "measured", "estimated", "assumed", or which earlier save tells it
    aside_bytes: int = 0  # of that, for copies, at most
    pinned_bytes: int = 0  # of those, what leaves the GPU: it is pinned, once
    buffer_bytes: int = 0  # of it too: through which bytes pass on their way to the disk
    beside_bytes: int = 0  # as that, but beside the limit, because the plan leaves too little free
    is_ready: bool = False  # memory is there, or comes beside training: the first save costs no more than others

    @property
    def host_bytes(self) -> int:
        """That it takes of the spare memory, at most. With the plan's own it is within the limit."""
        return self.aside_bytes + self.buffer_bytes

    @property
    def first_s(self) -> float:
        """That the first save of a process costs training more than others, at most: memory is used for the first time,
        and pinned."""
        return 0.0 if self.is_ready else self.aside_bytes / FIRST_USE_BYTES_PER_S

    def steps_between(self, share: float = AS_MUCH) -> int:
        """Two saves, so that they cost this share of the time, and one ends before the next begins."""
        needed_s = max(self.held_s / share, self.written_s)
        return max(1, math.ceil(needed_s / self.step_s)) if self.step_s else 1

    @property
    def in_words(self) -> str:
        between = self.steps_between()
        often = "one at every step" if between == 1 else f"one every {between:,} steps"
        cost = self.held_s / (between * self.step_s) if self.step_s else 0.0
        share = f"{AS_MUCH:.0%}" if cost > 0.9 * AS_MUCH else f"{cost:.1%}" if cost >= 5e-4 else "less than 0.1%"
        held = f"holds it up {format_seconds(self.held_s)}" if self.held_s >= 5e-4 else "holds nothing up"
        takes = f"copies up to {format_bytes(self.aside_bytes)}" if self.aside_bytes else "copies nothing"
        host = f"takes {format_bytes(self.host_bytes)} of free host memory" if self.host_bytes else ""
        beside = f"{format_bytes(self.beside_bytes)} beside the host's limit" if self.beside_bytes else ""
        takes = ", ".join(text for text in (takes, host, beside) if text)
        if self.first_s >= 0.05:
            pins = f", {format_bytes(self.pinned_bytes)} of it pinned" if self.pinned_bytes else ""
            takes += f" (the first one gets it from the system{pins}: about {format_seconds(self.first_s)} more)"
        disk = f"{self.speed_source} {self.write_bytes_per_s / 1e9:.1f} GB/s"
        return (
            f"a checkpoint: {format_bytes(self.num_bytes)} in {format_seconds(self.written_s)} beside training "
            f"({disk}), {held}, {takes}; {often} costs {share}"
        )


def update_order(schedule: Schedule, num_chunks: int) -> list[int]:
    """All chunks, in the order in which a pass that ends a step updates them; those that it does not update are
    last."""
    updates = [action for action in schedule.actions if action.op is Op.UPDATE]
    updates.sort(key=lambda action: (action.opens, action.tick))
    found = dict.fromkeys(action.chunk for action in updates if action.chunk is not None)
    return [*found, *(chunk for chunk in range(num_chunks) if chunk not in found)]


def saved_bytes(chunk: ChunkSpec) -> int:
    """Of whole tensors: nothing of what lies between them."""
    params = sum(entry.numel for entry in chunk.params) * DTYPE_BYTES[chunk.dtype]
    optimised = [entry.numel for entry in chunk.params if entry.offset_numel < chunk.optimised_numel]
    return params + sum(state.num_bytes(numel) for state in chunk.states for numel in optimised)


def held_up(
    chunks: Sequence[SavedChunk], write_bytes_per_s: float, spare_bytes: int, d2h_bytes_per_s: float = math.inf
) -> HeldUp:
    """See [Note: a save beside training]. Time begins with the save."""
    reader = _Reader(chunks, write_bytes_per_s)
    aside = [0] * len(chunks)  # the last bytes of each, that lie in buffers
    late_s, left_bytes = 0.0, 0
    gpu_bytes = sum(chunk.num_bytes for chunk in chunks if chunk.on_gpu)  # may all be aside: they leave ahead
    most_bytes = 0  # of the others
    by_time = sorted((chunk.update_s, number) for number, chunk in enumerate(chunks) if chunk.update_s is not None)
    for planned_s, number in by_time:
        at_s = planned_s + late_s
        position = reader.position(at_s)
        lent_bytes = sum(min(num_bytes, max(0, reader.ends[one] - position)) for one, num_bytes in enumerate(aside))
        unread = min(chunks[number].num_bytes, max(0, reader.ends[number] - position))
        if lent_bytes + unread > spare_bytes:
            position = _makes_room(reader, aside, number, position, spare_bytes)
            at_s = max(at_s, reader.reaches_s(position))
            unread = min(chunks[number].num_bytes, max(0, reader.ends[number] - position))
        aside[number] = unread
        on_host = [one for one, its in enumerate(chunks) if aside[one] and not its.on_gpu]
        most_bytes = max(most_bytes, sum(min(aside[one], max(0, reader.ends[one] - position)) for one in on_host))
        if chunks[number].on_gpu and unread:
            left_bytes += chunks[number].num_bytes
            at_s = max(at_s, left_bytes / d2h_bytes_per_s)
        late_s = at_s - planned_s
    copied = tuple(0 if chunk.on_gpu else num_bytes for chunk, num_bytes in zip(chunks, aside, strict=True))
    return HeldUp(reader.reaches_s(reader.num_bytes), late_s, copied, min(spare_bytes, gpu_bytes + most_bytes))


def _makes_room(reader: _Reader, aside: Sequence[int], number: int, position: int, spare_bytes: int) -> int:
    """How far the reader must be, in bytes, until the rest of a chunk finds room beside what is aside."""
    kept = [*((reader.ends[one] - num_bytes, reader.ends[one]) for one, num_bytes in enumerate(aside) if num_bytes)]
    kept.append((reader.ends[number] - reader.sizes[number], reader.ends[number]))
    kept = [(max(begin, position), end) for begin, end in sorted(kept) if end > position]
    too_much = sum(end - begin for begin, end in kept) - spare_bytes
    for begin, end in kept:
        if too_much <= end - begin:
            return begin + max(0, too_much)
        too_much -= end - begin
    return reader.ends[number]


class _Reader:
    """When it comes by where."""

    def __init__(self, chunks: Sequence[SavedChunk], bytes_per_s: float) -> None:
        self.sizes = [chunk.num_bytes for chunk in chunks]
        self.ends = list(accumulate(self.sizes))  # in bytes from the begin of the save
        self._bytes_per_s = bytes_per_s
        self._begins_s: list[float] = []
        self._ends_s: list[float] = []
        now_s = 0.0
        for chunk in chunks:
            self._begins_s.append(max(now_s, chunk.ready_s) if chunk.num_bytes else now_s)
            now_s = self._begins_s[-1] + chunk.num_bytes / bytes_per_s
            self._ends_s.append(now_s)

    @property
    def num_bytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    def position(self, at_s: float) -> int:
        number = bisect_left(self._ends_s, at_s)
        if number == len(self.ends):
            return self.num_bytes
        read = int(max(0.0, at_s - self._begins_s[number]) * self._bytes_per_s)
        return self.ends[number] - self.sizes[number] + min(read, self.sizes[number])

    def reaches_s(self, position: int) -> float:
        number = bisect_left(self.ends, position)
        if not self.ends or position <= 0:
            return 0.0
        return self._ends_s[number] - (self.ends[number] - position) / self._bytes_per_s


def save_forecast(
    problem: Problem,
    placement: Placement,
    passes: Passes,
    peak: Peaks,
    step: StepForecast,
    speed: tuple[float, str] | None = None,
) -> SaveForecast:
    """Of all values, under a plan that was simulated. `speed`: of the disk, in bytes per second, and who says so; None:
    as far as the machine's file knows it."""
    plan, machine = placement.plan, problem.machine
    write_bytes_per_s, source = speed or write_speed(machine, step)
    spare_bytes = max(0, plan.host_limit_bytes - peak.host_peak_bytes)
    order = update_order(passes.last, len(placement.chunks))
    chunks = _saved_chunks(placement, order, step)
    num_bytes = sum(chunk.num_bytes for chunk in chunks)
    within_bytes, beside_bytes = buffer_bytes(num_bytes, _largest_elsewhere(placement), spare_bytes)
    for_copies = spare_bytes - within_bytes
    d2h = machine.speeds_of({Lane.D2H})[Lane.D2H]
    held = held_up(chunks, write_bytes_per_s, for_copies, d2h)
    copied = {order[number]: num_bytes for number, num_bytes in enumerate(held.copied_bytes) if num_bytes}
    copying_s = _copying_s(problem, placement, passes, copied)
    held_s = held.waited_s + copying_s
    pinned_bytes = min(for_copies, sum(chunk.num_bytes for chunk in chunks if chunk.on_gpu))
    return SaveForecast(
        num_bytes,
        held.written_s,
        held_s,
        step.step_s,
        spare_bytes,
        write_bytes_per_s,
        source,
        held.aside_bytes,
        pinned_bytes,
        within_bytes,
        beside_bytes,
    )


def _largest_elsewhere(placement: Placement) -> int:
    """Bytes of a chunk that has something on the GPU or on a disk: none of its arrays is larger."""
    elsewhere = [one for one in placement.chunks if one.home is not Tier.HOST or one.states is not Tier.HOST]
    return max((saved_bytes(one.shard) for one in elsewhere), default=0)


def write_speed(machine: Machine, step: StepForecast) -> tuple[float, str]:
    """What training leaves of the disk's, and where that is known from."""
    if machine.disk is None:
        return ASSUMED_WRITE_BYTES_PER_S, "assumed"
    busy = step.simulated.busy_s.get(Lane.DISK_WRITE, 0.0) / step.simulated.step_s
    speed = min(machine.disk.write_bytes_per_s, machine.disk.sustained_write_bytes_per_s)
    is_estimated = any(one.of.split(".")[0] == "disk" for one in machine.estimates) or not machine.is_measured
    return speed * max(LEAST_SHARE, 1 - busy), "estimated" if is_estimated else "measured"


def _saved_chunks(placement: Placement, order: Iterable[int], step: StepForecast) -> list[SavedChunk]:
    """An update belongs to the step's last pass; a deferred one begins when the step has ended."""
    simulated, last = step.simulated, step.simulated.passes[-1]
    names: dict[str, int | None] = {
        action.id: action.chunk for action in last.schedule.actions if action.op is Op.UPDATE
    }
    spans = {names[span.id]: span for span in simulated.spans if span.id in names and span.pass_index == last.index}
    found = []
    for chunk in order:
        span, place = spans.get(chunk), placement.chunks[chunk]
        ready_s = 0.0 if span is None else max(0.0, span.end_s - last.end_s)
        update_s = None if span is None else max(0.0, step.step_s + span.start_s - last.end_s)
        found.append(SavedChunk(saved_bytes(place.shard), ready_s, update_s, place.states is Tier.GPU))
    return found


def _copying_s(problem: Problem, placement: Placement, passes: Passes, copied_bytes: Mapping[int, int]) -> float:
    """That a step takes longer in which the cpu lane copies so many bytes of chunks before it updates them."""
    if not copied_bytes:
        return 0.0
    touched = 2 * UPDATE_BYTES / UPDATE_TRAFFIC_BYTES  # by an update that moves as much through memory as a copied byte
    actions = tuple(
        action.changed(num_bytes=action.num_bytes + int(touched * copied_bytes.get(action.chunk, 0)))
        if action.op is Op.UPDATE and action.lane is Lane.CPU and action.chunk is not None
        else action
        for action in passes.last.actions
    )
    *others, (schedule, count) = passes.runs
    slower = Passes((*others, (replace(schedule, actions=actions), count)))
    before_s, after_s = (forecast_step_s(problem, placement, one, NUM_STEPS) for one in (passes, slower))
    return max(0.0, after_s - before_s)
