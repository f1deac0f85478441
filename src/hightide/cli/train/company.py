"""The ranks that train together under torchrun, as the command sees them: the first one speaks and writes, and what all
must know is exchanged. A run alone is the first of one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import TypeVar

from hightide.asked import chosen_device
from hightide.shard.agreement import from_first, of_each
from hightide.shard.collectives import Collectives
from hightide.shard.meeting import find_ranks
from hightide.shard.signs import Patience

Made = TypeVar("Made")


class Company:
    def __init__(self, collectives: Collectives | None = None) -> None:
        self._collectives = collectives
        self.rank, self.world = (0, 1) if collectives is None else (collectives.ranks.rank, collectives.ranks.world)

    @classmethod
    def find(cls, device: str | None, timeout_s: float = Patience.timeout_s) -> Company:
        """Waits for the others, where torchrun has started some: then "cuda" is a GPU for each."""
        place = chosen_device(device)
        own = place.type if device in (None, "cuda") else place
        ranks = find_ranks(device=own, patience=Patience(timeout_s=timeout_s))
        return cls(None if ranks.is_alone else Collectives(ranks))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, what: str, make: Callable[[], str]) -> str:
        """What the first makes, for all; a ValueError of it is one for all."""
        return make() if self._collectives is None else from_first(self._collectives, what, make)

    def all_or_none(self, what: str, make: Callable[[], Made]) -> Made:
        """What each makes for itself. An error of one is one for all: nobody waits for who has ended."""
        if self._collectives is None:
            return make()
        made: list[Made] = []

        def content() -> bytes:
            made.append(make())
            return b""

        of_each(self._collectives, what, content)
        return made[0]

    def sums(self, what: str, *numbers: float) -> list[float]:
        """Over all ranks. All call this in the same order."""
        if self._collectives is None:
            return list(numbers)
        told = self._collectives.exchange(what, json.dumps(numbers).encode())
        return [sum(column) for column in zip(*map(json.loads, told), strict=True)]

    def first_signal(self, own: signal.Signals | None) -> signal.Signals | None:
        """That any rank has: then all end at the same step."""
        if self._collectives is None:
            return own
        told = self._collectives.exchange("signals", str(int(own or 0)).encode())
        return next((signal.Signals(int(one)) for one in told if int(one)), None)

    def close(self) -> None:
        if self._collectives is not None:
            self._collectives.ranks.close()
