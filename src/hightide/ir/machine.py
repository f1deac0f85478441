"""What a machine can do, as far as a schedule's time depends on it. Measured, or estimated; no decisions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hightide.ir.tier import Lane

SHARING = (Lane.H2D, Lane.D2H, Lane.CPU)  # lanes that meet in host memory


@dataclass(frozen=True)
class Speeds:
    """How fast lanes are while exactly these are busy: bytes moved per second, and for the cpu lane bytes that an
    update touches (each array once)."""

    busy: tuple[Lane, ...]  # in the order of SHARING
    bytes_per_s: tuple[float, ...]


@dataclass(frozen=True)
class Machine:
    name: str
    source: str  # "measured", or where an estimate comes from
    speeds: tuple[Speeds, ...]  # for every set of lanes that can be busy at once
    latency_s: float  # of one transfer, from its issue to its first byte

    def __post_init__(self) -> None:
        missing = [busy for busy in _subsets() if busy not in self._table]
        if missing:
            names = "; ".join("+".join(busy) for busy in missing)
            raise ValueError(f"the machine {self.name!r} has no speeds for: {names}; measure it again")
        for speeds in self.speeds:
            if len(speeds.busy) != len(speeds.bytes_per_s) or min(speeds.bytes_per_s, default=1.0) <= 0:
                raise ValueError(f"the machine {self.name!r} has speeds {speeds}; each busy lane needs one above zero")

    @cached_property
    def _table(self) -> dict[tuple[Lane, ...], dict[Lane, float]]:
        return {speeds.busy: dict(zip(speeds.busy, speeds.bytes_per_s, strict=False)) for speeds in self.speeds}

    def speeds_of(self, busy: set[Lane]) -> dict[Lane, float]:
        return self._table[tuple(lane for lane in SHARING if lane in busy)]


def _subsets() -> list[tuple[Lane, ...]]:
    found: list[tuple[Lane, ...]] = [()]
    for lane in SHARING:
        found += [(*busy, lane) for busy in found]
    return [busy for busy in found if busy]
