"""What surely happens before what, whatever the lanes' speeds.

Three things order two actions: a dependency, the order of a lane that works in order, and the tick that must have
been left before an action is issued. For every action we keep how far each in-order lane has surely come when it
starts (a vector clock), and on other lanes which actions are surely done (a bit set)."""

from __future__ import annotations

from collections import deque

from hightide.ir.action import TICK_OPS, Action, Schedule
from hightide.ir.tier import LANE_RULES, Lane, Rule

_IN_ORDER = tuple(lane for lane in Lane if LANE_RULES[lane] is Rule.IN_ORDER)
_OTHERS = len(_IN_ORDER)  # stands for all lanes that do not
assert _OTHERS == 3, "_clock has a number for each"
_NUMBERS = {lane: _IN_ORDER.index(lane) if lane in _IN_ORDER else _OTHERS for lane in Lane}


class Disorder(Exception):
    """The schedule cannot run: an unknown id, an id given twice, or actions that wait for each other."""

    def __init__(self, message: str, at: str) -> None:
        super().__init__(message)
        self.at = at


class Precedence:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._actions = schedule.actions
        self._place = {action.id: place for place, action in enumerate(self._actions)}
        self._lanes = [_NUMBERS[action.lane] for action in self._actions]
        self._rank = self._ranks()
        self._predecessors = self._edges()
        self._clocks: list[tuple[int, int, int, int]] = [(-1, -1, -1, 0)] * len(self._actions)
        self._run()

    def before(self, first: str, second: str) -> bool:
        """Whether `first` has surely ended when `second` starts."""
        before, clock = self._place[first], self._clocks[self._place[second]]
        lane, rank = self._lanes[before], self._rank[before]
        if first == second:
            return False
        return clock[lane] >= rank if lane < _OTHERS else bool(clock[_OTHERS] >> rank & 1)

    def listed_before(self, first: str, second: str) -> bool:
        return self._place[first] < self._place[second]

    def _ranks(self) -> list[int]:
        """On its lane, or among all actions of lanes that do not work in order."""
        counts = [0] * (_OTHERS + 1)
        ranks = []
        for lane in self._lanes:
            ranks.append(counts[lane])
            counts[lane] += 1
        return ranks

    def _edges(self) -> list[list[int]]:
        if len(self._place) != len(self._actions):
            twice = next(a.id for place, a in enumerate(self._actions) if self._place[a.id] != place)
            raise Disorder(f"the id {twice} is given to two actions", twice)
        ticks = self._schedule.ticks
        latest: list[int | None] = [None] * _OTHERS
        edges: list[list[int]] = []
        for place, action in enumerate(self._actions):
            before = [self._known(name, action) for name in action.after]
            if action.opens >= len(ticks):
                raise Disorder(f"{action.id} opens after tick {action.opens}; the last is {len(ticks) - 1}", action.id)
            if action.opens >= 0 and action.op not in TICK_OPS:
                before.append(self._place[ticks[action.opens].id])
            lane = self._lanes[place]
            if lane < _OTHERS:
                previous = latest[lane]
                before += [] if previous is None else [previous]
                latest[lane] = place
            edges.append(before)
        return edges

    def _known(self, name: str, action: Action) -> int:
        if name not in self._place:
            raise Disorder(f"{action.id} waits for {name}, which is not in the schedule", action.id)
        return self._place[name]

    def _run(self) -> None:
        followers: list[list[int]] = [[] for _ in self._actions]
        missing = [len(before) for before in self._predecessors]
        for place, before in enumerate(self._predecessors):
            for other in before:
                followers[other].append(place)
        ready = deque(place for place, count in enumerate(missing) if count == 0)
        num_run = 0
        while ready:
            place = ready.popleft()
            self._clocks[place] = self._clock(place)
            num_run += 1
            for follower in followers[place]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    ready.append(follower)
        if num_run < len(self._actions):
            stuck = [self._actions[place].id for place, count in enumerate(missing) if count]
            raise Disorder(f"actions wait for each other, {len(stuck)} in all: {', '.join(stuck[:6])}", stuck[0])

    def _clock(self, place: int) -> tuple[int, int, int, int]:
        first = second = third = -1  # how far the lanes that work in order have come
        done = 0
        for other in self._predecessors[place]:
            one, two, three, bits = self._clocks[other]
            lane, rank = self._lanes[other], self._rank[other]
            done |= bits
            if lane == 0:
                one = rank if rank > one else one
            elif lane == 1:
                two = rank if rank > two else two
            elif lane == 2:
                three = rank if rank > three else three
            else:
                done |= 1 << rank
            first = one if one > first else first
            second = two if two > second else second
            third = three if three > third else third
        return first, second, third, done
