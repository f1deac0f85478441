"""No rank waits for ever for another one.

[Note: never a hang] Each rank has two threads that sleep nearly always. One gives signs of life into the store of
torch.distributed and reads those of the others. The other has the clock: it looks at what this rank waits for and at
the last signs, and where no wait can end well it declares the fault, tells the others, and breaks off all collectives
(`break_off`), so that whoever waits for one gets an exception. So waits themselves need no deadline and cost nothing.
They are two, because the store hangs too when the process that hosts it is stopped. What the signs say is decided in
verdicts.py.

A rank that is lost matters only to those who wait for it: others may have ended their work, and go on with their own.
A rank that has been stopped itself, and goes on, gives the others time to be heard again.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from hightide.process.forks import Birthplace
from hightide.process.interrupts import safe_point
from hightide.shard.fault_finder import FaultFinder, Heard
from hightide.shard.issued import Issued
from hightide.shard.own_rank import OwnRank
from hightide.shard.signs import BEATS_OF_DOUBT, ENDED, OUTSIDE, Fault, Patience, Sign
from hightide.shard.verdicts import error_in_words, in_full, in_words
from hightide.stores.threads import background

SIGNS, CLOCK = "hightide-signs", "hightide-clock"  # the threads
TOLD_WITHIN_S = 5.0  # so long, at most, one waits until others have been told
LOOK_S = 0.02
LAST_BEATS = 1.5  # after which all have heard that the host of the store ends


class RankFailure(RuntimeError):
    """This rank cannot go on, because of another one. The message names both, and what was waited for."""


class SignStore(Protocol):
    """What is needed of a store of torch.distributed: a connection of its own, which nobody else uses."""

    def set(self, key: str, value: str, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


class _Other:
    """Another rank, as far as is known."""

    def __init__(self, sign: Sign, now_s: float) -> None:
        self.sign, self.heard_s = sign, now_s

    def hear(self, sign: Sign, now_s: float) -> None:
        if sign.beat != self.sign.beat:
            self.sign, self.heard_s = sign, now_s


class Watchman:
    """Of one rank. `begin` when all ranks have given their first sign."""

    def __init__(
        self,
        store: SignStore,
        rank: int,
        world: int,
        lanes: Iterable[str],
        patience: Patience,
        host: str,
        host_rank: int | None,
        callers_lane: str = "",
        apart: Sequence[str] = (),
        members: Sequence[int] | None = None,
    ) -> None:
        """`lanes` and what follows of them: see OwnRank."""
        self.rank, self.world, self.patience = rank, world, patience
        self.own = OwnRank(rank, world, lanes, callers_lane, apart, members)
        self.break_off: Callable[[], object] = lambda: None
        self._faults = FaultFinder(self.own, patience)
        self._store, self._host, self._host_rank = store, host, host_rank  # who hosts the store; None: no rank
        self._others: dict[int, _Other] = {}
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._failure: RankFailure | None = None
        self._ended: str | None = None
        self._lost_store: str | None = None
        self._heard_s = 0.0  # when the store last answered
        self._num_asked = self._num_told = 0  # signs that somebody waits for
        self._give, self._look = threading.Event(), threading.Event()  # wake the threads
        self._over, self._broken_off = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._birthplace = Birthplace()

    @property
    def doing(self) -> str:
        return self.own.doing

    @doing.setter
    def doing(self, what: str) -> None:
        self.own.doing = what

    # ---- begin and end

    def give_first_sign(self) -> None:
        self._store.set(self._key(self.rank), self._sign().to_json())

    def begin(self) -> None:
        now_s = self._heard_s = time.monotonic()
        signs = self._read([rank for rank in range(self.world) if rank != self.rank])
        self._others = {rank: _Other(sign, now_s) for rank, sign in signs.items()}
        self._threads = [background(SIGNS, self._give_signs), background(CLOCK, self._watch)]
        atexit.register(self.end_of_program)

    def end(self, why: str = ENDED) -> None:
        """The others are told, so that none takes this rank for dead."""
        if self._ended is not None or not self._birthplace.is_here:
            return
        atexit.unregister(self.end_of_program)
        if self._host_rank == self.rank and self._fault is not None:
            self._until(self._all_know, TOLD_WITHIN_S)  # the store ends with this process
        self._ended = why
        if self._host_rank == self.rank and self._fault is None:
            self._until(self._all_have_ended, LAST_BEATS * self.patience.beat_s)
        self._over.set()
        self._give.set()  # for the last time
        self._look.set()
        is_deaf = time.monotonic() - self._heard_s > BEATS_OF_DOUBT * self.patience.beat_s
        for thread in self._threads:  # that of signs may hang with the store
            thread.join(timeout=0.0 if is_deaf and thread.name == SIGNS else TOLD_WITHIN_S)

    def end_of_program(self) -> None:
        error = getattr(sys, "last_value", None)  # what has ended the program
        self.end(ENDED if error is None else f"{ENDED} with {error_in_words(error)}")

    def _all_have_ended(self) -> bool:
        with self._lock:
            return all(other.sign.ended is not None for other in self._others.values())

    def _all_know(self) -> bool:
        now_s = time.monotonic()
        with self._lock:
            return all(
                other.sign.fault is not None
                or other.sign.ended is not None
                or now_s - other.heard_s > BEATS_OF_DOUBT * self.patience.beat_s
                for other in self._others.values()
            )

    # ---- collectives

    def issue(self, lane: str, name: str, is_through: Callable[[], bool] = lambda: False) -> Issued:
        """Before a collective. The caller waits for it, and then calls `through`; or it is put on a stream, and is
        asked whether it is through."""
        self.check()
        return self.own.issue(lane, name, is_through)

    def through(self, issued: Issued) -> None:
        self.own.through(issued)

    def check(self) -> None:
        """RankFailure when a fault is known."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: the others are told, and all its collectives are broken off."""
        if not isinstance(error, RankFailure):
            self._declare(Fault(self.rank, f"rank {self.rank} raised {error_in_words(error)} (at {self.doing})"))
            self._tell()
            self._broken_off.wait(TOLD_WITHIN_S)

    def differ(self, text: str) -> RankFailure:
        """All ranks find the same difference at the same moment: nobody needs to be told."""
        self._declare(Fault(None, text))
        return self._known()

    def explain(self, issued: Issued, error: BaseException) -> RankFailure:
        """A collective has failed. The cause is known soon: another rank has told it, or gives no more signs."""
        since_s = time.monotonic()
        doubt_s = BEATS_OF_DOUBT * self.patience.beat_s
        while self._failure is None and time.monotonic() - since_s < doubt_s:
            self._give.set()  # reads, too
            time.sleep(LOOK_S)
            safe_point()
        if self._failure is None:
            self._declare(self._cause(issued, error, doubt_s))
            self._tell()
        return self._known()

    def _cause(self, issued: Issued, error: BaseException, doubt_s: float) -> Fault:
        now_s = time.monotonic()
        with self._lock:
            heard = {rank: self._heard_s - other.heard_s for rank, other in self._others.items()}
        dead = [rank for rank, silent_s in heard.items() if silent_s > doubt_s - self.patience.beat_s]
        if self._lost_store is not None:
            return Fault(None, f"{self._who_hosts()} is gone ({self._lost_store})")
        if now_s - self._heard_s > doubt_s - self.patience.beat_s:
            return Fault(None, f"{self._who_hosts()} does not answer, and a connection is closed")
        if dead:
            text = f"{in_words(dead)} died: no sign of life for {doubt_s:.0f} s, and a connection is closed"
            return Fault(dead[0], text)
        return Fault(self.rank, f"rank {self.rank} could not do {in_full(issued)}: {error_in_words(error)}")

    def _who_hosts(self) -> str:
        other = self._others.get(-1 if self._host_rank is None else self._host_rank)
        return f"{self._host}{'' if other is None else f' (at {other.sign.doing})'}, which hosts the store,"

    def _known(self) -> RankFailure:
        assert self._failure is not None
        return self._failure

    # ---- faults

    def _declare(self, fault: Fault) -> None:
        waited = self.own.in_words()
        with self._lock:
            if self._fault is None:
                self._fault = fault
                self._failure = RankFailure(f"rank {self.rank}{waited} cannot go on: {fault.text}")
        self._give.set()
        self._look.set()  # the clock's thread breaks off

    def _tell(self) -> None:
        """At once, if the store answers."""
        with self._lock:
            self._num_asked += 1
            number = self._num_asked
        self._until(lambda: self._num_told >= number, TOLD_WITHIN_S)

    def _until(self, holds: Callable[[], bool], within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while self._threads and not holds() and time.monotonic() < deadline_s and self._lost_store is None:
            self._give.set()  # reads, too
            time.sleep(LOOK_S)

    # ---- the thread of signs

    def _key(self, rank: int) -> str:
        return f"sign/{rank}"

    def _sign(self) -> Sign:
        with self._lock:
            fault, ended = self._fault, self._ended
        return self.own.sign(fault, ended)

    def _give_signs(self) -> None:
        try:
            while True:
                self._give.clear()
                is_last, num_asked = self._over.is_set(), self._num_asked
                self._store.set(self._key(self.rank), self._sign().to_json())
                self._num_told = num_asked
                if is_last:
                    return
                self._hear()
                if self._host_rank in self._others and self._others[self._host_rank].sign.ended is not None:
                    return  # no store any more
                self._give.wait(self.patience.beat_s)
        except Exception as error:  # the store is gone
            self._lost_store = error_in_words(error)
            self._look.set()

    def _read(self, ranks: Sequence[int]) -> dict[int, Sign]:
        texts = self._store.multi_get([self._key(rank) for rank in ranks]) if ranks else []
        return {rank: Sign.from_json(text.decode()) for rank, text in zip(ranks, texts, strict=True)}

    def _hear(self) -> None:
        signs = self._read([rank for rank, other in self._others.items() if other.sign.ended is None])
        now_s = time.monotonic()
        with self._lock:
            self._heard_s = now_s
            for rank, sign in signs.items():
                self._others[rank].hear(sign, now_s)
        for sign in signs.values():
            if sign.fault is not None:
                self._declare(sign.fault)

    # ---- the clock

    def _watch(self) -> None:
        last_s = time.monotonic()
        while not self._over.is_set() or self._fault is not None:
            now_s = time.monotonic()
            if now_s - last_s > self.patience.silent_s / 2:  # this process was stopped, or its machine slept
                self._forgive(now_s)
            last_s = now_s
            try:
                fault = self._find_fault(now_s) if self._fault is None else None
            except Exception as error:  # a warning, where those are errors: nobody would watch any more
                fault = Fault(self.rank, f"rank {self.rank} raised {error_in_words(error)} (at {self.doing})")
            if fault is not None:
                self._declare(fault)
            if self._fault is not None:
                try:
                    self._tell_outside()
                    self.break_off()
                finally:
                    self._broken_off.set()
                return
            self._look.wait(self.patience.beat_s)
            self._look.clear()

    def _tell_outside(self) -> None:
        """A rank that waits in a collective of the user's own, which is not broken off: it ends when the others do, and
        its exception will not say why. So they wait until it has said so."""
        waiting, failure = self.own.waiting_outside(), self._failure
        if waiting is not None and failure is not None:
            with suppress(Warning):
                warnings.warn(f"{waiting} waits for ranks that do not come: {failure}", stacklevel=2)
        with self._lock:
            signs = [other.sign for other in self._others.values()]
        if any(wait.lane == OUTSIDE for sign in signs if sign.standstill for wait in sign.standstill.waits):
            self._until(self._all_know, BEATS_OF_DOUBT * self.patience.beat_s)

    def _forgive(self, now_s: float) -> None:
        with self._lock:
            self._heard_s = now_s
            for other in self._others.values():
                other.heard_s = now_s

    def _find_fault(self, now_s: float) -> Fault | None:
        with self._lock:
            signs = {rank: other.sign for rank, other in self._others.items()}
            silent_s = {rank: self._heard_s - other.heard_s for rank, other in self._others.items()}
            heard = Heard(signs, silent_s, self._heard_s, self._who_hosts(), self._lost_store)
        return self._faults.find(heard, now_s)
