"""Ctrl-C at safe points only.

[Note: interrupts] Python runs a signal's handler between any two of its instructions: in the middle of bookkeeping, in
a `finally`, in a callback from C++ where an exception ends the process. So while hightide works, SIGINT (and SIGTERM,
where somebody handles it) is only noted. What the user's handler does, such as raising KeyboardInterrupt, happens at
the next `safe_point()`, where everything that is under way can be given up, or at the end of the section. Handlers run
in the main thread alone, so in other threads nothing of this is needed, and nothing happens. A block of the user's may
never come to a safe point: whoever asks again after PATIENCE_S is not kept waiting, unless the section is
`uninterrupted`.

The user's handler is there again after the outermost section, unless somebody has set another one meanwhile. Where a
signal has its default effect (the process ends) or is ignored, it stays so.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from _signal import getsignal, signal  # type: ignore[import-not-found]  # `signal`'s take ten times as long
from _thread import get_ident
from collections.abc import Callable
from signal import SIGINT, SIGTERM, raise_signal
from types import FrameType
from typing import Any

PATIENCE_S = 2.0
SIGNALS = (int(SIGINT), int(SIGTERM))
RAISED = "raised_by_a_signal"  # an attribute of exceptions that came out of a user's handler


class _Noted:
    """Stands in for the user's handler of one signal. Each section has its own: handlers may call those before them."""

    __slots__ = ("_since_s", "before", "number", "times")

    def __init__(self, number: int, before: Callable[[int, FrameType | None], Any]) -> None:
        self.number, self.before = number, before
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
        is_between = frame is not None and frame.f_globals is globals()  # in a section's begin or end
        if now_s - self._since_s >= PATIENCE_S and not _now.num_held and not is_between:
            self.pass_on(frame)

    def pass_on(self, frame: FrameType | None) -> None:
        times, self.times = self.times, 0
        try:
            for _ in range(times):
                self.before(self.number, frame)
        except BaseException as error:
            vars(error)[RAISED] = True
            raise


class _Now:
    """Of the main thread."""

    __slots__ = ("depth", "holds", "main", "noted", "num_held")

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        self.depth = 0  # of sections
        self.num_held = 0  # of them
        self.holds: tuple[Hold, ...] = ()
        self.noted: tuple[_Noted, ...] = ()  # in the place of the user's handlers

    def after_fork(self) -> None:
        self.main = threading.main_thread().ident  # the thread that has forked


_now = _Now()
os.register_at_fork(after_in_child=_now.after_fork)


def _install() -> None:
    """In an order in which an interrupt may come between any two lines, until the handlers are in place."""
    noted = []
    for number in SIGNALS:
        before = getsignal(number)
        if callable(before):
            noted.append(_Noted(number, before))
    _now.noted = tuple(noted)
    try:
        for one in noted:
            signal(one.number, one)
    except BaseException:  # of a handler that is still the user's
        _put_back()
        raise


def _begin() -> None:
    if not _now.depth:
        _install()
    _now.depth += 1


def _end() -> None:
    _now.depth -= 1
    if not _now.depth:
        noted = _now.noted
        _put_back()
        came = [one for one in noted if one.times]  # not before: one may come while handlers are put back
        for one in came[1:]:  # the first may raise: Python itself keeps the others
            raise_signal(one.number)
        for one in came[:1]:
            one.pass_on(sys._getframe(2))


def _put_back() -> None:
    for one in _now.noted:
        if getsignal(one.number) is one:
            signal(one.number, one.before)
    _now.noted = ()


class _Section:
    """Inside, what a signal asks for waits for a safe point or the end. Where it is held, it waits for the end: what
    happens there is done as a whole or not at all."""

    def __init__(self, is_held: bool) -> None:
        self._num_held = int(is_held)

    def __enter__(self) -> None:
        if get_ident() == _now.main:
            _begin()
            _now.num_held += self._num_held

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if get_ident() == _now.main:
            _now.num_held -= self._num_held
            _end()


deferred = _Section(is_held=False)
uninterrupted = _Section(is_held=True)


class Hold:
    """A held section whose end is another call than its begin. If that never comes, `is_over` tells, in the main
    thread, when a signal does."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._has_begun = False

    def begin(self) -> None:
        if get_ident() == _now.main and not self._has_begun:
            _begin()
            _now.num_held += 1
            _now.holds += (self,)
            self._has_begun = True

    def end(self) -> None:
        if self._has_begun and get_ident() == _now.main:
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
        if one.times and not _now.num_held and get_ident() == _now.main:
            one.pass_on(sys._getframe(1))


def is_interrupt(error: BaseException) -> bool:
    """Whether a user's handler has raised this: whoever takes failures for findings must let it pass."""
    return RAISED in vars(error)


def in_a_line(error: BaseException) -> str:
    """A failure that is taken for a finding. An interrupt is none, and is raised again."""
    if is_interrupt(error):
        raise error
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
