"""Lanes: serial queues of work that overlap each other. The only file that creates threads.

[Note: failure in a lane] The first exception of any lane is kept as `failure`. From then on every submission and
every wait of the user's thread raises that very object, and the lanes give it to every task that is still queued
instead of running it. So nothing hangs, nothing runs on half-moved data, and the user sees the cause and not a
consequence.

[Note: enqueued and through] A copying lane is done with an action when it is enqueued on its stream; its fence says
when the GPU is through with it, which may be hundreds of milliseconds later, because the user's thread runs ahead.
Lanes with a stream go on at once, behind the fence. The cpu lane must not choose what is only enqueued (it would then
wait, while finished gradients lie there): its tasks become ready when a fence has passed, of which a thread tells.

[Note: threads of torch] Torch's own threads (OpenMP) would divide every operation of an update among all cores, and
each operation would wait for the slowest; how many there are depends on OMP_NUM_THREADS. So the threads that update
run torch single-threaded and share an update tile by tile. `torch.set_num_threads` counts for the thread that calls
it, but threads that are born later inherit the last call: the thread that makes the lanes therefore repeats its own
number afterwards.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from hightide.ir.tier import LANE_RULES, Lane, Rule
from hightide.stores.ticket import DEFAULT_TIMEOUT_S, Ticket

T = TypeVar("T")

KEPT_PASSES = 4  # records of older passes are dropped
JOIN_TIMEOUT_S = 10.0

WORKERS: dict[Lane, str] = {
    Lane.H2D: "hightide-h2d",  # fetches the next blocks' chunks and inputs while this block computes and others leave
    Lane.D2H: "hightide-d2h",  # takes gradients and block inputs away while the next block computes and others arrive
    Lane.CPU: "hightide-cpu",  # updates chunks on the host while the accelerator computes and both copies run
}
WATCHER = "hightide-fences"  # waits for copies to host, so that the cpu lane can take what is finished
SHARER = "hightide-update"  # works on the same update as the cpu lane, other tiles of it
CORES_FOR_OTHERS = (
    2  # Python's and autograd's threads with what they start, and the two copying lanes, which mostly wait
)


def default_update_threads() -> int:
    """One for each core this process may use, less what the others need."""
    return max(1, len(os.sched_getaffinity(0)) - CORES_FOR_OTHERS)


@dataclass(frozen=True, slots=True)
class Record:
    """One action that was completed. `ready` names what a DUE_FIRST lane could choose from, itself included."""

    pass_index: int  # the pass that submitted it, even if it ended in the next
    lane: Lane
    id: str
    started_s: float
    ended_s: float
    ready: tuple[str, ...] = ()
    ready_dues: tuple[int, ...] = ()  # of the actions in `ready`, in the same order
    due: int = 0


class EventFence:
    """A point in one CUDA stream."""

    __slots__ = ("_device", "_event")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        self._event.record(stream)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class Streams:
    """The CUDA streams, one for each copying lane. Compute runs on the stream that is current in the user's thread, and
    on which everything is allocated. Without a GPU there are none: work is through when it returns."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        if device is not None:
            # Their few short kernels (conversions) go before those of compute, which would hold up the copies behind
            # them.
            self._streams[Lane.H2D] = torch.cuda.Stream(device, priority=-1)  # chunks and inputs arrive
            self._streams[Lane.D2H] = torch.cuda.Stream(device, priority=-1)  # gradients and inputs leave meanwhile

    def fence(self) -> EventFence | None:
        """This moment in the caller's stream."""
        return None if self._device is None else EventFence(torch.cuda.current_stream(self._device))

    @contextmanager
    def lane(self, lane: Lane, after: Sequence[Ticket]) -> Iterator[None]:
        """Inside it, work is enqueued on the lane's stream behind everything that it depends on. The lane without a
        stream works on the host, and waits there."""
        fences = [ticket.fence for ticket in after if ticket.fence is not None]
        if lane not in self._streams:
            for fence in fences:
                fence.synchronize()
            yield
            return
        with torch.cuda.stream(self._streams[lane]):
            for fence in fences:
                fence.join()
            yield


