"""The floor of a wrapped model's step: what each lane would need if it were alone.

Compute is the step with everything on the GPU, which is another run; links and host update are measured here, on the
run's own chunks, when its steps are done (the update runs with a learning rate of zero).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hightide.doctor.rates import best_s
from hightide.ir.chunk import ChunkSpec


def measure(run: Any, moved_bytes_per_step: dict[str, float], repeats: int = 3) -> dict[str, float]:
    """Seconds per step of each lane alone, and the rates behind them."""
    chunks = run.chunks
    host_chunks = [
        spec for spec in chunks.specs if spec.optimised_numel and not chunks.placed[spec.index].is_updated_on_gpu
    ]
    numel = sum(spec.optimised_numel for spec in host_chunks)
    update_s = best_s(lambda: [_update(run, spec) for spec in host_chunks], repeats) if host_chunks else 0.0
    rates = {way: _link_rate(run, way, repeats) for way in ("h2d", "d2h")}
    return {
        "update_s": update_s,
        "update_params_per_s": numel / update_s if update_s else 0.0,
        **{f"{way}_s": moved_bytes_per_step.get(way, 0.0) / rate for way, rate in rates.items()},
        **{f"{way}_bytes_per_s": rate for way, rate in rates.items()},
    }


def _update(run: Any, spec: ChunkSpec) -> None:
    updates = run.performer.updating.updates
    hyper = replace(updates._groups.hyper(0), lr=0.0, weight_decay=0.0)
    updates._on_host.update(updates._operands(spec.index), 1, hyper)


def _link_rate(run: Any, way: str, repeats: int) -> float:
    """By copies of a streamed chunk's parameters, from pinned memory and back, as the lanes make them."""
    streamed = [spec for spec in run.chunks.specs if run.chunks.placed[spec.index].is_streamed]
    if not streamed or not torch.cuda.is_available():
        return float("inf")
    home = run.chunks.home(streamed[0].index).view
    there = home.to(run.gpu.device)
    count = max(1, 2**30 // home.nbytes)
    source, target = (home, there) if way == "h2d" else (there, home)

    def copies() -> None:
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return count * home.nbytes / best_s(copies, repeats)
