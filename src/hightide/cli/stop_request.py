"""Ctrl-C as a request: the present step is finished, then the run ends in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_request() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only makes what it yields true; the second interrupts at once, as Python does itself."""
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield lambda: False
        return
    asked = False

    def on_signal(*_: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: asked
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
