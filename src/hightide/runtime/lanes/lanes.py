"""Lanes: serial queues of work that overlap each other. The only file of the runtime that creates threads and streams;
what each thread does is in thread_lives.py.

[Note: failure in a lane] The first exception of any lane is kept as `failure`. From then on every submission and
every wait of the user's thread raises that very object, and the lanes give it to every task that is still queued
instead of running it. So nothing hangs, nothing runs on half-moved data, and the user sees the cause and not a
consequence.

[Note: enqueued and through] A copying lane is done with an action when it is enqueued on its stream; its fence says
when the GPU is through with it, which may be hundreds of milliseconds later, because the user's thread runs ahead.
Lanes with a stream go on at once, behind the fence. The cpu lane must not choose what is only enqueued (it would then
wait, while finished gradients lie there): its tasks become ready when a fence has passed, of which a thread tells. The
disk's lanes neither: a buffer is filled again, or written, when the copy out of it, or into it, is through.

[Note: threads of torch] Torch's own threads (OpenMP) would divide every operation of an update among all cores, and
each operation would wait for the slowest; how many there are depends on OMP_NUM_THREADS. So the threads that update
run torch single-threaded and share an update tile by tile. `torch.set_num_threads` counts for the thread that calls
it, but threads that are born later inherit the last call: the thread that makes the lanes therefore repeats its own
number afterwards.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TypeVar

import torch

from hightide.ir.refusal import Refused
from hightide.ir.tier import Lane
from hightide.process.system import usable_cores
from hightide.runtime.lanes.fences import EventFence, present_stream
from hightide.runtime.lanes.queues import InTurn, LaneRecord, Queue, SharedState, Task, Turns, Watcher, queue_for
from hightide.runtime.lanes.thread_lives import share, watch, work
from hightide.runtime.lanes.update_threads import TileQueue, UpdateThreads
from hightide.stores.threads import start_threads
from hightide.stores.ticket import DEFAULT_TIMEOUT_S, Ticket

T = TypeVar("T")

JOIN_TIMEOUT_S = 10.0

WORKERS: dict[Lane, str] = {
    Lane.H2D: "hightide-h2d",  # fetches the next blocks' chunks and inputs while this block computes and others leave
    Lane.D2H: "hightide-d2h",  # takes gradients and block inputs away while the next block computes and others arrive
    Lane.CPU: "hightide-cpu",  # updates chunks on the host while the accelerator computes and both copies run
    Lane.DISK_READ: "hightide-disk-read",  # fills buffers ahead of fetches and updates; idle without a disk
    Lane.DISK_WRITE: "hightide-disk-write",  # empties them behind updates and write-backs; idle without a disk
}
BETWEEN_RANKS: dict[Lane, str] = {  # only where there are several
    Lane.GATHER: "hightide-gather",  # brings the rest of a chunk from the other ranks while blocks compute
    Lane.REDUCE: "hightide-reduce",  # averages finished gradients over all ranks meanwhile
}
TURNS = Turns()  # of collectives over NCCL, of all models
WATCHER = "hightide-fences"  # one for each lane that works on the host, so that it takes copies that are through
UPDATER = "hightide-update"  # works on the same update as the cpu lane, other tiles of it
CORES_FOR_OTHERS = 2  # Python's and autograd's threads with what they start; the copying lanes mostly wait


def default_update_threads() -> int:
    """One for each core this process may use, less what the others need."""
    return max(1, usable_cores() - CORES_FOR_OTHERS)


# The begin of a COMPUTE action: a perf_counter, and, while recording, an event of the GPU and what that holds.
Begun = tuple[float, torch.cuda.Event | None, int | None]


class Streams:
    """The CUDA streams, one for each copying lane. Compute runs on the stream that is current in the user's thread, and
    on which everything is allocated. Without a GPU there are none: work is through when it returns."""

    def __init__(self, device: torch.device | None, several_ranks: bool = False) -> None:
        self.recording = False  # see mark(); what the GPU holds is asked for, too
        self.timing = False  # see mark()
        self._device = device
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        if device is not None:
            # Their few short kernels (conversions) go before those of compute, which would hold up the copies behind
            # them.
            self._streams[Lane.H2D] = torch.cuda.Stream(device, priority=-1)  # chunks and inputs arrive
            self._streams[Lane.D2H] = torch.cuda.Stream(device, priority=-1)  # gradients and inputs leave meanwhile
            if several_ranks:
                self._streams[Lane.GATHER] = torch.cuda.Stream(device, priority=-1)  # chunks come together, and
                self._streams[Lane.REDUCE] = torch.cuda.Stream(device, priority=-1)  # gradients are averaged meanwhile

    @property
    def are_on_gpu(self) -> bool:
        return self._device is not None

    def fence(self) -> EventFence | None:
        """This moment in the caller's stream."""
        return None if self._device is None else EventFence(*present_stream(self._device))

    def mark(self, lane: Lane) -> torch.cuda.Event | None:
        """This moment in the caller's stream, whose time can be read when the GPU has passed it. None unless a
        recording is on or steps are timed, and for a lane that works on the host."""
        if not (self.recording or self.timing) or self._device is None or lane.on_host:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def of(self, lane: Lane) -> AbstractContextManager[object]:
        """Inside it, work is enqueued on the lane's stream. For the whole life of the lane's thread: to change streams
        for each action would cost as much as the action."""
        return torch.cuda.stream(self._streams[lane]) if lane in self._streams else nullcontext()


