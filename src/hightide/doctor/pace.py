"""How fast lanes are while others are busy too. Work is repeated in the lanes' own threads and streams, so that what is
measured is what a run does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hightide.ir.tier import Lane
from hightide.runtime.lanes.lanes import Lanes

Work = Callable[[], int]  # one piece, to its end; returns the bytes that it moved or touched

MIN_PIECES = 2
POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Piece:
    """Of work that is through."""

    start_s: float
    end_s: float
    num_bytes: int


@dataclass(frozen=True)
class Pace:
    bytes_per_s: float
    piece_s: tuple[float, ...]  # of each piece


def measure_together(lanes: Lanes, works: Mapping[Lane, Work], window_s: float) -> dict[Lane, Pace]:
    """The pace of each lane while exactly these are busy: by the pieces that lie wholly inside a window of at least
    `window_s` in which all of them run."""
    over = threading.Event()
    repeated = {lane: _Repeated(work, over) for lane, work in works.items()}
    tickets = {lane: lanes.submit(f"measure {lane}", lane, 0, [], one.run) for lane, one in repeated.items()}
    try:
        _wait_for(lanes, lambda: all(one.pieces for one in repeated.values()))
        begin_s = time.perf_counter()

        def is_enough() -> bool:
            counts = (len(one.inside(begin_s, time.perf_counter())) for one in repeated.values())
            return time.perf_counter() >= begin_s + window_s and min(counts) >= MIN_PIECES

        _wait_for(lanes, is_enough)
        end_s = time.perf_counter()
    finally:
        over.set()
    for lane, ticket in tickets.items():
        lanes.wait(ticket, lane)
    return {lane: _pace(one.inside(begin_s, end_s)) for lane, one in repeated.items()}


class _Repeated:
    def __init__(self, work: Work, over: threading.Event) -> None:
        self._work, self._over = work, over
        self.pieces: list[Piece] = []

    def run(self) -> None:
        while not self._over.is_set():
            start_s = time.perf_counter()
            num_bytes = self._work()
            self.pieces.append(Piece(start_s, time.perf_counter(), num_bytes))

    def inside(self, begin_s: float, end_s: float) -> list[Piece]:
        return [piece for piece in list(self.pieces) if piece.start_s >= begin_s and piece.end_s <= end_s]


def _pace(pieces: list[Piece]) -> Pace:
    """From the first start to the last end: pieces follow each other without a gap."""
    seconds = pieces[-1].end_s - pieces[0].start_s
    return Pace(sum(piece.num_bytes for piece in pieces) / seconds, tuple(p.end_s - p.start_s for p in pieces))


def _wait_for(lanes: Lanes, is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + lanes.timeout_s
    while not is_true():
        lanes.check()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"a measurement was not through after {lanes.timeout_s:g} s: this machine is overloaded")
        time.sleep(POLL_S)
