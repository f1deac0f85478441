"""A step in a few numbers, alone or beside another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hightide.ir.tier import Lane
from hightide.ir.timeline import LaneTime, Timeline
from hightide.ir.units import format_bytes, format_seconds

LEAST_SHARE = 0.001  # of a step: shorter waits are not worth a line
MAX_LINKS = 3  # of a chain of waits that are shown


@dataclass(frozen=True)
class SummaryRow:
    name: str
    cells: tuple[str, ...]  # one for each timeline
    difference: str = ""  # of the second against the first


def rows(timelines: list[Timeline]) -> list[SummaryRow]:
    time = "time of the passes shown" if any(one.is_part for one in timelines) else "step time"
    first = _row(time, [one.step_s for one in timelines], format_seconds)
    alike = len({one.is_part for one in timelines}) == 1
    found = [first if alike else replace(first, difference="")]
    if any(one.light_share is not None for one in timelines):
        found.append(_share_row("share of the speed of light", [one.light_share for one in timelines]))
    reserved = [one.gpu_reserved_bytes for one in timelines if one.gpu_reserved_bytes is not None]
    if len(reserved) == len(timelines):
        found.append(_row("GPU peak, reserved", reserved, _bytes_text))
    found.append(_row("GPU peak, tensors", [one.gpu_peak_bytes for one in timelines], _bytes_text))
    lanes = [lane for lane in Lane if any(used.lane is lane for one in timelines for used in one.lanes)]
    for lane in lanes:
        shares = [lane_time(one, lane).busy_s / one.step_s for one in timelines]
        found.append(_share_row(f"{lane} busy", shares))
    for lane in lanes:
        waits = [lane_time(one, lane).stall_s for one in timelines]
        if max(wait / one.step_s for wait, one in zip(waits, timelines, strict=True)) >= LEAST_SHARE:
            found.append(_row(stall_name(lane), waits, format_seconds))
    return found


def gpu_room(timeline: Timeline) -> str:
    """What the peak leaves of the limit, in words."""
    limit = format_bytes(timeline.gpu_limit_bytes)
    what = "tensors take" if timeline.gpu_reserved_bytes is None else "torch reserves"
    free_bytes = timeline.gpu_limit_bytes - timeline.gpu_bytes
    most = f"GPU: {what} up to {format_bytes(timeline.gpu_bytes)}"
    if free_bytes < 0:
        return f"{most}, {format_bytes(-free_bytes)} more than the limit of {limit}"
    return f"{most} of {limit}, {format_bytes(free_bytes)} stay free"


def stall_name(lane: Lane) -> str:
    return "compute idle" if lane is Lane.COMPUTE else f"compute waits for {lane}"


def lane_time(timeline: Timeline, lane: Lane) -> LaneTime:
    """A timeline without a disk has none of its lanes."""
    return next((one for one in timeline.lanes if one.lane is lane), LaneTime(lane, 0.0, 0.0))


def limiting(timeline: Timeline) -> LaneTime:
    """The busiest lane: no plan with the same work can be faster than it."""
    return max(timeline.lanes, key=lambda one: one.busy_s)


def worst_waits(timeline: Timeline, count: int = 8) -> list[tuple[str, float]]:
    """What compute waited for longest, with what that had waited for itself, and how long."""
    waits: dict[str, float] = defaultdict(float)
    for bar in timeline.bars:
        if bar.lane is Lane.COMPUTE and bar.waited_s > 0:
            waits[bar.waited_for] += bar.waited_s
    long = [wait for wait in waits.items() if wait[1] >= LEAST_SHARE * timeline.step_s]
    worst = sorted(long, key=lambda wait: -wait[1])[:count]
    causes = {bar.id: bar.waited_for for bar in timeline.bars if not bar.earlier}
    return [(_chain(name, causes), seconds) for name, seconds in worst]


def _chain(name: str, causes: Mapping[str, str]) -> str:
    links = [name]
    while len(links) < MAX_LINKS and (cause := causes.get(links[-1])):
        links.append(cause)
    return ", after ".join(links)


def _row(name: str, values: Sequence[float], text: Callable[[float], str]) -> SummaryRow:
    difference = ""
    if len(values) == 2 and values[0]:
        difference = f"{values[1] / values[0] - 1:+.1%}"
    return SummaryRow(name, tuple(text(value) for value in values), difference)


def _bytes_text(value: float) -> str:
    return format_bytes(int(value))


def _share_row(name: str, shares: Sequence[float | None]) -> SummaryRow:
    """None: not known."""
    known = [share for share in shares if share is not None]
    difference = f"{100 * (known[1] - known[0]):+.1f} points" if len(known) == 2 else ""
    return SummaryRow(name, tuple("-" if share is None else f"{share:.1%}" for share in shares), difference)
