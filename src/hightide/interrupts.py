"""Ctrl-C at safe points only.

[Note: interrupts] Python runs a signal's handler between any two of its instructions: in the middle of bookkeeping, in
a `finally`, in a callback from C++ where an exception ends the process. So while hightide works, SIGINT (and SIGTERM,
where somebody handles it) is only noted. What the user's handler does, such as raising KeyboardInterrupt, happens at
the next `safe_point()`, where everything that is under way can be given up, or at the end of the section. Handlers run
in the main thread alone, so in other threads nothing of this is needed, and nothing happens. A block of the user's may
never come to a safe point: whoever asks again after PATIENCE_S is not kept waiting, unless the section is `held`.

The user's handler is there again after the outermost section, unless somebody has set another one meanwhile. Where a
signal has its default effect (the process ends) or is ignored, it stays so.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from _signal import getsignal, signal  # type: ignore[import-not-found]  # those of the module `signal` take ten times as long, to make enums of numbers
from collections.abc import Callable
from signal import SIGINT, SIGTERM
from types import FrameType, TracebackType
from typing import Any

PATIENCE_S = 2.0
SIGNALS = (int(SIGINT), int(SIGTERM))


class _Noted:
    """Stands in for the user's handler of one signal. Each section has its own: handlers may call those before them."""

    __slots__ = ("_number", "_since_s", "before", "times")

    def __init__(self, number: int, before: Callable[[int, FrameType | None], Any]) -> None:
        self._number, self.before = number, before
        self.times = 0  # that it came, and the user's handler has not been called
        self._since_s = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for hold in _now.holds:
            hold.end_if_over()
        if self not in _now.noted:  # somebody has kept it beyond its section
            self.before(number, frame)
            return
        now_s = time.monotonic()
        if not self.times:
            self._since_s = now_s
        self.times += 1
        if now_s - self._since_s >= PATIENCE_S and not _now.num_held:
            self.pass_on(frame)

    def pass_on(self, frame: FrameType | None) -> None:
        times, self.times = self.times, 0
        try:
            for _ in range(times):
                self.before(self._number, frame)
        except BaseException as error:
            _now.raised = error
            raise


class _Now:
    """Of the main thread."""

    depth = 0  # of sections
    num_held = 0  # of them
    noted: tuple[_Noted, ...] = ()  # in the place of the user's handlers
    holds: tuple[Hold, ...] = ()
    raised: BaseException | None = None  # the last exception that came out of a user's handler


_now = _Now()
_main = threading.main_thread()


def _after_fork() -> None:
    global _main
    _main = threading.main_thread()  # the thread that has forked


os.register_at_fork(after_in_child=_after_fork)


def _begin() -> None:
    """In an order in which an interrupt may come between any two lines, until the handlers are in place."""
    if not _now.depth:
        noted = []
        for number in SIGNALS:
            before = getsignal(number)
            if callable(before):
                noted.append(_Noted(number, before))
        _now.noted, _now.raised = tuple(noted), None
        try:
            for one in noted:
                signal(one._number, one)
        except BaseException:  # of a handler that is still the user's
            _put_back()
            raise
    _now.depth += 1


def _end() -> None:
    _now.depth -= 1
    if not _now.depth:
        noted = _now.noted
        _put_back()
        for one in noted:
            if one.times:
                one.pass_on(sys._getframe(2))


def _put_back() -> None:
    for one in _now.noted:
        if getsignal(one._number) is one:
            signal(one._number, one.before)
    _now.noted = ()


class _Deferred:
    """Inside, what a signal asks for waits for a safe point or the end."""

    def __enter__(self) -> None:
        if threading.get_ident() == _main.ident:
            _begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if threading.get_ident() == _main.ident:
            _end()


class _Held:
    """Inside, it waits for the end: what happens there is done as a whole or not at all."""

    def __enter__(self) -> None:
        if threading.get_ident() == _main.ident:
            _begin()
            _now.num_held += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if threading.get_ident() == _main.ident:
            _now.num_held -= 1
            _end()


deferred = _Deferred()
held = _Held()


class Hold:
    """A held section whose end is another call than its begin. If that never comes, `is_over` tells, in the main
    thread, when a signal does."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._has_begun = False

    def begin(self) -> None:
        if threading.get_ident() == _main.ident and not self._has_begun:
            _begin()
            _now.num_held += 1
            _now.holds += (self,)
            self._has_begun = True

    def end(self) -> None:
        if self._has_begun and threading.get_ident() == _main.ident:
            self._has_begun = False
            _now.holds = tuple(hold for hold in _now.holds if hold is not self)
            _now.num_held -= 1
            _end()

    def end_if_over(self) -> None:
        if self._is_over():
            self.end()


def safe_point() -> None:
    """Here an interrupt may be raised, if one has come."""
    for one in _now.noted:
        if one.times and not _now.num_held and threading.get_ident() == _main.ident:
            one.pass_on(sys._getframe(1))


def is_interrupt(error: BaseException) -> bool:
    """Whether a user's handler has raised this: whoever takes failures for findings must let it pass."""
    return error is _now.raised
