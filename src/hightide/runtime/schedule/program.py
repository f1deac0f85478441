"""A schedule, indexed for interpretation, and where a pass over it stands."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque

from hightide.ir.action import TICK_OPS, Action, ActionKey, Mode, Op, Place, Schedule
from hightide.ir.tier import Lane
from hightide.runtime.schedule.in_flight import LaneWork
from hightide.runtime.waiting.activations import Stash
from hightide.stores.ticket import Ticket


class Program:
    """Built once per schedule; a pass only walks it."""

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


class Pass:
    def __init__(self, program: Program, first_due: int = 0) -> None:
        """`first_due`: ticks of all passes before it. So what one of them has left over for this one, and what this one
        asks for, can be compared."""
        self.first_due = first_due
        self.cursor = 0  # the tick that the plan expects next
        self.tickets: dict[ActionKey, Ticket] = {}
        self.buffers: dict[ActionKey, Place | None] = {}  # of READs that were issued: which they fill
        self.works: dict[ActionKey, LaneWork] = {}  # of tables on the host: what a block has left to be done
        self.stashes: dict[ActionKey, Stash] = {}  # on their way to host, by the action that takes them there
        self.summed: set[int] = set()  # chunks to whose gradients it has added
        self.is_going_back = False  # a block has begun its backward, whether it adds to gradients or not
        self.backward_begun = False
        self.backward_ended = False
        self.is_agreed = False  # of several ranks: which parameters have gradients, those of plain autograd too
        self.load(program)

    @property
    def is_cut_off(self) -> bool:
        """Its backward has ended with an exception, between two ticks, or added to no gradients."""
        return (self.is_going_back or self.backward_begun) and not self.backward_ended

    def load(self, program: Program) -> None:
        """Starts, or goes on after forward, with a program; what was issued already stays issued. But what was read
        ahead from disk into a buffer that is now for something else is read again."""
        self.program = program
        for action in program.by_lane[Lane.DISK_READ]:
            if self.buffers.get(action.id, action.target) != action.target:
                del self.tickets[action.id]
        tickets, lanes = self.tickets, [actions for actions in program.by_lane.values() if actions]
        if not tickets:
            self.pending = [deque(actions) for actions in lanes]
        else:
            self.pending = [deque([one for one in actions if one.id not in tickets]) for actions in lanes]
