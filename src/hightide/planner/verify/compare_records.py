"""Compares what was scheduled with what the lanes recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from hightide.ir.action import Schedule
from hightide.ir.tier import Lane


class Completed(Protocol):
    """The record that a lane makes of an action when it is done."""

    @property
    def lane(self) -> Lane: ...

    @property
    def id(self) -> str: ...

    @property
    def ready(self) -> tuple[str, ...]:
        """On a due-first lane: all actions that were ready when this one was picked, itself included."""
        ...

    @property
    def ready_dues(self) -> tuple[int, ...]:
        """When each of `ready` was due, in ticks of all passes one after the other."""
        ...


def compare(schedule: Schedule, records: Sequence[Completed]) -> list[str]:
    """Deviations, one line each; empty if execution followed the schedule: the same set of actions, the same order on
    lanes that work in order, and the stated picking rule on the others."""
    deviations: list[str] = []
    for lane in Lane:
        planned = [action.id for action in schedule.lane(lane)]
        done = [record for record in records if record.lane is lane]
        ids = [record.id for record in done]
        deviations += _compare_sets(lane, planned, ids)
        if lane.is_in_order:
            deviations += _compare_order(lane, planned, ids)
        else:
            first_due = _first_due(schedule, done)
            deviations += [line for record in done for line in _check_pick(schedule, record, first_due)]
    return deviations


def _first_due(schedule: Schedule, done: Sequence[Completed]) -> int:
    """When the first tick of the pass was due, as most records have it."""
    dues = [(record.id, dict(zip(record.ready, record.ready_dues, strict=True)).get(record.id)) for record in done]
    found = Counter(due - schedule.by_id[name].tick for name, due in dues if name in schedule.by_id and due is not None)
    return found.most_common(1)[0][0] if found else 0


def _compare_sets(lane: Lane, planned: Sequence[str], done: Sequence[str]) -> list[str]:
    twice = sorted({name for name in done if done.count(name) > 1}) if len(set(done)) < len(done) else []
    return [
        *(f"{lane}: {name} was scheduled and did not run" for name in sorted(set(planned) - set(done))),
        *(f"{lane}: {name} ran and was not scheduled" for name in sorted(set(done) - set(planned))),
        *(f"{lane}: {name} ran more than once" for name in twice),
    ]


def _compare_order(lane: Lane, planned: Sequence[str], done: Sequence[str]) -> list[str]:
    """Compares what both have, so that one missing action is not reported as a shift of all that follow."""
    common = set(planned) & set(done)
    expected = [name for name in planned if name in common]
    actual = [name for name in dict.fromkeys(done) if name in common]
    pairs = zip(expected, actual, strict=True)
    return [f"{lane}: {ran} ran where {due} was scheduled" for due, ran in pairs if due != ran]


def _check_pick(schedule: Schedule, record: Completed, first_due: int) -> list[str]:
    dues = dict(zip(record.ready, record.ready_dues, strict=True))
    if record.id not in dues:
        return [f"{record.lane}: {record.id} was picked and was not ready"]
    wrong, due = [], dues[record.id] - first_due
    if record.id in schedule.by_id and schedule.by_id[record.id].tick != due:
        scheduled = schedule.by_id[record.id].tick
        wrong.append(f"{record.lane}: {record.id} was recorded as due at {due}, scheduled for {scheduled}")
    first = min(dues, key=lambda name: dues[name])
    if dues[first] < dues[record.id]:
        wrong.append(f"{record.lane}: {record.id} was picked while {first} was ready and due earlier")
    return wrong
