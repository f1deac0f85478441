"""Signs of life: what each rank tells all others again and again, how it is written, and how long it is waited for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from hightide.shard.issued import SHOWN, LaneLog

ENDED = "it has ended"  # a program, without an exception
OUTSIDE = "torch.distributed"  # in the place of a lane: a collective that is not ours
ELSEWHERE = "another model"  # likewise: whatever it is that another model waits for
BEATS_OF_DOUBT = 5  # a rank whose connection is closed, and that gave no sign for so many, is dead


@dataclass(frozen=True)
class Patience:
    """How long ranks wait for each other."""

    timeout_s: float = 1800.0  # for a rank that lives, and does something else: rank 0 evaluates
    warn_s: float = 60.0  # after which that is said
    silent_s: float = 45.0  # for a rank that gives no sign of life; one that keeps Python's lock gives none either
    beat_s: float = 1.0  # from one sign to the next

    def __post_init__(self) -> None:
        if not 0 < self.beat_s * (BEATS_OF_DOUBT + 1) <= self.silent_s:
            raise ValueError(
                f"silent_s={self.silent_s:g} must be at least {BEATS_OF_DOUBT + 1} times beat_s={self.beat_s:g}, else "
                f"ranks that live are taken for dead; set silent_s={self.beat_s * (BEATS_OF_DOUBT + 1):g} or more"
            )
        if self.timeout_s <= 0 or self.warn_s <= 0:
            raise ValueError(f"timeout_s={self.timeout_s:g} and warn_s={self.warn_s:g} must be above 0")


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
class Wait:
    """For the others that take part in a collective."""

    lane: str  # or OUTSIDE
    number: int  # on its lane; outside there are none
    name: str
    members: tuple[int, ...]  # ranks, itself too


@dataclass(frozen=True)
class Standstill:
    """A rank that does nothing at all until one of its waits ends."""

    moment: int  # another one as soon as something was done
    waits: tuple[Wait, ...]


@dataclass(frozen=True)
class Sign:
    """A rank, at one moment."""

    beat: int  # differs from one sign to the next
    doing: str  # what it says that it does
    lanes: Mapping[str, Position] = field(default_factory=dict)
    fault: Fault | None = None  # that it knows of
    ended: str | None = None  # it gives no more signs, and why
    where: str = ""  # in the user's program
    calls: Mapping[str, int] = field(default_factory=dict)  # of the model, of backward, of step(): how often
    standstill: Standstill | None = None

    @property
    def at(self) -> str:
        return f"{self.doing}, {self.where}" if self.where else self.doing

    def number(self, lane: str) -> int:
        return self.lanes[lane].number if lane in self.lanes else 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Sign:
        data = json.loads(text)
        data["lanes"] = {
            lane: Position(position["number"], position["digest"], tuple(position["names"]))
            for lane, position in data["lanes"].items()
        }
        data["fault"] = None if data["fault"] is None else Fault(**data["fault"])
        if (still := data["standstill"]) is not None:
            waits = tuple(Wait(**{**wait, "members": tuple(wait["members"])}) for wait in still["waits"])
            data["standstill"] = Standstill(still["moment"], waits)
        return cls(**data)
