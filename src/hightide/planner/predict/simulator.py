"""The time that a schedule takes: the same actions, lanes and picking rules as the executor's, on a machine's speeds.

Lanes that copy and the lane that updates share host memory, so how fast each is depends on which others are busy: time
goes from event to event, and what is under way progresses at the speeds of that moment. Several steps run one after
the other, because updates reach into the next; the last one tells the steady state. Of many equal passes in a step
the second stands for the rest."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from hightide.ir.action import TICK_OPS, Action, ActionKey, Op, Schedule
from hightide.ir.machine import Machine
from hightide.ir.passes import Passes
from hightide.ir.tier import COLLECTIVES, Lane

NUM_STEPS = 4  # of one pass each; of several, so that there are about as many passes
EPSILON_S = 1e-12


class Span(NamedTuple):
    """One action, done."""

    pass_index: int
    lane: Lane
    id: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PassTime:
    """One simulated pass of a step."""

    index: int
    schedule: Schedule
    weight: int  # so many passes of the step it stands for
    begin_s: float  # when the one before had ended on the compute lane
    end_s: float


@dataclass(frozen=True)
class Simulated:
    """The last step."""

    passes: tuple[PassTime, ...]
    spans: tuple[Span, ...]  # of all its actions, by start; some end after it, as if nothing followed
    beside: tuple[Span, ...]  # of the step before, what reached into the last, by start
    stall_s: dict[Lane, float]  # how long compute waited, by the lane it waited for last
    busy_s: dict[Lane, float]  # within the step's time, whatever step the work belongs to

    @property
    def begin_s(self) -> float:
        """When the step before had ended on the compute lane."""
        return self.passes[0].begin_s

    @property
    def step_s(self) -> float:
        return sum(one.weight * (one.end_s - one.begin_s) for one in self.passes)

    @property
    def action_s(self) -> dict[Lane, float]:
        """How long each lane works for the step's own actions."""
        weights = {one.index: one.weight for one in self.passes}
        seconds = dict.fromkeys(Lane, 0.0)
        for span in self.spans:
            seconds[span.lane] += weights[span.pass_index] * (span.end_s - span.start_s)
        return seconds


