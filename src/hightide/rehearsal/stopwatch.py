"""Seconds and bytes of what runs on a device, without disturbing it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from hightide.runtime.run import Run

AHEAD_CYCLES = 40_000_000  # a GPU sleeps so long, about 20 ms, until the thread that feeds it is ahead of it
LOAD_S = 1.5  # of load, after which a clock hardly falls any more (docs/log.md)
MOST_LOAD_FACTOR = 1.15  # more is somebody else's work on the same GPU
Lap = Callable[[], None]  # ends one part of a pass
Pass = Callable[[Lap], None]


@dataclass(frozen=True)
class TimingEffort:
    """How long to measure. Under load without a pause a GPU is slower than at first: its clock falls."""

    num_warm: int  # passes before: compilation, workspaces
    num_ahead: int  # passes that surely fit into the GPU's queue, so that the thread never waits
    sustained_s: float
    max_passes: int


GPU_EFFORT = TimingEffort(num_warm=2, num_ahead=5, sustained_s=0.2, max_passes=200)
CPU_EFFORT = TimingEffort(num_warm=1, num_ahead=1, sustained_s=0.0, max_passes=3)


@dataclass(frozen=True)
class Laps:
    seconds: tuple[float, ...]  # median of each part
    issue_s: float  # of the thread, for a whole pass


def time_laps(once: Pass, device: torch.device) -> Laps:
    """Times the parts of a pass, each ended by a call of what `once` gets."""
    effort = GPU_EFFORT if device.type == "cuda" else CPU_EFFORT
    for _ in range(effort.num_warm):
        once(lambda: None)
    passes, issue_s = _batch(once, device, effort.num_ahead)
    pass_s = statistics.median(sum(parts) for parts in passes)
    count = min(int(effort.sustained_s / max(pass_s, 1e-9)), effort.max_passes)
    if count > effort.num_ahead:
        passes, _ = _batch(once, device, count)
    later = passes[len(passes) // 2 :]
    return Laps(tuple(statistics.median(part) for part in zip(*later, strict=True)), issue_s)


def load_factor(once: Pass, device: torch.device) -> float:
    """How much longer a pass takes after LOAD_S of load without a pause than in what `time_laps` measures: a GPU that
    draws all the power that it may lowers its clock. 1 where nothing is slower, and on a machine without one."""
    if device.type != "cuda":
        return 1.0
    pass_s = sum(time_laps(once, device).seconds)
    passes, _ = _batch(once, device, max(8, int(LOAD_S / max(pass_s, 1e-9))))
    loaded_s = statistics.median(sum(parts) for parts in passes[-len(passes) // 4 :])
    return min(max(1.0, loaded_s / pass_s), MOST_LOAD_FACTOR)


def _batch(once: Pass, device: torch.device, count: int) -> tuple[list[list[float]], float]:
    marks: list[list[Any]] = [[] for _ in range(count)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):  # where else it would sleep is up to the user's code
            torch.cuda._sleep(AHEAD_CYCLES)
    started_s = time.perf_counter()
    for mine in marks:
        mine.append(_mark(device))
        once(lambda mine=mine: mine.append(_mark(device)))  # type: ignore[misc]
    issue_s = (time.perf_counter() - started_s) / count
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [[_between(*pair) for pair in pairwise(mine)] for mine in marks], issue_s


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(first: Any, second: Any) -> float:
    return float(second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3)


class MemoryReading:
    """Bytes that a run's device holds: now, and at most since the last `restart`."""

    def __init__(self, run: Run) -> None:
        self._gpu = run.gpu
        self._cuda = run.gpu.device if run.gpu.device.type == "cuda" else None

    def restart(self) -> int:
        """Returns what is held now."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        else:
            self._gpu.reset_peak()
        return self.now_bytes

    @property
    def now_bytes(self) -> int:
        return self._gpu.used_bytes if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    @property
    def peak_bytes(self) -> int:
        return self._gpu.peak_bytes if self._cuda is None else torch.cuda.max_memory_allocated(self._cuda)
