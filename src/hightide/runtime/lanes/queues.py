"""Queues in front of the lanes: tasks, which of them is next, and the records of what was done.

[Note: collectives in one order] Over NCCL each lane has a communicator of its own, whose kernels wait on the GPU for
those of other ranks. CUDA does not promise that two streams go on side by side: they share queues of the hardware, and
whoever frees memory or loads a kernel may wait for all of them. If one rank had issued a gather before an average, and
another the average before the gather, each could hold up what the other waits for, for ever. So there lanes issue
collectives in the order in which they were submitted, which is the same on all ranks. On the GPU they may still run
beside each other. Over gloo it is a lane's thread that waits, and no lane holds up another.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

import torch

from hightide.ir.tier import Lane
from hightide.process.forks import Birthplace
from hightide.stores.ticket import Ticket

KEPT_PASSES = 4  # records of older passes are dropped, unless `SharedState.kept_pass` keeps them


class LaneRecord(NamedTuple):
    """One action that was completed. `ready` names what a DUE_FIRST lane could choose from, itself included."""

    pass_index: int  # the pass that submitted it, even if it ended in the next
    lane: Lane
    id: str
    started_s: float
    ended_s: float
    ready: tuple[str, ...] = ()
    ready_dues: tuple[int, ...] = ()  # of the actions in `ready`, in the same order
    due: int = 0
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # its begin and end on the GPU, while recording
    gpu_bytes: tuple[int, int] | None = None  # in use at its begin and end, of a tick, while recording
    num_bytes: int = 0  # that it has moved


@dataclass(eq=False, slots=True)
class Task:
    id: str
    lane: Lane
    due: int
    order: int
    pass_index: int
    ticket: Ticket
    run: Callable[[], object]
    after: Sequence[Ticket] = ()
    num_pending: int = 0
    ready: tuple[str, ...] = ()
    ready_dues: tuple[int, ...] = ()


class Bell:
    """Wakes the one thread that waits for it; at once, if it was rung meanwhile. A bare lock: a Condition makes another
    one for each wait, and a dozen calls."""

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        try:  # noqa: SIM105 (each wake counts)
            self._silent.release()
        except RuntimeError:  # it was rung already; to ask first would not do: a finaliser may ring in between
            pass

    def wait(self, timeout_s: float = -1) -> None:
        """Not under the state's lock. -1: as long as it takes."""
        self._silent.acquire(timeout=timeout_s)


