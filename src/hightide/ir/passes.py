"""The passes of one training step: a forward and a backward each, one or several before the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hightide.ir.action import Mode, Schedule
from hightide.ir.tier import Lane


@dataclass(frozen=True)
class Passes:
    """Their schedules, in order, each with how many passes in a row follow it."""

    runs: tuple[tuple[Schedule, int], ...]

    @classmethod
    def of(cls, schedule: Schedule | Passes) -> Passes:
        """A step that is one pass."""
        return schedule if isinstance(schedule, Passes) else cls(((schedule, 1),))

    def __iter__(self) -> Iterator[Schedule]:
        """Each schedule once."""
        return (schedule for schedule, _ in self.runs)

    @property
    def first(self) -> Schedule:
        return self.runs[0][0]

    @property
    def last(self) -> Schedule:
        """The one with the update."""
        return self.runs[-1][0]

    @cached_property
    def number(self) -> int:
        return sum(count for _, count in self.runs)

    @cached_property
    def by_mode(self) -> dict[Mode, Schedule]:
        return {schedule.mode: schedule for schedule in self}

    def moved_bytes(self, lane: Lane) -> int:
        """By all passes."""
        return sum(count * sum(action.num_bytes for action in schedule.lane(lane)) for schedule, count in self.runs)