class Lanes:
    """One worker thread each for H2D, D2H and CPU, and those that share the CPU lane's updates. COMPUTE is the caller's
    own thread."""

    def __init__(
        self,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device: torch.device | None = None,
        update_threads: int | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.streams = Streams(device)
        begun = threading.Semaphore(0)
        num_sharing = default_update_threads() if update_threads is None else update_threads
        self.sharers = Sharers(num_sharing, begun, timeout_s)
        self._state = _State()
        self._queues = {lane: _queue_for(lane, self._state, timeout_s) for lane in WORKERS}
        watcher = self._queues[Lane.CPU].watcher = _Watcher(self._state)
        # Threads hold the queues and never this object, so that forgotten lanes are collected and their threads end.
        self._threads = [
            threading.Thread(
                target=_work, args=(self._queues[lane], lane, timeout_s, self.streams, begun), name=name, daemon=True
            )
            for lane, name in WORKERS.items()
        ]
        self._threads.append(threading.Thread(target=_watch, args=(watcher, begun), name=WATCHER, daemon=True))
        self._threads += self.sharers.threads
        # At exit too, and joined: a thread that Python ends in the middle of a torch operation aborts the process.
        ends = (self._state, self.sharers.desk, self._threads)
        self._finalizer = weakref.finalize(self, _end, *ends, JOIN_TIMEOUT_S)
        _start(self._threads, begun)

    def submit(self, id: str, lane: Lane, due: int, after: Sequence[Ticket], run: Callable[[], object]) -> Ticket:
        """Queues an action and returns at once. If `run` returns a Ticket, the action is done when that is."""
        self.check()
        assert lane in self._queues, f"{id!r}: the lane {lane} has no thread; use run_inline"
        task = _Task(id, lane, due, self._state.next_order(), self._state.pass_index, Ticket(id), run)
        self._queues[lane].add(task, after)
        return task.ticket

    def run_inline(self, id: str, fn: Callable[[], T]) -> T:
        """Runs a COMPUTE action in the caller's thread. Its exception goes to the caller, who may `fail` the lanes."""
        self.check()
        started_s = time.perf_counter()
        result = fn()
        self.record_inline(id, started_s)
        return result

    def record_inline(self, id: str, started_s: float) -> None:
        """Records a COMPUTE action that ends now and could not be run as one call. `started_s` is a perf_counter."""
        self._state.record(Record(self._state.pass_index, Lane.COMPUTE, id, started_s, time.perf_counter()))

    def wait(self, ticket: Ticket, lane: Lane) -> float:
        """Waits for something that `lane` owes. Returns the seconds stalled; raises the original exception."""
        self.check()
        if ticket.done and ticket.error is None:
            _join(ticket)
            return 0.0
        started_s = time.perf_counter()
        try:
            ticket.wait(self.timeout_s)
        except BaseException as error:
            if ticket.error is not None:
                self.fail(ticket.error)
            elif isinstance(error, TimeoutError):
                waited = f"waited {self.timeout_s:g} s for {ticket.label!r} on the lane {lane}"
                self.fail(TimeoutError(f"{waited}; {self._describe()}"))
            else:  # Ctrl-C while waiting: the lanes are well
                raise
        self.check()
        _join(ticket)
        return time.perf_counter() - started_s

    def fail(self, error: BaseException) -> None:
        """Stops all work with this error, unless there is an earlier one. See [Note: failure in a lane]."""
        self._state.fail(error)

    @property
    def failure(self) -> BaseException | None:
        return self._state.failure

    def check(self) -> None:
        if self._state.failure is not None:
            raise self._state.failure
        if self._state.closing:
            raise RuntimeError("these lanes are closed; wrap the model again to go on")

    def begin_pass(self) -> int:
        return self._state.begin_pass()

    @property
    def pass_index(self) -> int:
        return self._state.pass_index

    @property
    def records(self) -> list[Record]:
        """What was done in the last few passes, by pass; within a pass in order of completion."""
        with self._state.lock:
            return [record for records in self._state.records.values() for record in records]

    def records_of(self, pass_index: int) -> list[Record]:
        with self._state.lock:
            return list(self._state.records.get(pass_index, ()))

    def close(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Ends the threads. What runs is finished; what is queued fails. Wait for what matters before closing."""
        _end(self._state, self.sharers.desk, self._threads, timeout_s)
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            warnings.warn(f"{', '.join(stuck)} still busy {timeout_s:g} s after close()", RuntimeWarning, stacklevel=2)

    def _describe(self) -> str:
        with self._state.lock:
            return "queued: " + ", ".join(f"{lane} {len(queue)}" for lane, queue in self._queues.items())


class Sharers:
    """Threads that do one thing together. The thread that brings the work, which is the cpu lane's, does its part."""

    def __init__(self, num_threads: int, begun: threading.Semaphore, timeout_s: float) -> None:
        if num_threads < 1:
            raise ValueError(f"{num_threads} threads cannot update anything; give at least 1")
        self.num_threads = num_threads
        self.desk = _Desk()
        self.threads = [
            threading.Thread(target=_share, args=(self.desk, number, begun), name=f"{SHARER}-{number}", daemon=True)
            for number in range(1, num_threads)
        ]
        self._timeout_s = timeout_s

    def run(self, work: Callable[[int], object], num_threads: int) -> None:
        """Calls `work(number)` once in each of up to `num_threads` threads, numbered from 0, and returns when all have
        returned. The work itself divides what there is to do: a thread may also come too late to find any. The first
        exception of any of them is raised here."""
        if num_threads <= 1 or self.num_threads == 1:
            work(0)
            return
        job = _Job(work)
        self.desk.offer(job, min(num_threads, self.num_threads) - 1)
        try:
            work(0)
        except BaseException as error:
            job.fail(error)
        if not self.desk.withdraw(job, self._timeout_s):
            job.fail(TimeoutError(f"threads that share an update were still busy after {self._timeout_s:g} s"))
        if job.error is not None:
            raise job.error


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[int], object]
    num_wanted: int = 0  # threads that may still join
    num_busy: int = 0
    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error


class _Desk:
    """Where the one job lies on which threads may join in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offered = threading.Condition(self._lock)
        self._left = threading.Condition(self._lock)
        self._job: _Job | None = None
        self._closed = False

    def offer(self, job: _Job, num_wanted: int) -> None:
        with self._lock:
            assert self._job is None, "one update at a time: only the cpu lane brings work"
            self._job, job.num_wanted = job, num_wanted
            self._offered.notify(num_wanted)

    def join(self) -> _Job | None:
        """Blocks for a job, of which the caller is now a part. None: closed."""
        with self._lock:
            while True:
                if self._job is not None and self._job.num_wanted:
                    self._job.num_wanted -= 1
                    self._job.num_busy += 1
                    return self._job
                if self._closed:
                    return None
                self._offered.wait()  # idle: nobody waits for this thread; offer and close wake it

    def leave(self, job: _Job) -> None:
        with self._lock:
            job.num_busy -= 1
            if not job.num_busy:
                self._left.notify_all()

    def withdraw(self, job: _Job, timeout_s: float) -> bool:
        """Nobody joins any more. Waits for those who have; whether they came back in time."""
        with self._lock:
            self._job = None
            return self._left.wait_for(lambda: not job.num_busy, timeout_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._offered.notify_all()


@dataclass(eq=False, slots=True)
class _Task:
    id: str
    lane: Lane
    due: int
    order: int
    pass_index: int
    ticket: Ticket
    run: Callable[[], object]
    after: tuple[Ticket, ...] = ()
    waits_for: tuple[Ticket, ...] = ()
    num_pending: int = 0
    ready: tuple[str, ...] = ()
    ready_dues: tuple[int, ...] = ()


class _State:
    """What the lanes share. One lock: a lane's work takes far longer than any of its bookkeeping."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.conditions: list[threading.Condition] = []
        self.failure: BaseException | None = None
        self.closing = False
        self.pass_index = 0
        self.records: dict[int, list[Record]] = {0: []}
        self._orders = itertools.count()

    def next_order(self) -> int:
        return next(self._orders)

    def begin_pass(self) -> int:
        with self.lock:
            self.pass_index += 1
            self.records[self.pass_index] = []
            self.records.pop(self.pass_index - KEPT_PASSES, None)
            return self.pass_index

    def record(self, record: Record) -> None:
        with self.lock:
            if record.pass_index in self.records:
                self.records[record.pass_index].append(record)

    def fail(self, error: BaseException) -> None:
        with self.lock:
            if self.failure is None:
                self.failure = error
            self._wake_all()

    def stop(self) -> None:
        with self.lock:
            self.closing = True
            self._wake_all()

    def end(self, task: _Task) -> BaseException | None:
        """The error with which a queued task must end unrun, if any."""
        if self.failure is not None:
            return self.failure
        if self.closing:
            return RuntimeError(f"{task.id!r} was queued on the lane {task.lane} when the lanes were closed")
        return None

    def _wake_all(self) -> None:
        for condition in self.conditions:
            condition.notify_all()


class _Watcher:
    """Fences that something on the host waits for, in the order of their stream."""

    def __init__(self, state: _State) -> None:
        self.state = state
        self._condition = threading.Condition(state.lock)
        state.conditions.append(self._condition)
        self._watched: deque[tuple[Ticket, Callable[[], object]]] = deque()

    def watch(self, ticket: Ticket, then: Callable[[], object]) -> None:
        with self.state.lock:
            self._watched.append((ticket, then))
            self._condition.notify()

    def take(self) -> tuple[Ticket, Callable[[], object]] | None:
        """Blocks for the next one. None: closed."""
        with self.state.lock:
            while not self._watched:
                if self.state.closing:
                    return None
                self._condition.wait()  # idle: nobody waits for it; watch and close wake it
            return self._watched.popleft()


class _Queue:
    """Tasks of one lane. Subclasses say which one is next."""

    def __init__(self, state: _State, timeout_s: float) -> None:
        self.state = state
        self.timeout_s = timeout_s
        self.watcher: _Watcher | None = None  # for a lane that works on the host
        self.condition = threading.Condition(state.lock)
        state.conditions.append(self.condition)

    def __len__(self) -> int:
        raise NotImplementedError

    def _push(self, task: _Task) -> None:
        raise NotImplementedError

    def _became_ready(self, task: _Task) -> None:
        raise NotImplementedError

    def _pop_ready(self) -> _Task | None:
        """The task to run now, if there is one."""
        raise NotImplementedError

    def _pop_first(self) -> _Task:
        """The task that has to go first when nothing is ready."""
        raise NotImplementedError

    def add(self, task: _Task, after: Sequence[Ticket]) -> None:
        waits_for = tuple(ticket for ticket in after if self._is_pending(ticket))
        with self.state.lock:
            task.after = tuple(ticket for ticket in after if ticket.fence is not None or not ticket.done)
            task.waits_for, task.num_pending = waits_for, len(waits_for)
            self._push(task)
            if not waits_for:
                self._became_ready(task)
            self.condition.notify()
        for ticket in waits_for:  # outside the lock: a callback may be called at once
            ticket.add_done_callback(lambda done: self._when_through(task, done))

    def _is_pending(self, ticket: Ticket) -> bool:
        return not ticket.done or ticket.error is not None or (self.watcher is not None and ticket.fence is not None)

    def _when_through(self, task: _Task, ticket: Ticket) -> None:
        """See [Note: enqueued and through]."""
        if self.watcher is None or ticket.fence is None or ticket.error is not None:
            self._dependency_done(task, ticket)
        else:
            self.watcher.watch(ticket, lambda: self._dependency_done(task, ticket))

    def take(self) -> tuple[_Task, BaseException | None] | None:
        """Blocks for the next task, and the error with which it must end instead of running. None: closed and empty."""
        waiting_since_s: float | None = None
        with self.state.lock:
            while True:
                if not len(self):
                    if self.state.closing:
                        return None
                    waiting_since_s = None
                    self.condition.wait()  # idle: nobody waits for this lane; submit and close wake it
                    continue
                if self.state.failure is not None or self.state.closing:
                    task = self._pop_first()
                    return task, self.state.end(task)
                ready = self._pop_ready()
                if ready is not None:
                    return ready, None
                now_s = time.monotonic()
                waiting_since_s = now_s if waiting_since_s is None else waiting_since_s
                left_s = waiting_since_s + self.timeout_s - now_s
                if left_s <= 0:
                    task = self._pop_first()
                    error = self._timeout(task)
                    self.state.fail(error)
                    return task, error
                self.condition.wait(left_s)

    def _dependency_done(self, task: _Task, ticket: Ticket) -> None:
        if ticket.error is not None:
            self.state.fail(ticket.error)
            return
        with self.state.lock:
            task.num_pending -= 1
            if task.num_pending == 0:
                self._became_ready(task)
                self.condition.notify()

    def _timeout(self, task: _Task) -> TimeoutError:
        missing = ", ".join(repr(ticket.label) for ticket in task.waits_for if not ticket.done)
        return TimeoutError(f"{task.id!r} on the lane {task.lane} waited {self.timeout_s:g} s for {missing}")


class _InOrder(_Queue):
    def __init__(self, state: _State, timeout_s: float) -> None:
        super().__init__(state, timeout_s)
        self._tasks: deque[_Task] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def _push(self, task: _Task) -> None:
        self._tasks.append(task)

    def _became_ready(self, task: _Task) -> None:
        pass  # only the head counts, and the head is looked at on every wake

    def _pop_ready(self) -> _Task | None:
        return self._tasks.popleft() if self._tasks[0].num_pending == 0 else None

    def _pop_first(self) -> _Task:
        return self._tasks.popleft()


class _DueFirst(_Queue):
    def __init__(self, state: _State, timeout_s: float) -> None:
        super().__init__(state, timeout_s)
        self._tasks: dict[int, _Task] = {}  # by order of submission
        self._heap: list[tuple[int, int]] = []  # (due, order) of the ready ones
        # The ready ones again, as dicts whose values are copied into a record at C speed: 1,000 may be ready at a time.
        self._ready_ids: dict[int, str] = {}
        self._ready_dues: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def _push(self, task: _Task) -> None:
        self._tasks[task.order] = task

    def _became_ready(self, task: _Task) -> None:
        if task.order in self._tasks:  # else it ended with an error already
            heapq.heappush(self._heap, (task.due, task.order))
            self._ready_ids[task.order] = task.id
            self._ready_dues[task.order] = task.due

    def _pop_ready(self) -> _Task | None:
        if not self._heap:
            return None
        task = self._tasks.pop(heapq.heappop(self._heap)[1])
        task.ready, task.ready_dues = tuple(self._ready_ids.values()), tuple(self._ready_dues.values())
        del self._ready_ids[task.order], self._ready_dues[task.order]
        return task

    def _pop_first(self) -> _Task:
        """Only on the way to an end with an error: nothing is picked from the heap after it."""
        return self._tasks.pop(next(iter(self._tasks)))


def _queue_for(lane: Lane, state: _State, timeout_s: float) -> _Queue:
    return (_DueFirst if LANE_RULES[lane] is Rule.DUE_FIRST else _InOrder)(state, timeout_s)


def _start(threads: list[threading.Thread], begun: threading.Semaphore) -> None:
    """See [Note: threads of torch]."""
    num_threads = torch.get_num_threads()
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire(timeout=JOIN_TIMEOUT_S)
    torch.set_num_threads(num_threads)


def _end(state: _State, desk: _Desk, threads: list[threading.Thread], timeout_s: float) -> None:
    """An update that runs is finished by all who share it."""
    state.stop()
    desk.close()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline_s - time.monotonic()))