class SharedState:
    """What the lanes share. One lock: a lane's work takes far longer than any of its bookkeeping."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.bells: list[Bell] = []
        self.failure: BaseException | None = None
        self.closing = False
        self.birthplace = Birthplace()
        self.pass_index = 0
        self.records: dict[int, list[LaneRecord]] = {0: []}
        self.num_kept = KEPT_PASSES
        self.kept_pass: int | None = None  # it and those shortly before it stay, whatever follows
        self.excused_s = -math.inf  # a monotonic time; see Lanes.excuse
        self.orders = itertools.count()
        self.num_taken = 0  # tasks that lanes have begun

    def begin_pass(self) -> int:
        with self.lock:
            self.pass_index += 1
            self.records[self.pass_index] = []
            recent = [end for end in (self.pass_index, self.kept_pass) if end is not None]
            self.records = {
                index: records
                for index, records in self.records.items()
                if any(end - self.num_kept < index <= end for end in recent)
            }
            return self.pass_index

    def record(self, record: LaneRecord) -> None:
        """Without the lock: a list takes an entry at once, and nobody else takes any away."""
        records = self.records.get(record.pass_index)
        if records is not None:
            records.append(record)

    def fail(self, error: BaseException) -> None:
        with self.lock:
            if self.failure is None:
                self.failure = error
            self._wake_all()

    def stop(self) -> None:
        with self.lock:
            self.closing = True
            self._wake_all()

    def end(self, task: Task) -> BaseException | None:
        """The error with which a queued task must end unrun, if any."""
        if self.failure is not None:
            return self.failure
        if self.closing:
            return RuntimeError(f"{task.id!r} was queued on the lane {task.lane} when the lanes were closed")
        return None

    def _wake_all(self) -> None:
        for bell in self.bells:
            bell.ring()


class Watcher:
    """Fences that something on the host waits for, in the order in which they were set: so they pass."""

    def __init__(self, state: SharedState) -> None:
        self.state = state
        self._bell = Bell()
        state.bells.append(self._bell)
        self._watched: list[tuple[int, int, Ticket, Callable[[], object]]] = []
        self._orders = itertools.count()

    def watch(self, ticket: Ticket, then: Callable[[], object]) -> None:
        with self.state.lock:
            number = ticket.fence.number if ticket.fence is not None else 0
            heapq.heappush(self._watched, (number, next(self._orders), ticket, then))
            self._bell.ring()

    def take(self) -> tuple[Ticket, Callable[[], object]] | None:
        """Blocks for the next one. None: closed."""
        while True:
            with self.state.lock:
                if self._watched:
                    return heapq.heappop(self._watched)[2:]
                if self.state.closing:
                    return None
            self._bell.wait()  # idle: nobody waits for it; watch and close wake it


class Queue:
    """Tasks of one lane. Subclasses say which one is next."""

    _tasks: Sized

    def __init__(self, state: SharedState, timeout_s: float) -> None:
        self.state = state
        self.timeout_s = timeout_s
        self.watcher: Watcher | None = None  # for a lane that works on the host
        self.is_at_work = False  # the lane has taken a task, and not come back for the next
        self._bell = Bell()
        state.bells.append(self._bell)

    def __len__(self) -> int:
        return len(self._tasks)

    def _push(self, task: Task) -> None:
        raise NotImplementedError

    def _became_ready(self, task: Task) -> None:
        """Wakes the lane only if there is something to do: each wake takes Python's lock from the thread that issues
        work."""
        raise NotImplementedError

    def _has_ready(self) -> bool:
        """Whether there is a task to run now."""
        raise NotImplementedError

    def _pop_ready(self) -> Task | None:
        """The task to run now, if there is one."""
        raise NotImplementedError

    def _pop_first(self) -> Task:
        """The task that has to go first when nothing is ready."""
        raise NotImplementedError

    def add(self, task: Task, after: Sequence[Ticket]) -> None:
        waits_for = self._pending(after)
        with self.state.lock:
            task.after, task.num_pending = after, len(waits_for)
            self._push(task)
            if not waits_for:
                self._became_ready(task)
        for ticket in waits_for:  # outside the lock: a callback may be called at once
            ticket.add_done_callback(lambda done: self._when_through(task, done))

    def _pending(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Each is asked before its fence, which is there before it is done."""
        awaits_fences = self.watcher is not None
        return [
            ticket
            for ticket in tickets
            if not ticket.done or ticket.error is not None or (awaits_fences and ticket.fence is not None)
        ]

    def _when_through(self, task: Task, ticket: Ticket) -> None:
        """See [Note: enqueued and through]."""
        if self.watcher is None or ticket.fence is None or ticket.error is not None:
            self._dependency_done(task, ticket)
        else:
            self.watcher.watch(ticket, lambda: self._dependency_done(task, ticket))

    @property
    def is_idle(self) -> bool:
        """Nothing is done, and nothing could be. Under the state's lock."""
        return not self.is_at_work and not self._has_ready()

    def take(self) -> tuple[Task, BaseException | None] | None:
        """Blocks for the next task, and the error with which it must end instead of running. None: closed and empty."""
        waiting_since_s: float | None = None
        self.is_at_work = False
        while True:
            with self.state.lock:
                if not self._tasks:
                    if self.state.closing:
                        return None
                    # Idle: nobody waits for this lane; what is ready wakes it, and close. What never gets ready has its
                    # time from the next look on.
                    waiting_since_s, left_s = None, self.timeout_s
                elif self.state.failure is not None or self.state.closing:
                    task = self._pop_first()
                    return task, self.state.end(task)
                elif (ready := self._pop_ready()) is not None:
                    self.is_at_work = True
                    self.state.num_taken += 1
                    return ready, None
                else:
                    now_s = time.monotonic()
                    waiting_since_s = now_s if waiting_since_s is None else waiting_since_s
                    left_s = max(waiting_since_s, self.state.excused_s) + self.timeout_s - now_s
                    if left_s <= 0:
                        task = self._pop_first()
                        error = self._timeout(task)
                        self.state.fail(error)
                        return task, error
            self._bell.wait(left_s)

    def _dependency_done(self, task: Task, ticket: Ticket) -> None:
        if ticket.error is not None:
            self.state.fail(ticket.error)
            return
        with self.state.lock:
            task.num_pending -= 1
            if task.num_pending == 0:
                self._became_ready(task)

    def _timeout(self, task: Task) -> TimeoutError:
        missing = ", ".join(repr(ticket.label) for ticket in self._pending(task.after))
        return TimeoutError(f"{task.id!r} on the lane {task.lane} waited {self.timeout_s:g} s for {missing}")


