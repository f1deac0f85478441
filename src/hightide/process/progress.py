"""The work that somebody waits for, as one line on a terminal that goes away at the end.

Whoever works says so with `tell`, whichever layer it is in; whoever makes the user wait shows it with `progress_line`.
The logger "hightide" gets how long each part took, at the level INFO: a terminal is not needed for that."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hightide.process.interrupts import safe_point

LOG = logging.getLogger("hightide")
QUIET_S = 1.0  # what is faster is not worth a line
_CLEAR = "\r\033[K"


class _Line:
    def __init__(self, title: str) -> None:
        self._title = title
        self._began_s = self._part_began_s = time.perf_counter()
        self._part = ""
        self._on_terminal = _is_terminal()
        self._is_drawn = False

    def begin(self, part: str, detail: str = "") -> None:
        now_s = time.perf_counter()
        if part != self._part:
            self._end_part(now_s)
            self._part, self._part_began_s = part, now_s
        if self._on_terminal and now_s - self._began_s >= QUIET_S:
            self._draw(f"{self._title}, {now_s - self._began_s:.0f} s: {part}{f' ({detail})' if detail else ''}")

    def end(self) -> None:
        now_s = time.perf_counter()
        self._end_part(now_s)
        LOG.info("%s: %.1f s in all", self._title, now_s - self._began_s)
        if self._is_drawn:
            self._write(_CLEAR)

    def _end_part(self, now_s: float) -> None:
        if self._part:
            LOG.info("%s: %s took %.1f s", self._title, self._part, now_s - self._part_began_s)

    def _draw(self, text: str) -> None:
        self._is_drawn = True
        self._write(_CLEAR + text[: shutil.get_terminal_size().columns - 1])

    def _write(self, text: str) -> None:
        """A terminal that is gone, or has no such letters, ends no training."""
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            self._on_terminal = self._is_drawn = False


def _is_terminal() -> bool:
    """Not where standard error is closed, or was exchanged for something that does not say."""
    try:
        return sys.stderr.isatty()
    except (OSError, ValueError, AttributeError):
        return False


_line: ContextVar[_Line | None] = ContextVar("_line", default=None)


@contextmanager
def progress_line(title: str) -> Iterator[None]:
    """Inside of another one it changes nothing."""
    if _line.get() is not None:
        yield
        return
    line = _Line(title)
    token = _line.set(line)
    try:
        yield
    finally:
        _line.reset(token)
        line.end()


@contextmanager
def doing(part: str, detail: str = "") -> Iterator[None]:
    """As `tell`; what is told inside belongs to it and is not shown."""
    tell(part, detail)
    token = _line.set(None)
    try:
        yield
    finally:
        _line.reset(token)


def tell(part: str, detail: str = "") -> None:
    """What is done from now on; `detail` is how far it is. Between two pieces of work is a safe point."""
    safe_point()
    if (line := _line.get()) is not None:
        line.begin(part, detail)
