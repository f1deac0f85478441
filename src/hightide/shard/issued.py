"""The log of what this rank has issued on one lane of collectives, in order."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

DIGEST_BYTES = 8
REMEMBERED = 1024  # collectives by which a rank that is behind is compared
SHOWN = 8  # names that travel with a sign of life


@dataclass(frozen=True, slots=True)
class Issued:
    """One collective. All ranks issue the same ones in the same order."""

    lane: str
    number: int  # on its lane, from 1
    name: str
    digest: str  # of all names up to this one
    since_s: float


class LaneLog:
    """Numbers and names; a digest of all names, so that two ranks can be compared by their last one."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.number = 0
        self.digest = ""
        self.num_through = 0
        self._recent: deque[Issued] = deque(maxlen=REMEMBERED)
        self._under_way: deque[tuple[Issued, Callable[[], bool]]] = deque()

    def add(self, name: str, since_s: float, is_through: Callable[[], bool]) -> Issued:
        self.number += 1
        self.digest = hashlib.blake2b(f"{self.digest}\n{name}".encode(), digest_size=DIGEST_BYTES).hexdigest()
        issued = Issued(self.lane, self.number, name, self.digest, since_s)
        self._recent.append(issued)
        self._under_way.append((issued, is_through))
        return issued

    def through(self) -> None:
        """The oldest is, as whoever waited for it says."""
        self._under_way.popleft()
        self.num_through += 1

    def oldest(self) -> Issued | None:
        """The first that is not through."""
        while self._under_way and self._under_way[0][1]():
            self.through()
        return self._under_way[0][0] if self._under_way else None

    def at(self, number: int) -> Issued | None:
        """One of the last ones."""
        index = number - self.number - 1 + len(self._recent)
        return self._recent[index] if 0 <= index < len(self._recent) else None
