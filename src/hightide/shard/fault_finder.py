"""Faults for which a rank waits in vain, by what was heard of the others. See [Note: never a hang] in watchman.py."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from hightide.shard.issued import Issued
from hightide.shard.own_rank import OwnRank
from hightide.shard.signs import BEATS_OF_DOUBT, Fault, Patience, Sign
from hightide.shard.verdicts import behind, compare, deadlock, gone_on, in_full, lost, stuck

BEATS_OF_GPU = 30  # so long a GPU may compute without anything seen of it
SIGNS_AGAIN = 2  # of each rank, until a standstill is believed


class Lasting:
    """How long something has been the same."""

    def __init__(self) -> None:
        self._what: Hashable = None
        self._since_s = 0.0

    def for_s(self, what: Hashable, now_s: float) -> float:
        """None: there is nothing."""
        if what is None or what != self._what:
            self._what, self._since_s = what, now_s
        return now_s - self._since_s


class Heard(NamedTuple):
    """Of the other ranks, so far."""

    signs: Mapping[int, Sign]
    silent_s: Mapping[int, float]  # since each gave the latest one, until the store last answered
    last_s: float  # when that was
    host: str  # of the store, in words
    lost_store: str | None  # why it is gone


class FaultFinder:
    def __init__(self, own: OwnRank, patience: Patience) -> None:
        self._own, self._patience = own, patience
        self._left_alone, self._stuck = Lasting(), Lasting()
        self._first_beats: dict[int, int] = {}  # of those that are stuck, when it was first seen
        self._warned: set[tuple[str, int]] = set()

    def find(self, heard: Heard, now_s: float) -> Fault | None:
        signs = heard.signs
        with self._own.lock:
            found = (compare(self._own.rank, self._own.logs, rank, sign) for rank, sign in signs.items())
            fault = next((one for one in found if one is not None), None)
        waits = self._own.waits()
        if fault is not None or not waits:
            return fault
        oldest = min(waits, key=lambda issued: issued.since_s)
        fault = lost(waits, signs, heard.silent_s, self._patience.silent_s) or self._deaf(heard, now_s)
        fault = fault or self._gone_on(signs, now_s) or self._deadlock(signs, now_s)
        return fault or self._late(oldest, signs, now_s - oldest.since_s)

    def _deaf(self, heard: Heard, now_s: float) -> Fault | None:
        deaf_s = now_s - heard.last_s
        if heard.lost_store is not None and deaf_s > BEATS_OF_DOUBT * self._patience.beat_s:
            return Fault(None, f"{heard.host} is gone ({heard.lost_store})")
        if deaf_s > self._patience.silent_s:
            return Fault(None, f"{heard.host} has not answered for {deaf_s:.0f} s")
        return None

    def _gone_on(self, signs: Mapping[int, Sign], now_s: float) -> Fault | None:
        fault, waited = None, self._own.callers_wait()
        if waited is not None:
            with self._own.lock:
                numbers = {lane: log.number for lane, log in self._own.logs.items()}
            fault = gone_on(self._own.rank, waited, numbers, signs, self._own.apart)
        lasts_s = self._left_alone.for_s(None if fault is None or waited is None else waited.number, now_s)
        return fault if lasts_s >= BEATS_OF_DOUBT * self._patience.beat_s else None

    def _deadlock(self, signs: Mapping[int, Sign], now_s: float) -> Fault | None:
        if (own := self._own.last) is None:
            return None
        signs = {**signs, self._own.rank: own}
        ranks = stuck(signs)
        moments = tuple((rank, still.moment) for rank in ranks if (still := signs[rank].standstill) is not None)
        lasts_s = self._stuck.for_s(moments or None, now_s)
        if not lasts_s:
            self._first_beats = {rank: signs[rank].beat for rank in ranks}
        standing = self._own.standing()
        beats = BEATS_OF_GPU if standing is not None and standing.on_gpu else BEATS_OF_DOUBT
        came_again = all(signs[rank].beat >= self._first_beats[rank] + SIGNS_AGAIN for rank in ranks)
        return (
            deadlock(ranks, signs, self._own.callers_lane)
            if ranks and came_again and lasts_s >= beats * self._patience.beat_s
            else None
        )

    def _late(self, oldest: Issued, signs: Mapping[int, Sign], waited_s: float) -> Fault | None:
        """Somebody who lives, and does something else."""
        late = behind(oldest, signs)
        found = "; ".join(f"rank {rank} is at {signs[rank].at}" for rank in late) or "all ranks have come to it"
        if waited_s > self._patience.timeout_s:
            remedy = f"A rank that may take longer needs a larger timeout_s than {self._patience.timeout_s:g}"
            text = f"{in_full(oldest)} was not through within {waited_s:.0f} s: {found}. {remedy}"
            return Fault(late[0] if len(late) == 1 else None, text)
        if waited_s > self._patience.warn_s and (oldest.lane, oldest.number) not in self._warned:
            self._warned.add((oldest.lane, oldest.number))
            warnings.warn(
                f"rank {self._own.rank} has waited {waited_s:.0f} s for {in_full(oldest)}: {found}. It gives up after "
                f"{self._patience.timeout_s:g} s (timeout_s)",
                stacklevel=2,
            )
        return None
