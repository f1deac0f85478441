"""Threads that use torch without its own threads."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from weakref import WeakSet

import torch

START_TIMEOUT_S = 10.0
END_TIMEOUT_S = 0.5  # for all of them together

_in_background: WeakSet[threading.Thread] = WeakSet()


def start_threads(threads: Sequence[threading.Thread], begun: threading.Semaphore) -> None:
    """Each sets torch's number of threads to one, and then releases `begun`. That number counts for the thread that
    sets it, but threads that are born later inherit the last one: so it is set again here, to what it was."""
    num_threads = torch.get_num_threads()
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire(timeout=START_TIMEOUT_S)
    torch.set_num_threads(num_threads)


def background(name: str, work: Callable[[], object]) -> threading.Thread:
    """A thread beside all others that runs torch single-threaded, for work of which nobody waits for the parts. An
    exception of it is the business of `work`."""
    begun = threading.Semaphore(0)

    def live() -> None:
        torch.set_num_threads(1)
        begun.release()
        with torch.no_grad():
            work()

    thread = threading.Thread(target=live, name=name, daemon=True)
    start_threads([thread], begun)
    _in_background.add(thread)
    return thread


@atexit.register
def _await_ends() -> None:
    """Of threads that have done their work and are about to end. Python ends one that comes back to it while the
    process ends, and inside of torch that is `std::terminate`, which aborts."""
    until_s = time.monotonic() + END_TIMEOUT_S
    for thread in list(_in_background):
        thread.join(max(0.0, until_s - time.monotonic()))
