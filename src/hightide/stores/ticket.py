"""The completion of something in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from hightide.process.interrupts import safe_point

DEFAULT_TIMEOUT_S = 120.0
LOOK_S = 0.1  # who waits looks this often whether the user wants to interrupt it

# One lock for all tickets keeps a ticket as cheap as its attributes. It guards a few assignments and is never held
# while anything else runs; re-entrant because the garbage collector may run a finaliser that completes another ticket.
_lock = threading.RLock()


class Fence(Protocol):
    """A point in the work of a GPU. Data in flight travels with it."""

    @property
    def number(self) -> int:
        """Fences are numbered as they are set."""

    def join(self) -> None:
        """Makes the calling thread's present stream wait for it; the thread itself goes on."""

    def synchronize(self) -> None:
        """Makes the calling thread wait for it."""


class Ticket:
    """Completed once, with a result or an error, by whoever does the work; waited on by anyone, for a bounded time."""

    __slots__ = ("_callbacks", "_result", "done", "error", "fence", "label")

    def __init__(self, label: str) -> None:
        self.label = label
        self.done = False  # True after a result and after an error; only `set_result` and `set_error` change it
        self.error: BaseException | None = None
        self._result: object = None
        self._callbacks: list[Callable[[Ticket], object]] = []
        self.fence: Fence | None = None  # on a real GPU: done means enqueued, and the fence says when it is through

    @classmethod
    def completed(cls, label: str, value: object = None, fence: Fence | None = None) -> Ticket:
        ticket = cls(label)
        ticket.fence = fence
        ticket._result, ticket.done = value, True  # nobody else has it yet
        return ticket

    def set_result(self, value: object = None) -> None:
        self._complete(value, None)

    def set_error(self, error: BaseException) -> None:
        self._complete(None, error)

    def add_done_callback(self, callback: Callable[[Ticket], object]) -> None:
        """Calls `callback(self)` in the thread that completes it, or here and now if it is done. It must not raise."""
        with _lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def wait(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> object:
        """The result. A failure is raised as the very exception object that the work raised."""
        if not self.done:
            self._block(timeout_s)
        if self.error is not None:
            raise self.error
        return self._result

    def join(self) -> None:
        """Waits until the work is under way, and lets the caller's stream wait until it is through."""
        self.wait()
        if self.fence is not None:
            self.fence.join()

    def wait_through(self) -> None:
        """Waits until the work is through, in the caller's thread."""
        self.wait()
        if self.fence is not None:
            self.fence.synchronize()

    def __repr__(self) -> str:
        state = "pending" if not self.done else "done" if self.error is None else f"failed: {self.error!r}"
        return f"Ticket({self.label!r}, {state})"

    def _block(self, timeout_s: float) -> None:
        completed = threading.Lock()  # a bare lock: an Event is two of them and a dozen calls
        completed.acquire()

        def wake(_: Ticket) -> None:
            completed.release()

        self.add_done_callback(wake)
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            if completed.acquire(timeout=min(left_s, LOOK_S)):
                return
            safe_point()
        with _lock:
            if self.done:
                return
            self._callbacks.remove(wake)
        raise TimeoutError(f"{self.label!r} was not done after {timeout_s:g} s")

    def _complete(self, value: object, error: BaseException | None) -> None:
        with _lock:
            assert not self.done, f"the ticket {self.label!r} was completed twice"
            self._result, self.error = value, error
            self.done = True  # last: `done` and `wait` look without the lock
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
