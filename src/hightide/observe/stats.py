"""Measurements of a run, beside the forecast of its plan and the speed of light."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hightide.ir.plan import Forecast, Plan
from hightide.ir.tier import Lane, Tier
from hightide.ir.units import format_bytes
from hightide.planner.predict.light import main_dtype, needed_flop, seconds_at
from hightide.planner.predict.wear import Wear, in_words, wear
from hightide.runtime.run import Run
from hightide.runtime.step_work import Computed


@dataclass(frozen=True)
class Stats:
    """Counters since wrapping, except `step_s`: the time between the last two calls of step()."""

    plan: Plan
    forecast: Forecast  # for the device of the run, whatever machine the plan was made for
    num_steps: int
    step_s: float
    # Per tier; of the disk only where the plan uses one. On the GPU everything it holds, activations included; on a
    # real one what torch has reserved.
    peak_bytes: dict[str, int]
    used_bytes: dict[str, int]  # of tensors
    moved_bytes: dict[str, int]  # per lane
    stall_s: dict[str, float]  # per lane: how long compute waited for it
    evictions: int
    deviations: int  # ticks that the model ran outside of the plan, or not at all
    update_kernel: str  # what computes updates on the host: "c" or "torch"
    # What the last step would take at the speed of light: forward and backward of its samples, once each and nothing
    # recomputed, at the rate of large products that doctor has measured on this GPU for their dtype. None: before the
    # first step, on the simulated accelerator and where no rate was measured; and of steps whose operations nobody has
    # counted: with batches of other shapes than the example, or forwards without a backward.
    light_s: float | None = None
    # Calls of forward hooks on modules inside blocks that plain PyTorch would not have made: a block runs once per
    # micro-batch, and again where it is recomputed. Those of compiled blocks are not counted.
    extra_hook_calls: int = 0
    # Of the host's peak, what checkpoints have taken at most: copies, and blocks on their way to the disk. What was
    # told is beside the forecast of the plan itself; None: nobody has simulated it.
    save_peak_bytes: int = 0
    save_told_bytes: int | None = None

    @property
    def light_share(self) -> float | None:
        """How near the last step came to the speed of light: `light_s` of its `step_s`. None: not known."""
        return self.light_s / self.step_s if self.light_s is not None and self.step_s else None

    @property
    def disk_written_bytes_per_step(self) -> int:
        """On average. 0: nothing lives on disk, or before the first step."""
        return self.moved_bytes.get(Lane.DISK_WRITE, 0) // self.num_steps if self.num_steps else 0

    def disk_wear(self, rated_bytes: int | None = None) -> Wear | None:
        """At the pace of the last step. `rated_bytes`: that may be written to the disk in its life. None: nothing lives
        on disk, or before the second step."""
        written_bytes = self.disk_written_bytes_per_step
        return wear(written_bytes, self.step_s, rated_bytes) if written_bytes and self.step_s else None

    @property
    def disk_terabytes_per_day(self) -> float:
        """That would be written at the pace of the last step: what a disk's endurance is rated in."""
        found = self.disk_wear()
        return 0.0 if found is None else found.terabytes_per_day

    def __str__(self) -> str:
        """A table of at most 80 columns. The plan has its own: `plan.explain()`."""
        last = f", the last took {self.step_s:.3f} s" if self.step_s else ""
        if self.light_share is not None:
            last += f": {self.light_share:.0%} of the speed of light"
        sizes = [
            (tier, self.plan.limits[tier], self.forecast.by_tier[tier], self.peak_bytes[tier], self.used_bytes[tier])
            for tier in map(Tier, self.peak_bytes)
        ]
        lanes = [lane for lane in self.stall_s | self.moved_bytes if self.stall_s.get(lane) or lane in self.moved_bytes]
        lines = [
            f"{self.num_steps} steps{last}",
            _row("tier", "limit", "forecast", "peak", "in use now"),
            *(_row(tier, *map(format_bytes, row)) for tier, *row in sizes),
            *self._tensors(),
            *([_row("lane", "moved", "waited for")] if lanes else []),
            *(
                _row(lane, format_bytes(self.moved_bytes.get(lane, 0)), f"{self.stall_s.get(lane, 0.0):.3f} s")
                for lane in sorted(lanes)
            ),
            f"evictions {self.evictions}, deviations from the plan {self.deviations}",
        ]
        if self.save_peak_bytes:
            told = "" if self.save_told_bytes is None else f", forecast {format_bytes(self.save_told_bytes)}"
            lines.append(f"host: {format_bytes(self.save_peak_bytes)} at most for checkpoints{told}")
        if "disk" in self.peak_bytes:
            lines.append(self.disk_text())
        if self.extra_hook_calls:
            lines.append(f"hooks inside blocks: {self.extra_hook_calls} calls more than in plain PyTorch")
        if self.update_kernel:
            lines.append(f"updates on the host: {self.update_kernel} kernel")
        return "\n".join(lines)

    def disk_text(self, rated_bytes: int | None = None) -> str:
        found = self.disk_wear(rated_bytes)
        return f"disk: {'nothing was written yet' if found is None else in_words(found)}"

    def _tensors(self) -> list[str]:
        """Of a real GPU: forecast and peak are what torch reserves, what is in use now are tensors."""
        if self.forecast.gpu_reserved_bytes is None:
            return []
        tensors = format_bytes(self.forecast.gpu_peak_bytes)
        return [f"gpu forecast and peak: reserved by torch; {tensors} of the forecast are tensors"]


def _row(name: str, *cells: str) -> str:
    return f"{name:<10}" + "".join(f"{cell:>12}" for cell in cells)


def read_stats(run: Run) -> Stats:
    others = {tier: store for tier, store in run.stores.by_tier.items() if tier is not Tier.GPU}
    return Stats(
        plan=run.plan,
        forecast=run.forecast,
        num_steps=run.num_steps,
        step_s=run.step_s,
        peak_bytes={"gpu": run.gpu.device_peak_bytes, **{str(tier): one.peak_bytes for tier, one in others.items()}},
        used_bytes={"gpu": run.gpu.device_used_bytes, **{str(tier): one.used_bytes for tier, one in others.items()}},
        moved_bytes={str(lane): num_bytes for lane, num_bytes in run.performer.moved_bytes.items()},
        stall_s={str(lane): seconds for lane, seconds in run.flight.stall_s.items()},
        evictions=run.performer.num_evictions,
        deviations=run.executor.num_deviations,
        update_kernel=run.performer.updating.updates.kernel if run.performer.updating.updates is not None else "",
        light_s=light_s_of(run, run.work.last_step),
        extra_hook_calls=sum(hooks.num_extra_calls for hooks in run.inner_hooks.values()),
        save_peak_bytes=run.host.peak_lent_bytes,
        save_told_bytes=None if run.save_forecast is None else run.save_forecast.host_bytes,
    )


def light_s_of(run: Run, computed: Computed | None) -> float | None:
    """None: nobody has measured the GPU, or nobody knows what was computed."""
    if computed is None or run.products is None:
        return None
    dtype = computed.autocast_dtype or main_dtype(run.profile)
    rate = run.products.of("tf32" if dtype == "float32" and _multiplies_in_tf32() else dtype)
    return seconds_at(needed_flop(run.profile, computed.num_samples), rate)


def _multiplies_in_tf32() -> bool:
    """Where it was chosen in torch's newer way, the older one cannot be asked."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"