def _join(ticket: Ticket) -> None:
    if ticket.fence is not None:
        ticket.fence.join()


def _share(desk: _Desk, number: int, begun: threading.Semaphore) -> None:
    """The life of a thread that shares updates."""
    torch.set_num_threads(1)
    begun.release()
    with torch.no_grad():
        while (job := desk.join()) is not None:
            try:
                job.work(number)
            except BaseException as error:  # it belongs to whoever brought the work
                job.fail(error)
            desk.leave(job)
            del job  # an idle thread must not keep an update's tensors alive


def _work(queue: _Queue, lane: Lane, timeout_s: float, streams: Streams, begun: threading.Semaphore) -> None:
    """The life of a lane's thread."""
    if lane is Lane.CPU:
        torch.set_num_threads(1)
    begun.release()
    with torch.no_grad():  # copies and updates are no part of anyone's graph
        while (taken := queue.take()) is not None:
            task, error = taken
            if error is None:
                _run(task, queue.state, timeout_s, streams)
            else:
                task.ticket.set_error(error)
            del taken, task, error  # an idle thread must not keep a task's tensors alive


def _watch(watcher: _Watcher, begun: threading.Semaphore) -> None:
    """The life of the watching thread."""
    begun.release()
    while (taken := watcher.take()) is not None:
        ticket, then = taken
        try:
            assert ticket.fence is not None
            ticket.fence.synchronize()
        except BaseException as error:  # whatever it is, it belongs to the user's thread
            watcher.state.fail(error)
        else:
            then()
        del taken, ticket, then


def _run(task: _Task, state: _State, timeout_s: float, streams: Streams) -> None:
    started_s = time.perf_counter()
    try:
        with streams.lane(task.lane, task.after):
            result = task.run()
            if isinstance(result, Ticket):
                result = result.wait(timeout_s)
            task.ticket.fence = streams.fence() if task.lane is not Lane.CPU else None
    except BaseException as error:  # whatever it is, it belongs to the user's thread
        state.fail(error)
        task.ticket.set_error(error)
        return
    ended_s = time.perf_counter()
    # The record comes before the ticket: who has waited for an action finds its record.
    span = (started_s, ended_s)
    state.record(Record(task.pass_index, task.lane, task.id, *span, task.ready, task.ready_dues, task.due))
    task.ticket.set_result(result)
