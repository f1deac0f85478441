"""Ctrl-C and SIGTERM as requests: the present step is finished, then the run ends in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

StopRequest = Callable[[], signal.Signals | None]  # the first signal that has asked for the end


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Inside, the first Ctrl-C only makes what it yields say so; the second interrupts at once, as Python does itself.
    SIGTERM only asks, however often it comes: who ends jobs may send it to a process and to its group."""
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield lambda: None
        return
    asked: list[signal.Signals] = []

    def on_signal(number: int, _: Any) -> None:
        if number == signal.SIGINT and signal.SIGINT in asked:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number))

    before = [(number, signal.signal(number, on_signal)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in before:
            if handler is not None:
                signal.signal(number, handler)