class Lanes:
    """One worker thread for each lane of WORKERS, with several ranks for each of BETWEEN_RANKS too, and those that
    share the CPU lane's updates. COMPUTE is the caller's own thread."""

    def __init__(
        self,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device: torch.device | None = None,
        num_update_threads: int | None = None,
        several_ranks: bool = False,
        in_turn: bool = False,
    ) -> None:
        """`in_turn`: lanes between ranks issue in the order of submission; see [Note: collectives in one order]."""
        self.timeout_s = timeout_s
        self.streams = Streams(device, several_ranks)
        workers = WORKERS | BETWEEN_RANKS if several_ranks else WORKERS
        begun = threading.Semaphore(0)
        num_sharing = default_update_threads() if num_update_threads is None else num_update_threads
        self.update_threads = UpdateThreads(num_sharing, timeout_s)
        self._state = SharedState()
        self._queues = {
            lane: InTurn(self._state, timeout_s, TURNS)
            if in_turn and lane in BETWEEN_RANKS
            else queue_for(lane, self._state, timeout_s)
            for lane in workers
        }
        watchers = {lane: Watcher(self._state) for lane in workers if lane.on_host}
        for lane, watcher in watchers.items():
            self._queues[lane].watcher = watcher
        # Threads hold the queues and never this object, so that forgotten lanes are collected and their threads end.
        self._threads = [
            threading.Thread(
                target=work, args=(self._queues[lane], lane, timeout_s, self.streams, begun), name=name, daemon=True
            )
            for lane, name in workers.items()
        ]
        self._threads += [
            threading.Thread(target=watch, args=(watcher, begun), name=f"{WATCHER}-{lane}", daemon=True)
            for lane, watcher in watchers.items()
        ]
        self._threads += [
            threading.Thread(
                target=share, args=(self.update_threads.queue, number, begun), name=f"{UPDATER}-{number}", daemon=True
            )
            for number in range(1, num_sharing)
        ]
        # At exit too, and joined: a thread that Python ends in the middle of a torch operation aborts the process.
        together = [(lane, queue) for lane, queue in self._queues.items() if lane in BETWEEN_RANKS]
        self._finish = partial(_finish, together, self._state)
        ends = (self._state, self.update_threads.queue, self._threads, self._finish)
        self._finalizer = weakref.finalize(self, _end, *ends, JOIN_TIMEOUT_S)
        start_threads(self._threads, begun)  # see [Note: threads of torch]

    def submit(self, id: str, lane: Lane, due: int, after: Sequence[Ticket], run: Callable[[], object]) -> Ticket:
        """Queues an action and returns at once. If `run` returns a Ticket, the action is done when that is."""
        self.check()
        assert lane in self._queues, f"{id!r}: the lane {lane} has no thread; use run_inline"
        task = Task(id, lane, due, next(self._state.orders), self._state.pass_index, Ticket(id), run)
        self._queues[lane].add(task, after)
        return task.ticket

    def run_inline(self, id: str, fn: Callable[[], T]) -> T:
        """Runs a COMPUTE action in the caller's thread. Its exception goes to the caller, who may `fail` the lanes."""
        self.check()
        began = self.begin_inline()
        result = fn()
        self.record_inline(id, began)
        return result

    def begin_inline(self, gpu_bytes: Callable[[], int] | None = None) -> Begun:
        """The begin of a COMPUTE action that cannot be run as one call. `gpu_bytes`: what the GPU holds then."""
        streams = self.streams
        if not (streams.recording or streams.timing):
            return time.perf_counter(), None, None
        held_bytes = gpu_bytes() if gpu_bytes is not None and streams.recording else None
        return time.perf_counter(), streams.mark(Lane.COMPUTE), held_bytes

    def record_inline(self, id: str, began: Begun, gpu_bytes: Callable[[], int] | None = None) -> None:
        """Records a COMPUTE action that ends now."""
        began_s, event, held_bytes = began
        ended = None if event is None else self.streams.mark(Lane.COMPUTE)
        events = None if event is None or ended is None else (event, ended)
        held = None
        if held_bytes is not None and gpu_bytes is not None and self.streams.recording:
            held = (held_bytes, gpu_bytes())
        state = self._state
        span = (began_s, time.perf_counter())
        state.record(LaneRecord(state.pass_index, Lane.COMPUTE, id, *span, events=events, gpu_bytes=held))

    def record_beside(self, lane: Lane, id: str, began_s: float, num_bytes: int) -> None:
        """Records what a thread has done that is no lane's, and ends now. `began_s`: a perf_counter."""
        span = (began_s, time.perf_counter())
        self._state.record(LaneRecord(self._state.pass_index, lane, id, *span, num_bytes=num_bytes))

    def wait(self, ticket: Ticket, lane: Lane) -> float:
        """Waits for something that `lane` owes. Returns the seconds stalled; raises the original exception."""
        self.check()
        if ticket.done and ticket.error is None:
            _join(ticket)
            return 0.0
        started_s = time.perf_counter()
        try:
            self._wait_patiently(ticket)
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

    def _wait_patiently(self, ticket: Ticket) -> None:
        while True:
            try:
                ticket.wait(self.timeout_s)
            except TimeoutError:
                if ticket.error is not None or time.monotonic() - self._state.excused_s > self.timeout_s:
                    raise
            else:
                return

    def excuse(self) -> None:
        """Somebody on a lane waits for what no lane owes, and nobody's time counts before this moment."""
        self._state.excused_s = time.monotonic()

    def when_through(self, ticket: Ticket, then: Callable[[], object]) -> None:
        """Calls it in some thread when the ticket is done, or has failed, and the GPU is through with it. It must not
        raise."""
        watcher = self._queues[Lane.CPU].watcher
        assert watcher is not None

        def done(_: Ticket) -> None:
            if ticket.fence is None or ticket.error is not None:
                then()
            else:
                watcher.watch(ticket, then)

        ticket.add_done_callback(done)

    def drain(self) -> None:
        """Waits until the copying lanes have done what they were given."""
        for lane in (lane for lane in self._queues if not lane.on_host):
            self.wait(self.submit("drain", lane, 0, [], lambda: None), lane)

    def fail(self, error: BaseException) -> None:
        """Stops all work with this error, unless there is an earlier one. See [Note: failure in a lane]."""
        self._state.fail(error)

    @property
    def failure(self) -> BaseException | None:
        return self._state.failure

    @property
    def state(self) -> SharedState:
        """For those who look at it many times per block."""
        return self._state

    def check(self) -> None:
        state = self._state
        if not state.birthplace.is_here:
            state.birthplace.check()
        if state.failure is not None:
            raise state.failure
        if state.closing:
            raise Refused("these lanes are closed; wrap the model again to go on")

    def begin_pass(self) -> int:
        return self._state.begin_pass()

    @property
    def pass_index(self) -> int:
        return self._state.pass_index

    def keep_pass(self, pass_index: int | None, num_before: int = 0) -> None:
        """Its records, and of the few passes before it, stay until another pass is named. None: no longer.
        `num_before`: how many these are at least, from now on."""
        with self._state.lock:
            self._state.kept_pass = pass_index
            self._state.num_kept = max(self._state.num_kept, num_before + 1)

    @property
    def records(self) -> list[LaneRecord]:
        """What was done in the last few passes, and in kept ones, by pass; within a pass in order of completion."""
        with self._state.lock:
            return [record for records in self._state.records.values() for record in records]

    def records_of(self, pass_index: int) -> list[LaneRecord]:
        with self._state.lock:
            return list(self._state.records.get(pass_index, ()))

    def close(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Ends the threads. What runs is finished, and what other ranks wait for; what else is queued fails. Wait for
        what matters before closing."""
        _end(self._state, self.update_threads.queue, self._threads, self._finish, timeout_s)
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            warnings.warn(f"{', '.join(stuck)} still busy {timeout_s:g} s after close()", RuntimeWarning, stacklevel=2)

    @property
    def end(self) -> Callable[[], object]:
        """As `close`, for whoever must not hold these lanes."""
        return self._finalizer

    @property
    def owes_others(self) -> bool:
        """Something that other ranks take part in is still to begin."""
        with self._state.lock:
            return any(len(queue) > 0 for lane, queue in self._queues.items() if lane in BETWEEN_RANKS)

    def standing(self) -> tuple[bool, list[Lane], int]:
        """Whether lanes are idle, but for those between ranks; which of these are at work; and how much all have begun
        so far."""
        with self._state.lock:
            is_idle = all(queue.is_idle for lane, queue in self._queues.items() if lane not in BETWEEN_RANKS)
            between = {lane: queue for lane, queue in self._queues.items() if lane in BETWEEN_RANKS}
            is_idle = is_idle and all(queue.is_at_work or queue.is_idle for queue in between.values())
            return is_idle, [lane for lane, queue in between.items() if queue.is_at_work], self._state.num_taken

    def _describe(self) -> str:
        with self._state.lock:
            return "queued: " + ", ".join(f"{lane} {len(queue)}" for lane, queue in self._queues.items())


def _finish(queues: list[tuple[Lane, Queue]], state: SharedState, timeout_s: float) -> None:
    """Until what was issued together with other ranks is done: they have issued it too, or will learn that this one has
    ended."""
    for lane, queue in queues:
        last = Task("the end", lane, 0, next(state.orders), state.pass_index, Ticket("the end"), lambda: None)
        if state.failure is None and not state.closing:
            queue.add(last, ())
            with suppress(BaseException):
                last.ticket.wait(timeout_s)


def _end(
    state: SharedState,
    tiles: TileQueue,
    threads: list[threading.Thread],
    finish: Callable[[float], None],
    timeout_s: float,
) -> None:
    """An update that runs is finished by all who share it. A fork has none of the threads, and perhaps their locks."""
    if not state.birthplace.is_here:
        return
    finish(timeout_s)
    state.stop()
    tiles.close()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline_s - time.monotonic()))


def _join(ticket: Ticket) -> None:
    if ticket.fence is not None:
        ticket.fence.join()
