"""One step as it goes by: what each lane does when, and what GPU memory is used for. Simulated and measured steps have
the same form, so that they can be laid side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from hightide.ir import codec
from hightide.ir.action import Op
from hightide.ir.foreign import MAX_COUNT, shown
from hightide.ir.tier import ChunkKind, Lane


class MemoryPart(StrEnum):
    """What GPU memory is used for. What lives longest comes first, and is drawn at the bottom."""

    PERSISTENT = "persistent chunks"  # parameters, gradients and states that stay
    SLOTS = "slots"  # for streamed parameters
    GRADIENTS = "gradient slots"  # with the buffers through which gradients are rounded
    BATCH = "batch and buffers"  # and whatever else is there during the whole step
    INPUTS = "block inputs"  # what blocks hand to each other, until backward has read it, and its gradients
    KEPT = "kept activations"  # all that backward reads, and logits
    SELECTIVE = "activations kept in part"  # what is dear of them, while the rest is computed again
    SWAPPED = "activations being swapped"  # on their way to the host, or back
    TRANSIENTS = "transients"  # inside a block or an update, only while it runs: what is computed again too
    REST = "everything else"  # of a measured run, which knows only the sum of all that is not chunks and slots


@dataclass(frozen=True)
class Bar:
    """One action. Times count from the beginning of the step: the end of compute in the one before."""

    lane: Lane
    id: str
    start_s: float  # negative: begun in the step before
    end_s: float  # beyond the step's end: it reaches into the next
    op: Op | None = None  # None: it is not in the schedule (fetched on demand)
    kind: ChunkKind | None = None
    num_bytes: int = 0  # moved, or touched by an update
    waited_for: str = ""  # the action it waited for last, if its lane was free before that one had ended
    waited_s: float = 0.0  # how long its lane was free by then
    earlier: bool = False  # an action of the step before, which reaches into this one
    held_bytes: int = 0  # of num_bytes: activations that are swapped, and not block inputs


@dataclass(frozen=True)
class Level:
    """GPU bytes from this moment to the next level, one number for each of the timeline's parts."""

    at_s: float
    num_bytes: tuple[int, ...]


@dataclass(frozen=True)
class LaneTime:
    lane: Lane
    busy_s: float  # within the step, whatever step the work belongs to
    stall_s: float  # how long compute waited for it; on the compute lane itself: for nothing that the schedule knows


PART = "passes of a step"


@dataclass(frozen=True)
class Timeline:
    source: str  # "simulated on ..." or "measured on ..."
    fingerprint: str  # of the model
    step_s: float
    gpu_peak_bytes: int  # of tensors
    gpu_reserved_bytes: int | None  # by torch from the driver, at most; None: on the simulated accelerator
    gpu_limit_bytes: int
    lanes: tuple[LaneTime, ...]
    parts: tuple[MemoryPart, ...]
    levels: tuple[Level, ...]  # by time; several may have one time
    bars: tuple[Bar, ...]  # by start
    # What the step's needed operations take at the rate of the GPU's large products. None: the rate, or what was
    # computed, is not known; on the simulated accelerator always
    light_s: float | None = None

    @property
    def is_part(self) -> bool:
        """Of a step: some of its passes, which are alike. `source` says how many."""
        return self.source.endswith(PART)

    @property
    def light_share(self) -> float | None:
        """Of the step."""
        return None if self.light_s is None else self.light_s / self.step_s

    @property
    def gpu_bytes(self) -> int:
        """What the limit is held against: what is reserved where there is a driver, else what tensors take."""
        return self.gpu_peak_bytes if self.gpu_reserved_bytes is None else self.gpu_reserved_bytes

    def save(self, path: str | Path) -> None:
        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        timeline = codec.load(cls, path, "timeline")
        codec.check_numbers(replace(timeline, bars=()), shown(path))  # bars may begin before the step
        codec.check_numbers(timeline.bars, f"{shown(path)}: bars", -MAX_COUNT)
        wrong = [len(level.num_bytes) for level in timeline.levels if len(level.num_bytes) != len(timeline.parts)]
        if wrong or not timeline.step_s or not timeline.lanes:
            raise ValueError(
                f"{shown(path)} has {len(timeline.parts)} parts and levels of {wrong or len(timeline.parts)}, "
                f"{len(timeline.lanes)} lanes and a step of {timeline.step_s} s; record it again"
            )
        return timeline
