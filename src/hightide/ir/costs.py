"""How long the parts of a model's step take on one GPU: measured by a rehearsal, or estimated. No decisions."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from hightide.ir import codec
from hightide.ir.activation import Activation
from hightide.ir.foreign import quoted, shown


@dataclass(frozen=True)
class Point:
    num_samples: int
    value: float


@dataclass(frozen=True)
class Curve:
    """Seconds, or bytes, at several sizes of a micro-batch: linear in between, proportional outside."""

    points: tuple[Point, ...]  # by size, ascending; none: always zero

    def __post_init__(self) -> None:
        sizes = [point.num_samples for point in self.points]
        if sizes != sorted(set(sizes)) or min(sizes, default=1) < 1 or min(self.values, default=0.0) < 0:
            raise ValueError(
                f"a curve needs growing sizes from 1 and values from 0, not {quoted(self.points)}; measure again"
            )

    @property
    def values(self) -> list[float]:
        return [point.value for point in self.points]

    def at(self, num_samples: int) -> float:
        if not self.points or num_samples == 0:
            return 0.0
        right = bisect_left(self.points, num_samples, key=lambda point: point.num_samples)
        if right == len(self.points) or right == 0 or self.points[right].num_samples == num_samples:
            known = self.points[min(right, len(self.points) - 1)]
            return known.value * num_samples / known.num_samples
        low, high = self.points[right - 1], self.points[right]
        share = (num_samples - low.num_samples) / (high.num_samples - low.num_samples)
        return low.value + share * (high.value - low.value)


@dataclass(frozen=True)
class SelectiveCost:
    """Under Activation.SELECTIVE."""

    forward_s: Curve
    recompute_s: Curve
    is_measured: bool = False  # False: estimated, from what the other two take


@dataclass(frozen=True)
class CallCost:
    """One micro-batch of a call of this kind (ir.block.CallSpec.kind)."""

    forward_s: Curve  # so that backward can recompute
    forward_kept_s: Curve  # with everything kept that backward needs
    recompute_s: Curve
    backward_s: Curve  # without recomputation
    issue_s: float = 0.0  # of one forward and backward: what the thread that runs the model needs beside the GPU
    selective: SelectiveCost | None = None

    def forward(self, activation: Activation) -> Curve:
        if activation is Activation.KEEP:
            return self.forward_kept_s
        return self.selective.forward_s if activation is Activation.SELECTIVE and self.selective else self.forward_s

    def repeated(self, activation: Activation) -> Curve:
        """By backward, of forward."""
        if activation is Activation.KEEP:
            return Curve(())
        return self.selective.recompute_s if activation is Activation.SELECTIVE and self.selective else self.recompute_s


@dataclass(frozen=True)
class CallPeaks:
    """What one micro-batch of a call of this kind took on the GPU, in bytes. As in ir.block.CallSpec."""

    forward_bytes: Curve
    kept_bytes: Curve
    backward_bytes: Curve
    selective_bytes: Curve = Curve(())  # kept under Activation.SELECTIVE; none: not measured


@dataclass(frozen=True)
class LossCost:
    """Of one tile of the fused projection and loss. A smaller tile takes its share."""

    tile_tokens: int
    forward_s: float
    backward_s: float  # of kept logits
    project_s: float  # what logits that were not kept add to that

    def __post_init__(self) -> None:
        if self.tile_tokens < 1:
            raise ValueError(f"a tile of the loss has {self.tile_tokens} tokens, and needs 1: rehearse the model again")


@dataclass(frozen=True)
class Costs:
    source: str  # "measured on ...", or "estimated for ..."
    fingerprint: str  # of the model
    calls: tuple[CallCost, ...]  # by kind
    loss: LossCost | None  # None: the model has no fused head
    memory_bytes_per_s: float  # bytes read and written by simple kernels: clearing, copies, norms, conversions
    update_bytes_per_s: float  # bytes that an update on the GPU touches, each array once
    glue_s: float = 0.0  # per step: the model's own code between blocks
    peaks: tuple[CallPeaks, ...] = ()  # by kind; none: not measured
    # How much longer blocks take under a load without a pause, as training is, than in the moments that were timed
    load_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("memory_bytes_per_s", "update_bytes_per_s", "load_factor"):
            rate = getattr(self, name)
            if not (rate > 0 and math.isfinite(rate)):
                raise ValueError(f"{name} of these costs is {rate}; it must be more than 0: rehearse the model again")

    @property
    def is_measured(self) -> bool:
        return self.source.startswith("measured")

    @property
    def is_compiled(self) -> bool:
        """Blocks were rehearsed as torch.compile makes them."""
        return self.is_measured and self.source.endswith(", compiled")

    def save(self, path: str | Path) -> None:
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        costs = codec.load(cls, path, "costs")
        codec.check_numbers(costs, shown(path))
        return costs
