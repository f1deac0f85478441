"""A schedule, indexed for interpretation. Built once per schedule; a pass only walks it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from hightide.ir.action import TICK_OPS, Action, Mode, Op, Schedule
from hightide.ir.tier import Lane


class Program:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.mode: Mode = schedule.mode
        self.ticks = schedule.ticks
        self.by_lane: dict[Lane, list[Action]] = {lane: [] for lane in Lane if lane is not Lane.COMPUTE}
        self.when_open: dict[int, list[Action]] = defaultdict(list)
        self.before_tick: dict[int, list[Action]] = defaultdict(list)
        self.uses: dict[int, list[int]] = defaultdict(list)  # block -> ticks that need its chunks
        self._forward: dict[int, list[int]] = defaultdict(list)
        self._backward: dict[int, int] = {}
        self.step_tick: int | None = None
        for action in schedule.actions:
            if action.op not in TICK_OPS:
                self._file(action)
        for index, tick in enumerate(self.ticks):
            self._file_tick(index, tick)

    def _file(self, action: Action) -> None:
        if action.lane is not Lane.COMPUTE:
            self.by_lane[action.lane].append(action)
        elif action.runs_when_open:  # in the user's thread, as all that is no tick on the compute lane
            self.when_open[action.opens].append(action)
        else:
            self.before_tick[action.tick].append(action)

    def _file_tick(self, index: int, tick: Action) -> None:
        if tick.op is Op.STEP:
            self.step_tick = index
            return
        assert tick.block is not None and tick.call is not None
        self.uses[tick.block].append(index)
        if tick.op is Op.FORWARD:
            self._forward[tick.block].append(index)
        else:
            self._backward[tick.call] = index

    def find_forward(self, block: int, cursor: int) -> int | None:
        """The next planned forward of a block at or after the cursor; None if the plan has none left."""
        ticks = self._forward.get(block, [])
        position = bisect_left(ticks, cursor)
        return ticks[position] if position < len(ticks) else None

    def find_backward(self, call: int | None, cursor: int) -> int | None:
        tick = None if call is None else self._backward.get(call)
        return tick if tick is not None and tick >= cursor else None

    def next_use(self, blocks: tuple[int, ...], cursor: int) -> float:
        """When a chunk with these users is needed next; infinity if never in this pass."""
        soonest = float("inf")
        for block in blocks:
            ticks = self.uses.get(block, [])
            position = bisect_left(ticks, cursor)
            if position < len(ticks):
                soonest = min(soonest, ticks[position])
        return soonest