def simulate(
    schedule: Schedule | Passes, seconds: Callable[[Action], float], machine: Machine, num_steps: int = NUM_STEPS
) -> Simulated:
    """`seconds`: how long an action of the compute lane takes, or a collective alone."""
    order = _order(Passes.of(schedule))
    clock = _Clock([one for one, _ in order], seconds, machine)
    num_steps = max(2, num_steps // len(order)) if num_steps > 1 else 1
    passes: list[PassTime] = []
    for index, (following, weight) in enumerate(order * num_steps):
        begin_s = clock.now_s
        passes.append(PassTime(index, following, weight, begin_s, clock.run_pass(following)))
    clock.drain()
    passes = passes[-len(order) :]
    first = passes[0].index
    by_start = sorted(clock.spans(), key=lambda span: span.start_s)
    busy, stall = dict.fromkeys(Lane, 0.0), dict.fromkeys(Lane, 0.0)
    for one in passes:
        for span in by_start:
            busy[span.lane] += one.weight * max(0.0, min(span.end_s, one.end_s) - max(span.start_s, one.begin_s))
        for lane, waited_s in clock.stall_s[one.index].items():
            stall[lane] += one.weight * waited_s
    spans = tuple(span for span in by_start if span.pass_index >= first)
    beside = tuple(span for span in by_start if span.pass_index < first and span.end_s > passes[0].begin_s)
    waited = {lane: waited_s for lane, waited_s in stall.items() if waited_s}
    return Simulated(tuple(passes), spans, beside, waited, busy)


def simulated_step_s(
    schedule: Schedule | Passes, seconds: Callable[[Action], float], machine: Machine, num_steps: int
) -> float:
    """Only how long the last step takes. Of several passes, only the last ones of earlier steps are run."""
    order = _order(Passes.of(schedule))
    clock = _Clock([one for one, _ in order], seconds, machine)
    for _ in range(num_steps - 1):
        clock.run_pass(order[-1][0])
    step_s = 0.0
    for one, weight in order:
        begin_s = clock.now_s
        step_s += weight * (clock.run_pass(one) - begin_s)
    return step_s


def _order(passes: Passes) -> list[tuple[Schedule, int]]:
    """What is run of a step, and how many passes each stands for."""
    order = []
    for schedule, count in passes.runs:
        order += [(schedule, 1), (schedule, count - 1)] if count > 1 else [(schedule, count)]
    return order


_COMPUTE = 0  # the first lane
_TIMED = frozenset({Lane.COMPUTE, *COLLECTIVES})  # whose work is seconds: of collectives those alone


class _Graph:
    """Who waits for whom, by position in the schedule. Lanes are numbers here: their places in `lanes`."""

    def __init__(
        self,
        schedule: Schedule,
        lanes: Sequence[Lane],
        outlasting: AbstractSet[ActionKey],
        seconds: Callable[[Action], float],
        first_part: float,
    ) -> None:
        """`outlasting`: those for which later passes wait. `first_part`: see Machine."""
        actions = self.actions = schedule.actions
        place = {action.id: at for at, action in enumerate(actions)}
        ticks = [at for at, action in enumerate(actions) if action.op in TICK_OPS]
        is_tick = set(ticks)
        self.num_ticks = len(ticks)
        number = {lane: at for at, lane in enumerate(lanes)}
        self.lane = [number[action.lane] for action in actions]
        self.is_in_order = [action.lane.is_in_order for action in actions]
        settled = {action.chunk for action in actions if action.op is Op.SETTLE}
        in_parts = {at for at, one in enumerate(actions) if one.op is Op.UPDATE and one.chunk in settled}
        self.work = [
            seconds(one) if one.lane in _TIMED else one.num_bytes * (first_part if at in in_parts else 1.0)
            for at, one in enumerate(actions)
        ]
        self.followers: list[list[int]] = [[] for _ in actions]  # in the same pass
        self.missing = [0] * len(actions)  # how many it waits for in the same pass
        self.causes: list[list[int]] = []  # its `after`s
        self.earlier = [(at, action.after_prev) for at, action in enumerate(actions) if action.after_prev]
        self.outlasting = [(at, action.id) for at, action in enumerate(actions) if action.id in outlasting]
        for at, action in enumerate(actions):
            before = [place[name] for name in action.after]
            self.causes.append(before)
            if at not in is_tick and action.opens >= 0:  # else it waits for the end of compute in the pass before
                before = [*before, ticks[action.opens]]
            for one in before:
                self.followers[one].append(at)
            self.missing[at] = len(before)


Moment = tuple[int, int]  # index of a pass, and position in its schedule


@dataclass(slots=True)
class _Pass:
    graph: _Graph
    missing: list[int]
    ended_s: list[float | None]
    earlier: dict[int, list[Moment]]  # what actions wait for in earlier passes
    followers: dict[int, list[Moment]]  # what waits for it in later passes


@dataclass(slots=True)
class _Running:
    index: int  # of the pass
    at: int  # position in the schedule
    lane: int
    start_s: float
    left: float  # seconds on the compute lane and of collectives, bytes elsewhere
    latency_s: float

    def span(self, lanes: Sequence[Lane], of: _Pass) -> Span:
        """Once it has ended."""
        end_s = of.ended_s[self.at]
        assert end_s is not None
        return Span(self.index, lanes[self.lane], of.graph.actions[self.at].id, self.start_s, end_s)


class _Clock:
    def __init__(self, schedules: Sequence[Schedule], seconds: Callable[[Action], float], machine: Machine) -> None:
        different = {id(schedule): schedule for schedule in schedules}
        actions = [action for schedule in different.values() for action in schedule.actions]
        used = {Lane.COMPUTE, *(action.lane for action in actions)}
        self._lanes = lanes = [lane for lane in Lane if lane in used]
        outlasting = {name for action in actions for name in action.after_prev}
        first_part = machine.first_part or 1.0
        self._graphs = {key: _Graph(one, lanes, outlasting, seconds, first_part) for key, one in different.items()}
        self._machine = machine
        self._speeds: dict[int, tuple[float, ...]] = {}  # by the lanes that move bytes, as bits
        self.now_s = 0.0
        self._done: list[_Running] = []
        self.stall_s: dict[int, dict[Lane, float]] = defaultdict(lambda: defaultdict(float))
        self._passes: list[_Pass] = []
        self._first_dues: list[int] = []  # of passes, in ticks of all of them one after the other
        self._next_due = 0
        self._latest: dict[ActionKey, Moment] = {}  # of those for which later passes wait
        self._latency_s = [machine.latency_s if lane.has_latency else 0.0 for lane in lanes]
        self._queues: tuple[deque[tuple[int, int]], ...] = tuple(deque() for _ in lanes)  # of lanes that work in order
        self._heaps: tuple[list[tuple[int, int, int]], ...] = tuple([] for _ in lanes)  # of the others
        self._running: list[_Running | None] = [None] * len(lanes)
        self._compute_free_s = 0.0

    def run_pass(self, schedule: Schedule) -> float:
        """Until the pass's last compute action is done. What other lanes still have to do goes on in the next."""
        self._begin_pass(self._graphs[id(schedule)])
        while self._queues[_COMPUTE] or self._running[_COMPUTE]:
            self._start_all()
            self._advance()
        return self.now_s

    def spans(self) -> list[Span]:
        """Of all that is done, in the order in which it ended."""
        return [one.span(self._lanes, self._passes[one.index]) for one in self._done]

    def drain(self) -> None:
        """Until the other lanes are through too."""
        while any(self._running) or any(self._queues) or any(self._heaps):
            self._start_all()
            self._advance()

    def _begin_pass(self, graph: _Graph) -> None:
        index, missing = len(self._passes), list(graph.missing)
        waits: dict[int, list[Moment]] = {}
        for at, names in graph.earlier:
            waits[at] = found = [self._latest[name] for name in names if name in self._latest]
            for back, one in found:
                before = self._passes[back]
                if before.ended_s[one] is None:
                    before.followers.setdefault(one, []).append((index, at))
                    missing[at] += 1
        self._passes.append(_Pass(graph, missing, [None] * len(missing), waits, {}))
        self._first_dues.append(self._next_due)
        self._next_due += graph.num_ticks
        for at, name in graph.outlasting:
            self._latest[name] = (index, at)
        for at, lane in enumerate(graph.lane):
            if graph.is_in_order[at]:
                self._queues[lane].append((index, at))
            elif not missing[at]:
                self._push(index, at)

    def _push(self, index: int, at: int) -> None:
        """Onto a lane that takes what is due first, whatever pass it belongs to."""
        graph = self._passes[index].graph
        due = self._first_dues[index] + graph.actions[at].tick
        heapq.heappush(self._heaps[graph.lane[at]], (due, index, at))

    def _start_all(self) -> None:
        for lane, running in enumerate(self._running):
            if running is not None:
                continue
            queue, heap = self._queues[lane], self._heaps[lane]
            if queue:
                index, at = queue[0]
                if not self._passes[index].missing[at]:
                    queue.popleft()
                    self._start(lane, index, at)
            elif heap:
                _, index, at = heapq.heappop(heap)
                self._start(lane, index, at)

    def _start(self, lane: int, index: int, at: int) -> None:
        if lane == _COMPUTE and self.now_s - self._compute_free_s > EPSILON_S:
            self._note_stall(index, at)
        work = self._passes[index].graph.work[at]
        self._running[lane] = _Running(index, at, lane, self.now_s, work, self._latency_s[lane])

    def _note_stall(self, index: int, at: int) -> None:
        """By the lane of what it waited for last."""
        latest_s, lane = -1.0, Lane.COMPUTE
        current = self._passes[index]
        causes = [*((index, one) for one in current.graph.causes[at]), *current.earlier.get(at, ())]
        for back, one in causes:
            before = self._passes[back]
            ended_s = before.ended_s[one]
            if ended_s is not None and ended_s > latest_s:
                latest_s, lane = ended_s, self._lanes[before.graph.lane[one]]
        self.stall_s[index][lane] += self.now_s - self._compute_free_s

    def _advance(self) -> None:
        running = [one for one in self._running if one is not None]
        if not running:
            first = [queue[0] for queue in self._queues if queue]
            stuck = [self._passes[index].graph.actions[at].id for index, at in first]
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
        """Of all lanes; the compute lane's work is seconds, and those of collectives are shares of theirs."""
        lanes = self._lanes
        known = self._machine.speeds_of({lane for at, lane in enumerate(lanes) if moving >> at & 1 and at != _COMPUTE})
        self._speeds[moving] = tuple(known.get(lane, 1.0) for lane in lanes)
        return self._speeds[moving]

    def _end(self, one: _Running) -> None:
        current = self._passes[one.index]
        graph = current.graph
        self._running[one.lane] = None
        current.ended_s[one.at] = self.now_s
        self._done.append(one)
        if one.lane == _COMPUTE:
            self._compute_free_s = self.now_s
        for at in graph.followers[one.at]:
            self._let_go(current, one.index, at)
        for index, at in current.followers.pop(one.at, ()):
            self._let_go(self._passes[index], index, at)

    def _let_go(self, of: _Pass, index: int, at: int) -> None:
        of.missing[at] -= 1
        if not of.missing[at] and not of.graph.is_in_order[at]:
            self._push(index, at)
