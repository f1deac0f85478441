"""Threads that use torch without its own threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

START_TIMEOUT_S = 10.0


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
    return thread
