"""The time that a schedule takes: the same actions, lanes and picking rules as the executor's, on a machine's speeds.

Lanes that copy and the lane that updates share host memory, so how fast each is depends on which others are busy: time
goes from event to event, and what is under way progresses at the speeds of that moment. Several passes run one after
the other, because updates reach into the next pass; the last one tells the steady state."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hightide.ir.action import TICK_OPS, Action, Schedule
from hightide.ir.machine import Machine
from hightide.ir.tier import Lane

NUM_PASSES = 4
EPSILON_S = 1e-12


class Span(NamedTuple):
    """One action, done."""

    pass_index: int
    lane: Lane
    id: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulated:
    begin_s: float  # of the last pass: when the one before had ended on the compute lane
    step_s: float  # from there to its own end
    spans: tuple[Span, ...]  # of all the last pass's actions, by start; some end after it, as if nothing followed
    beside: tuple[Span, ...]  # of the pass before, what reached into the last, by start
    stall_s: dict[Lane, float]  # in the last pass: how long compute waited, by the lane it waited for last
    busy_s: dict[Lane, float]  # within the last pass's time, whatever pass the work belongs to


def simulate(
    schedule: Schedule, seconds: Callable[[Action], float], machine: Machine, num_passes: int = NUM_PASSES
) -> Simulated:
    """`seconds`: how long an action of the compute lane takes."""
    clock = _Clock(schedule, seconds, machine)
    ends_s = [clock.run_pass() for _ in range(num_passes)]
    clock.drain()
    last = num_passes - 1
    begin_s = ends_s[-2] if num_passes > 1 else 0.0
    by_start = sorted(clock.spans, key=lambda span: span.start_s)
    busy = dict.fromkeys(Lane, 0.0)
    for span in by_start:
        busy[span.lane] += max(0.0, min(span.end_s, ends_s[-1]) - max(span.start_s, begin_s))
    spans = tuple(span for span in by_start if span.pass_index == last)
    beside = tuple(span for span in by_start if span.pass_index < last and span.end_s > begin_s)
    return Simulated(begin_s, ends_s[-1] - begin_s, spans, beside, dict(clock.stall_s[last]), busy)


def simulated_step_s(
    schedule: Schedule, seconds: Callable[[Action], float], machine: Machine, num_passes: int
) -> float:
    """Only how long the last pass takes."""
    clock = _Clock(schedule, seconds, machine)
    ends_s = [0.0, *(clock.run_pass() for _ in range(num_passes))]
    return ends_s[-1] - ends_s[-2]


_COMPUTE = 0  # the first lane


class _Graph:
    """Who waits for whom, by position in the schedule: in the same pass, and in the next. Lanes are numbers here: their
    places in `lanes`, which has those of the schedule."""

    def __init__(self, schedule: Schedule) -> None:
        actions = schedule.actions
        place = {action.id: at for at, action in enumerate(actions)}
        ticks = [at for at, action in enumerate(actions) if action.op in TICK_OPS]
        is_tick = set(ticks)
        used = {Lane.COMPUTE, *(action.lane for action in actions)}
        self.lanes = [lane for lane in Lane if lane in used]
        number = {lane: at for at, lane in enumerate(self.lanes)}
        self.lane = [number[action.lane] for action in actions]
        self.is_in_order = [action.lane.is_in_order for action in actions]
        self.now: list[list[int]] = [[] for _ in actions]  # followers in the same pass
        self.next: list[list[int]] = [[] for _ in actions]  # in the next pass
        self.missing = [0] * len(actions)  # how many it waits for in the same pass
        self.missing_prev = [0] * len(actions)  # and in the pass before
        self.causes: list[tuple[list[int], list[int]]] = []  # its `after`s in the same pass and in the one before
        for at, action in enumerate(actions):
            before = [place[name] for name in action.after]
            earlier = [place[name] for name in action.after_prev if name in place]
            self.causes.append((before, earlier))
            if at not in is_tick and action.opens >= 0:
                before = [*before, ticks[action.opens]]
            elif at not in is_tick:  # a pass begins when the one before has ended on the compute lane
                earlier = [*earlier, ticks[-1]]
            for one in before:
                self.now[one].append(at)
            for one in earlier:
                self.next[one].append(at)
            self.missing[at], self.missing_prev[at] = len(before), len(earlier)


@dataclass(slots=True)
class _Running:
    index: int  # of the pass
    at: int  # position in the schedule
    lane: int
    start_s: float
    left: float  # seconds on the compute lane, bytes elsewhere
    latency_s: float


class _Clock:
    def __init__(self, schedule: Schedule, seconds: Callable[[Action], float], machine: Machine) -> None:
        self._actions = schedule.actions
        self._graph = _Graph(schedule)
        self._num_ticks = len(schedule.ticks)
        self._work = [
            seconds(action) if action.lane is Lane.COMPUTE else float(action.num_bytes) for action in schedule.actions
        ]
        self._machine = machine
        self._speeds: dict[int, tuple[float, ...]] = {}  # by the lanes that move bytes, as bits
        self.now_s = 0.0
        self.spans: list[Span] = []
        self.stall_s: dict[int, dict[Lane, float]] = defaultdict(lambda: defaultdict(float))
        self._index = -1
        self._missing: list[list[int]] = []  # by pass
        self._ended_s: list[list[float | None]] = []
        lanes = self._graph.lanes
        self._latency_s = [machine.latency_s if lane.has_latency else 0.0 for lane in lanes]
        self._queues: tuple[deque[tuple[int, int]], ...] = tuple(deque() for _ in lanes)  # of lanes that work in order
        self._heaps: tuple[list[tuple[int, int, int]], ...] = tuple([] for _ in lanes)  # of the others
        self._running: list[_Running | None] = [None] * len(lanes)
        self._compute_free_s = 0.0

    def run_pass(self) -> float:
        """Until the pass's last compute action is done. What other lanes still have to do goes on in the next."""
        self._begin_pass()
        while self._queues[_COMPUTE] or self._running[_COMPUTE]:
            self._start_all()
            self._advance()
        return self.now_s

    def drain(self) -> None:
        """Until the other lanes are through too."""
        while any(self._running) or any(self._queues) or any(self._heaps):
            self._start_all()
            self._advance()

    def _begin_pass(self) -> None:
        graph, index = self._graph, self._index + 1
        self._index = index
        missing = list(graph.missing)
        if index:
            for at, count in enumerate(graph.missing_prev):
                missing[at] += count
            for one, ended_s in enumerate(self._ended_s[index - 1]):
                if ended_s is not None:
                    for at in graph.next[one]:
                        missing[at] -= 1
        self._missing.append(missing)
        self._ended_s.append([None] * len(missing))
        for at, lane in enumerate(graph.lane):
            if graph.is_in_order[at]:
                self._queues[lane].append((index, at))
            elif not missing[at]:
                self._push(index, at)

    def _push(self, index: int, at: int) -> None:
        """Onto a lane that takes what is due first, whatever pass it belongs to."""
        due = index * self._num_ticks + self._actions[at].tick
        heapq.heappush(self._heaps[self._graph.lane[at]], (due, index, at))

    def _start_all(self) -> None:
        for lane, running in enumerate(self._running):
            if running is not None:
                continue
            queue, heap = self._queues[lane], self._heaps[lane]
            if queue:
                index, at = queue[0]
                if not self._missing[index][at]:
                    queue.popleft()
                    self._start(lane, index, at)
            elif heap:
                _, index, at = heapq.heappop(heap)
                self._start(lane, index, at)

    def _start(self, lane: int, index: int, at: int) -> None:
        if lane == _COMPUTE and self.now_s - self._compute_free_s > EPSILON_S:
            self._note_stall(index, at)
        self._running[lane] = _Running(index, at, lane, self.now_s, self._work[at], self._latency_s[lane])

    def _note_stall(self, index: int, at: int) -> None:
        """By the lane of what it waited for last."""
        latest_s, lane = -1.0, Lane.COMPUTE
        for back, causes in enumerate(self._graph.causes[at]):
            for one in causes:
                ended_s = self._ended_s[index - back][one] if index >= back else None
                if ended_s is not None and ended_s > latest_s:
                    latest_s, lane = ended_s, self._graph.lanes[self._graph.lane[one]]
        self.stall_s[index][lane] += self.now_s - self._compute_free_s

    def _advance(self) -> None:
        running = [one for one in self._running if one is not None]
        if not running:
            stuck = [self._actions[queue[0][1]].id for queue in self._queues if queue]
            raise RuntimeError(f"the schedule locks up at {', '.join(stuck)}; verify it before it is simulated")
        moving = 0
        for one in running:
            if one.latency_s <= 0.0:
                moving |= 1 << one.lane
        speeds = self._speeds.get(moving) or self._speeds_of(moving)
        step_s = math.inf
        for one in running:
            end_s = one.latency_s if one.latency_s > 0.0 else one.left / speeds[one.lane]
            if end_s < step_s:
                step_s = end_s
        self.now_s += step_s
        for one in running:
            if one.latency_s > 0.0:
                one.latency_s = one.latency_s - step_s if one.latency_s - step_s > EPSILON_S else 0.0
                continue
            speed = speeds[one.lane]
            one.left -= step_s * speed
            if one.left <= EPSILON_S * (speed if speed > 1.0 else 1.0):
                self._end(one)

    def _speeds_of(self, moving: int) -> tuple[float, ...]:
        """Of all lanes; the compute lane's work is seconds."""
        lanes = self._graph.lanes
        known = self._machine.speeds_of({lane for at, lane in enumerate(lanes) if moving >> at & 1 and at != _COMPUTE})
        self._speeds[moving] = tuple(known.get(lane, 1.0) for lane in lanes)
        return self._speeds[moving]

    def _end(self, one: _Running) -> None:
        graph = self._graph
        self._running[one.lane] = None
        self._ended_s[one.index][one.at] = self.now_s
        self.spans.append(Span(one.index, graph.lanes[one.lane], self._actions[one.at].id, one.start_s, self.now_s))
        if one.lane == _COMPUTE:
            self._compute_free_s = self.now_s
        for index, followers in ((one.index, graph.now[one.at]), (one.index + 1, graph.next[one.at])):
            if index > self._index:
                continue  # counted when that pass begins
            missing = self._missing[index]
            for at in followers:
                missing[at] -= 1
                if not missing[at] and not graph.is_in_order[at]:
                    self._push(index, at)
