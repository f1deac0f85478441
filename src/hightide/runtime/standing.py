"""Answers to what the watchman of several ranks asks about this one. Its threads must not keep a run alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from hightide.ir.tier import Lane
from hightide.runtime.schedule.in_flight import InFlight
from hightide.shard.communicators import ACROSS, GATHER, REDUCE, STEP
from hightide.shard.own_rank import Standing
from hightide.shard.watchman import Watchman

ISSUED_ON = {Lane.GATHER: (GATHER,), Lane.REDUCE: (REDUCE, ACROSS, STEP)}  # by a lane's thread


def is_watched_by(watchman: Watchman, flight: InFlight) -> None:
    watchman.own.owes_others = _owes_others(weakref.ref(flight))
    watchman.own.standing = _standing(weakref.ref(flight))


def _owes_others(flight: weakref.ref[InFlight]) -> Callable[[], bool]:
    return lambda: (found := flight()) is None or found.lanes.owes_others


def _standing(flight: weakref.ref[InFlight]) -> Callable[[], Standing | None]:
    def look() -> Standing | None:
        if (found := flight()) is None:
            return None
        is_idle, at_work, num_taken = found.lanes.standing()
        at_others = tuple(ISSUED_ON[lane] for lane in at_work)
        return Standing(
            found.is_waiting, is_idle, at_others, num_taken + found.num_waits, found.lanes.streams.are_on_gpu
        )

    return look
