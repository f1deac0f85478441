"""Ctrl-C and SIGTERM as requests: the present step is finished, then the run ends in order."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

StopRequest = Callable[[], signal.Signals | None]  # the first signal that has asked for the end


@contextmanager
def stop_request(echo_s: float = 0.0) -> Iterator[StopRequest]:
    """Inside, the first Ctrl-C only makes what it yields say so; the second interrupts at once, as Python does itself.
    SIGTERM only asks, however often it comes: who ends jobs may send it to a process and to its group. `echo_s`: a
    second Ctrl-C within so many seconds is the first one again, which torchrun hands on to ranks that have it."""
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield lambda: None
        return
    asked: list[signal.Signals] = []
    since_s: list[float] = []

    def on_signal(number: int, _: Any) -> None:
        if number == signal.SIGINT and signal.SIGINT in asked and time.monotonic() - since_s[0] >= echo_s:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number))
        since_s.append(time.monotonic())

    before = [(number, signal.signal(number, on_signal)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in before:
            if handler is not None:
                signal.signal(number, handler)
