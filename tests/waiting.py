"""What other threads bring about sooner or later: a test asks until it is so, instead of sleeping and hoping."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

LONG_S = 30.0  # on a machine that others use too; where it is needed, something is broken


def soon(holds: Callable[[], bool], within_s: float = LONG_S) -> bool:
    """Whether it holds, now or before long."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.002)
    return True


class OwnThreads:
    """Threads that are born from now on; those of other tests' models may be about to end, or may not."""

    def __init__(self, prefix: str = "hightide-") -> None:
        gc.collect()
        self._prefix, self._others = prefix, set(threading.enumerate())

    def alive(self) -> set[threading.Thread]:
        mine = set(threading.enumerate()) - self._others
        return {thread for thread in mine if thread.name.startswith(self._prefix)}

    def names(self) -> list[str]:
        return sorted(thread.name for thread in self.alive())

    def end(self) -> bool:
        """Whether all of them end before long, when nobody uses them any more."""
        gc.collect()
        return soon(lambda: not self.alive())