class InOrder(Queue):
    def __init__(self, state: SharedState, timeout_s: float) -> None:
        super().__init__(state, timeout_s)
        self._tasks: deque[Task] = deque()

    def _push(self, task: Task) -> None:
        self._tasks.append(task)

    def _became_ready(self, task: Task) -> None:
        if self._has_ready():  # only the head counts
            self._bell.ring()

    def _has_ready(self) -> bool:
        return bool(self._tasks) and self._tasks[0].num_pending == 0

    def _pop_ready(self) -> Task | None:
        return self._tasks.popleft() if self._has_ready() else None

    def _pop_first(self) -> Task:
        return self._tasks.popleft()


class Turns:
    """Tasks that are not run yet, of several lanes and of all models, in the order in which they were submitted."""

    def __init__(self) -> None:
        self.bells: WeakSet[Bell] = WeakSet()  # of these lanes
        self._lock = threading.Lock()
        self._tasks: list[Task] = []

    def add(self, task: Task) -> None:
        with self._lock:
            self._tasks.append(task)

    def is_first(self, task: Task) -> bool:
        with self._lock:
            return self._tasks[0] is task

    def is_over(self, task: Task) -> None:
        with self._lock:
            self._tasks.remove(task)
            bells = list(self.bells)
        for bell in bells:
            bell.ring()


class InTurn(InOrder):
    """Of a lane that takes turns with others: a task waits until all that were submitted before it have been run, on
    whichever. See [Note: collectives in one order]."""

    def __init__(self, state: SharedState, timeout_s: float, turns: Turns) -> None:
        super().__init__(state, timeout_s)
        self._turns, self._taken = turns, deque[Task]()
        turns.bells.add(self._bell)

    def _push(self, task: Task) -> None:
        super()._push(task)
        self._turns.add(task)

    def _has_ready(self) -> bool:
        return super()._has_ready() and self._turns.is_first(self._tasks[0])

    def _pop_first(self) -> Task:
        self._taken.append(super()._pop_first())
        return self._taken[-1]

    def _pop_ready(self) -> Task | None:
        return self._pop_first() if self._has_ready() else None

    def take(self) -> tuple[Task, BaseException | None] | None:
        while self._taken:  # it has been run, or was given an error
            self._turns.is_over(self._taken.popleft())
        return super().take()


class DueFirst(Queue):
    def __init__(self, state: SharedState, timeout_s: float) -> None:
        super().__init__(state, timeout_s)
        self._tasks: dict[int, Task] = {}  # by order of submission
        self._heap: list[tuple[int, int]] = []  # (due, order) of the ready ones
        # The ready ones again, as dicts whose values are copied into a record at C speed: 1,000 may be ready at a time.
        self._ready_ids: dict[int, str] = {}
        self._ready_dues: dict[int, int] = {}

    def _push(self, task: Task) -> None:
        self._tasks[task.order] = task

    def _became_ready(self, task: Task) -> None:
        if task.order in self._tasks:  # else it ended with an error already
            heapq.heappush(self._heap, (task.due, task.order))
            self._ready_ids[task.order] = task.id
            self._ready_dues[task.order] = task.due
            self._bell.ring()

    def _has_ready(self) -> bool:
        return bool(self._heap)

    def _pop_ready(self) -> Task | None:
        if not self._heap:
            return None
        task = self._tasks.pop(heapq.heappop(self._heap)[1])
        task.ready, task.ready_dues = tuple(self._ready_ids.values()), tuple(self._ready_dues.values())
        del self._ready_ids[task.order], self._ready_dues[task.order]
        return task

    def _pop_first(self) -> Task:
        """Only on the way to an end with an error: nothing is picked from the heap after it."""
        return self._tasks.pop(next(iter(self._tasks)))


def queue_for(lane: Lane, state: SharedState, timeout_s: float) -> Queue:
    return (InOrder if lane.is_in_order else DueFirst)(state, timeout_s)
