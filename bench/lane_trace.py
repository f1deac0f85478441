"""A Chrome trace (chrome://tracing, Perfetto) with one row per lane, small enough to send around.

On the GPU, kernels and copies come from torch's profiler; neighbouring ones of a row are drawn as one bar. On the
host, the lanes' own records show what was started when and, for the cpu lane, how long it took.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hightide.process import files

GAP_US = 20.0  # kernels closer than this are one bar: launch gaps are not what this trace is for


@dataclass
class Bar:
    name: str
    start_us: float
    end_us: float
    count: int = 1


def record(steps: Callable[[], None], run: Any | None, path: str) -> dict[str, float]:
    """Runs the steps under the profiler and writes the trace. Returns the share of the time that each row was busy.
    `run` is a wrapped model's run, or None."""
    rows: dict[str, list[Bar]] = defaultdict(list)
    epoch_us = _now_us() - time.perf_counter_ns() / 1e3
    if torch.cuda.is_available():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            torch.cuda.synchronize()
            started_us = _now_us()
            steps()
            torch.cuda.synchronize()
            ended_us = _now_us()
        _add_gpu_rows(rows, profiler)
    else:
        started_us = _now_us()
        steps()
        ended_us = _now_us()
    for entry in run.lanes.records if run is not None else ():
        bar = Bar(entry.id, entry.started_s * 1e6 + epoch_us, entry.ended_s * 1e6 + epoch_us)
        if bar.end_us >= started_us:
            rows[f"host {entry.lane}"].append(bar)
    _write(rows, started_us, path)
    return {name: _busy_us(rows[name]) / (ended_us - started_us) for name in sorted(rows)}


def _now_us() -> float:
    return time.time_ns() / 1e3


def _add_gpu_rows(rows: dict[str, list[Bar]], profiler: torch.profiler.profile) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        data = json.loads(path.read_text())
    base_us = data.get("baseTimeNanoseconds", 0) / 1e3
    events = [event for event in data["traceEvents"] if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for event in sorted(events, key=lambda event: event["ts"]):
        row, start_us = _gpu_row(event), base_us + event["ts"]
        bar = Bar(event["name"], start_us, start_us + event["dur"])
        last = rows[row][-1] if rows[row] else None
        if last is not None and bar.start_us - last.end_us < GAP_US:
            last.end_us, last.count = max(last.end_us, bar.end_us), last.count + 1
        else:
            rows[row].append(bar)


def _gpu_row(event: dict[str, Any]) -> str:
    name = event["name"]
    if "HtoD" in name:
        return "gpu h2d"
    if "DtoH" in name:
        return "gpu d2h"
    return "gpu compute"


def _busy_us(bars: list[Bar]) -> float:
    """The length of the union of the bars."""
    busy_us, until_us = 0.0, float("-inf")
    for bar in sorted(bars, key=lambda bar: bar.start_us):
        busy_us += max(0.0, bar.end_us - max(bar.start_us, until_us))
        until_us = max(until_us, bar.end_us)
    return busy_us


def _write(rows: dict[str, list[Bar]], started_us: float, path: str) -> None:
    events: list[dict[str, Any]] = []
    for row, name in enumerate(sorted(rows)):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}})
        for bar in rows[name]:
            label = bar.name if bar.count == 1 else f"{bar.count} x, from {bar.name[:40]}"
            times = {"ts": round(bar.start_us - started_us, 1), "dur": round(bar.end_us - bar.start_us, 1)}
            events.append({"ph": "X", "name": label, "pid": 0, "tid": row, **times})
    files.write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
