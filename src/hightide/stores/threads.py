"""Threads that use torch without its own threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

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
