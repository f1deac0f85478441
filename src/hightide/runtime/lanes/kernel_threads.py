"""Threads that wait for work, and do it, in C.

[Note: the crew] Every wake of a thread in Python takes Python's lock away from the thread that issues work to the GPU,
and an update that a dozen threads share would do so dozens of times. So threads that share updates in C stay there
from one update to the next (kernels/crew.h): an update costs only the lane that brings it a lock, once. They come back
when there is work in Python for them, and when the lanes are closed.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class WorkInC:
    """A function of one address that any number of threads may call at once, and that divides the work among them."""

    library: ctypes.CDLL  # it has the crew's functions, too
    function: Any
    arguments: ctypes.Structure
    alive: object  # what addresses in the arguments point to

    def __call__(self, _: int) -> None:
        self.function(ctypes.addressof(self.arguments))


class _Job(ctypes.Structure):
    _fields_ = (
        ("work", ctypes.c_void_p),
        ("on", ctypes.c_void_p),
        ("num_wanted", ctypes.c_int64),
        ("num_busy", ctypes.c_int64),
    )


class KernelThreads:
    def __init__(self, library: ctypes.CDLL, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._serve, self._share, self._dismiss = (
            getattr(library, f"hightide_crew_{name}") for name in ("serve", "share", "dismiss")
        )
        self._share.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_double]
        self._share.restype = library.hightide_crew_bytes.restype = ctypes.c_int64
        self._bytes = ctypes.create_string_buffer(library.hightide_crew_bytes())  # who serves keeps it alive
        self._at = ctypes.c_void_p(ctypes.addressof(self._bytes))
        if library.hightide_crew_make(self._at):
            raise RuntimeError("threads that share updates cannot be set up")
        self._process = os.getpid()
        self._lost: list[object] = []  # what threads that did not come back may still use

    def serve(self, _: int) -> None:
        """A thread's life in the crew, until it is dismissed."""
        self._serve(self._at)

    def run(self, work: WorkInC, num_others: int) -> None:
        """Returns when the caller, and all of up to so many others who have joined, have returned from it."""
        function = ctypes.cast(work.function, ctypes.c_void_p)
        job = _Job(function, ctypes.addressof(work.arguments))
        if self._share(self._at, ctypes.addressof(job), num_others, self._timeout_s):
            self._lost.append((job, work))
            raise TimeoutError(f"threads that share an update were still busy after {self._timeout_s:g} s")

    def dismiss(self) -> None:
        if os.getpid() == self._process:  # a fork has none of the threads, and perhaps their lock
            self._dismiss(self._at)
