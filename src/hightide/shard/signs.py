"""Signs of life: what each rank tells all others again and again, and how it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from hightide.shard.issued import SHOWN, LaneLog


@dataclass(frozen=True)
class Fault:
    """Why no rank can go on."""

    rank: int | None  # whose fault it is; None: nobody's alone
    text: str  # a whole clause that names the ranks


@dataclass(frozen=True)
class Position:
    """How far a rank has come on one lane."""

    number: int
    digest: str
    names: tuple[str, ...]  # of the last ones, up to that number

    @classmethod
    def of(cls, log: LaneLog) -> Position:
        first = max(1, log.number - SHOWN + 1)
        names = (one.name for number in range(first, log.number + 1) if (one := log.at(number)) is not None)
        return cls(log.number, log.digest, tuple(names))

    def name_of(self, number: int) -> str | None:
        index = number - self.number - 1 + len(self.names)
        return self.names[index] if 0 <= index < len(self.names) else None


@dataclass(frozen=True)
class Sign:
    """A rank, at one moment."""

    beat: int  # differs from one sign to the next
    doing: str  # what it says that it does
    lanes: Mapping[str, Position] = field(default_factory=dict)
    fault: Fault | None = None  # that it knows of
    ended: str | None = None  # it gives no more signs, and why

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Sign:
        data = json.loads(text)
        lanes = {
            lane: Position(position["number"], position["digest"], tuple(position["names"]))
            for lane, position in data["lanes"].items()
        }
        fault = None if data["fault"] is None else Fault(**data["fault"])
        return cls(data["beat"], data["doing"], lanes, fault, data["ended"])
