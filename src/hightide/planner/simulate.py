"""The time that a schedule takes: the same actions, lanes and picking rules as the executor's, on a machine's speeds.

Lanes that copy and the lane that updates share host memory, so how fast each is depends on which others are busy: time
goes from event to event, and what is under way progresses at the speeds of that moment. Several passes run one after
the other, because updates reach into the next pass; the last one tells the steady state."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from hightide.ir.action import TICK_OPS, Action, Schedule
from hightide.ir.machine import Machine
from hightide.ir.tier import LANE_RULES, Lane, Rule

NUM_PASSES = 4
EPSILON_S = 1e-12


@dataclass(frozen=True)
class Span:
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


class _Graph:
    """Who waits for whom, by position in the schedule: in the same pass, and in the next."""

    def __init__(self, schedule: Schedule) -> None:
        actions = schedule.actions
        place = {action.id: at for at, action in enumerate(actions)}
        last_tick = place[schedule.ticks[-1].id]
        self.lanes = [action.lane for action in actions]
        self.now: list[list[int]] = [[] for _ in actions]  # followers in the same pass
        self.next: list[list[int]] = [[] for _ in actions]  # in the next pass
        self.missing = [0] * len(actions)  # how many it waits for in the same pass
        self.missing_prev = [0] * len(actions)  # and in the pass before
        self.causes: list[list[tuple[int, int]]] = [[] for _ in actions]  # (0 or -1 passes, position): its `after`s
        for at, action in enumerate(actions):
            before = [place[name] for name in action.after]
            earlier = [place[name] for name in action.after_prev if name in place]
            self.causes[at] = [(0, one) for one in before] + [(-1, one) for one in earlier]
            if action.op not in TICK_OPS and action.opens >= 0:
                before.append(place[schedule.ticks[action.opens].id])
            elif action.op not in TICK_OPS:  # a pass begins when the one before has ended on the compute lane
                earlier.append(last_tick)
            for one in before:
                self.now[one].append(at)
            for one in earlier:
                self.next[one].append(at)
            self.missing[at], self.missing_prev[at] = len(before), len(earlier)


@dataclass(slots=True)
class _Running:
    index: int  # of the pass
    at: int  # position in the schedule
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
        self.now_s = 0.0
        self.spans: list[Span] = []
        self.stall_s: dict[int, dict[Lane, float]] = defaultdict(lambda: defaultdict(float))
        self._index = -1
        self._missing: list[list[int]] = []  # by pass
        self._ended_s: list[list[float | None]] = []
        self._queues: dict[Lane, deque[tuple[int, int]]] = {
            lane: deque() for lane in Lane if LANE_RULES[lane] is Rule.IN_ORDER
        }
        self._heaps: dict[Lane, list[tuple[int, int, int]]] = {lane: [] for lane in Lane if lane not in self._queues}
        self._running: dict[Lane, _Running] = {}
        self._compute_free_s = 0.0

    def run_pass(self) -> float:
        """Until the pass's last compute action is done. What other lanes still have to do goes on in the next."""
        self._begin_pass()
        while self._queues[Lane.COMPUTE] or Lane.COMPUTE in self._running:
            self._start_all()
            self._advance()
        return self.now_s

    def drain(self) -> None:
        """Until the other lanes are through too."""
        while self._running or any(self._queues.values()) or any(self._heaps.values()):
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
        for at, lane in enumerate(graph.lanes):
            if lane in self._queues:
                self._queues[lane].append((index, at))
            elif not missing[at]:
                self._push(index, at)

    def _push(self, index: int, at: int) -> None:
        """Onto a lane that takes what is due first, whatever pass it belongs to."""
        due = index * self._num_ticks + self._actions[at].tick
        heapq.heappush(self._heaps[self._graph.lanes[at]], (due, index, at))

    def _start_all(self) -> None:
        for lane in Lane:
            if lane in self._running:
                continue
            if lane in self._queues:
                queue = self._queues[lane]
                if queue and not self._missing[queue[0][0]][queue[0][1]]:
                    self._start(lane, *queue.popleft())
            elif self._heaps[lane]:
                _, index, at = heapq.heappop(self._heaps[lane])
                self._start(lane, index, at)

    def _start(self, lane: Lane, index: int, at: int) -> None:
        if lane is Lane.COMPUTE and self.now_s - self._compute_free_s > EPSILON_S:
            self._note_stall(index, at)
        latency_s = self._machine.latency_s if lane in (Lane.H2D, Lane.D2H) else 0.0
        self._running[lane] = _Running(index, at, self.now_s, self._work[at], latency_s)

    def _note_stall(self, index: int, at: int) -> None:
        """By the lane of what it waited for last."""
        latest_s, lane = -1.0, Lane.COMPUTE
        for back, one in self._graph.causes[at]:
            ended_s = self._ended_s[index + back][one] if index + back >= 0 else None
            if ended_s is not None and ended_s > latest_s:
                latest_s, lane = ended_s, self._graph.lanes[one]
        self.stall_s[index][lane] += self.now_s - self._compute_free_s

    def _advance(self) -> None:
        if not self._running:
            stuck = [self._actions[queue[0][1]].id for queue in self._queues.values() if queue]
            raise RuntimeError(f"the schedule locks up at {', '.join(stuck)}; verify it before it is simulated")
        moving = {lane for lane, one in self._running.items() if lane is not Lane.COMPUTE and one.latency_s <= 0.0}
        speeds = self._machine.speeds_of(moving) if moving else {}
        step_s = min(
            one.latency_s if one.latency_s > 0.0 else one.left / speeds.get(lane, 1.0)
            for lane, one in self._running.items()
        )
        self.now_s += step_s
        for lane, one in list(self._running.items()):
            if one.latency_s > 0.0:
                one.latency_s = one.latency_s - step_s if one.latency_s - step_s > EPSILON_S else 0.0
                continue
            speed = speeds.get(lane, 1.0)
            one.left -= step_s * speed
            if one.left <= EPSILON_S * max(1.0, speed):
                self._end(lane, one)

    def _end(self, lane: Lane, one: _Running) -> None:
        del self._running[lane]
        self._ended_s[one.index][one.at] = self.now_s
        self.spans.append(Span(one.index, lane, self._actions[one.at].id, one.start_s, self.now_s))
        if lane is Lane.COMPUTE:
            self._compute_free_s = self.now_s
        for index, followers in ((one.index, self._graph.now), (one.index + 1, self._graph.next)):
            if index > self._index:
                continue  # counted when that pass begins
            for at in followers[one.at]:
                self._missing[index][at] -= 1
                if not self._missing[index][at] and self._graph.lanes[at] in self._heaps:
                    self._push(index, at)
