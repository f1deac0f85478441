"""What a run has measured, beside what its plan forecast."""

from __future__ import annotations

from dataclasses import dataclass

from hightide.ir.plan import Forecast, Plan
from hightide.runtime.run import Run


@dataclass(frozen=True)
class Stats:
    """Counters since wrapping, except `step_s`: the time between the last two calls of step()."""

    plan: Plan
    forecast: Forecast
    num_steps: int
    step_s: float
    peak_bytes: dict[str, int]  # per tier; on the GPU everything it holds, activations included
    used_bytes: dict[str, int]
    moved_bytes: dict[str, int]  # per lane
    stall_s: dict[str, float]  # per lane: how long compute waited for it
    evictions: int
    deviations: int  # ticks that the model ran outside of the plan, or not at all
    update_kernel: str  # what computes updates on the host: "c" or "torch"


def read_stats(run: Run) -> Stats:
    return Stats(
        plan=run.plan,
        forecast=run.plan.forecast,
        num_steps=run.num_steps,
        step_s=run.step_s,
        peak_bytes={"gpu": run.gpu.device_peak_bytes, "host": run.host.peak_bytes},
        used_bytes={"gpu": run.gpu.device_used_bytes, "host": run.host.used_bytes},
        moved_bytes={str(lane): num_bytes for lane, num_bytes in run.performer.moved_bytes.items()},
        stall_s={str(lane): seconds for lane, seconds in run.executor.stall_s.items()},
        evictions=run.performer.num_evictions,
        deviations=run.executor.num_deviations,
        update_kernel=run.performer.updates.kernel if run.performer.updates is not None else "",
    )
