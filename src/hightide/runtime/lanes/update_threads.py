"""One piece of work that several threads do together: the update of a chunk, tile by tile."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass

from hightide.runtime.lanes.kernel_threads import KernelThreads, WorkInC

RunInThreads = Callable[[Callable[[int], object], int], object]  # runs a piece of work in so many threads


class UpdateThreads:
    """Threads that do one thing together. The thread that brings the work, which is the cpu lane's, does its part."""

    def __init__(self, num_threads: int, timeout_s: float) -> None:
        """One of the threads is the one that brings work; the others are made in lanes.py and wait in the queue."""
        if num_threads < 1:
            raise ValueError(f"{num_threads} threads cannot update anything; give at least 1")
        self.num_threads = num_threads
        self.queue = TileQueue()
        self._timeout_s = timeout_s
        self._crew: tuple[KernelThreads, Job] | None = None  # in which the threads wait, if the last work was in C

    def run(self, work: Callable[[int], object], num_threads: int) -> None:
        """Calls `work(number)` once in each of up to `num_threads` threads, numbered from 0, and returns when all have
        returned. The work itself divides what there is to do: a thread may also come too late to find any. The first
        exception of any of them is raised here."""
        num_others = min(num_threads, self.num_threads) - 1
        if num_others <= 0:
            work(0)
        elif isinstance(work, WorkInC):
            self._crew_for(work.library).run(work, num_others)
        else:
            self._dismiss_crew()
            self._run(work, num_others)

    def _run(self, work: Callable[[int], object], num_others: int) -> None:
        job = Job(work)
        self.queue.offer(job, num_others)
        try:
            work(0)
        except BaseException as error:
            job.fail(error)
        self._withdraw(job)

    def _withdraw(self, job: Job) -> None:
        if not self.queue.withdraw(job, self._timeout_s):
            job.fail(TimeoutError(f"threads that share an update were still busy after {self._timeout_s:g} s"))
        if job.error is not None:
            raise job.error

    def _crew_for(self, library: ctypes.CDLL) -> KernelThreads:
        """See [Note: the crew]. Who has not yet arrived there when work comes is missed, and not waited for."""
        if self._crew is None:
            crew = KernelThreads(library, self._timeout_s)
            job = Job(crew.serve, crew.dismiss)
            self.queue.offer(job, self.num_threads - 1)
            self._crew = crew, job
        return self._crew[0]

    def _dismiss_crew(self) -> None:
        if self._crew is not None:
            (crew, job), self._crew = self._crew, None
            crew.dismiss()
            self._withdraw(job)


@dataclass(eq=False, slots=True)
class Job:
    work: Callable[[int], object]
    end: Callable[[], object] = lambda: None  # lets threads return whose work has no end of its own
    num_wanted: int = 0  # threads that may still join
    num_busy: int = 0
    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error


class TileQueue:
    """Where the one job lies on which threads may join in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offered = threading.Condition(self._lock)
        self._left = threading.Condition(self._lock)
        self._job: Job | None = None
        self._closed = False

    def offer(self, job: Job, num_wanted: int) -> None:
        with self._lock:
            assert self._job is None, "one update at a time: only the cpu lane brings work"
            if not self._closed:
                self._job, job.num_wanted = job, num_wanted
                self._offered.notify(num_wanted)

    def join(self) -> Job | None:
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

    def leave(self, job: Job) -> None:
        with self._lock:
            job.num_busy -= 1
            if not job.num_busy:
                self._left.notify_all()

    def withdraw(self, job: Job, timeout_s: float) -> bool:
        """Nobody joins any more. Waits for those who have; whether they came back in time."""
        with self._lock:
            self._job = None
            return self._left.wait_for(lambda: not job.num_busy, timeout_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._job is not None:
                self._job.end()
            self._offered.notify_all()
