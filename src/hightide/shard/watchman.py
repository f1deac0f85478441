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
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hightide.process.forks import Birthplace
from hightide.process.interrupts import safe_point
from hightide.shard.issued import Issued, LaneLog
from hightide.shard.signs import OUTSIDE, Fault, Position, Sign, Standstill, Wait
from hightide.shard.users_thread import Outside, frame_of, line_of, outside
from hightide.shard.verdicts import behind, compare, deadlock, gone_on, in_a_line, in_full, in_words, lost, stuck
from hightide.stores.threads import background

SIGNS, CLOCK = "hightide-signs", "hightide-clock"  # the threads
TOLD_WITHIN_S = 5.0  # so long, at most, one waits until others have been told
LOOK_S = 0.02
LAST_BEATS = 1.5  # after which all have heard that the host of the store ends
BEATS_OF_DOUBT = 5  # a rank whose connection is closed, and that gave no sign for so many, is dead
BEATS_OF_GPU = 30  # so long a GPU may compute without anything seen of it
SIGNS_AGAIN = 2  # of each rank, until a standstill is believed


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


class RankFailure(RuntimeError):
    """This rank cannot go on, because of another one. The message names both, and what was waited for."""


class Store(Protocol):
    """What is needed of a store of torch.distributed: a connection of its own, which nobody else uses."""

    def set(self, key: str, value: str, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


class Standing(NamedTuple):
    """What the lanes of this rank do, and the thread that runs the model."""

    waits: bool  # that thread does, for a lane
    is_idle: bool  # lanes do, but for those that wait for other ranks
    at_others: tuple[tuple[str, ...], ...]  # of each of these that is at work, the names of lanes that it issues on
    num_done: int  # another number as soon as one of them does something
    on_gpu: bool = False


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
        store: Store,
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
        """`callers_lane`, and lanes that are `apart` from the thread that runs the model: see [Note: two lanes] in
        verdicts.py. `members`: what torch.distributed calls the ranks."""
        self.rank, self.world, self.patience = rank, world, patience
        self.doing = "the start"  # for messages; whoever does something says so
        self.calls: Counter[str] = Counter()  # of the model, backward and step()
        self.is_evaluating = False
        self.break_off: Callable[[], object] = lambda: None
        self.owes_others: Callable[[], bool] = lambda: True  # see [Note: two lanes] in verdicts.py
        self.standing: Callable[[], Standing | None] = lambda: None  # see [Note: standstill] there; None: nobody knows
        self.circles: dict[str, tuple[int, ...]] = {}  # by lane, who takes part, where it is not all
        self._callers_lane, self._apart = callers_lane, apart
        self._members = tuple(range(world)) if members is None else tuple(members)
        self._users_thread = threading.get_ident()
        self._outside: Outside | None = None  # a collective of the user's own that is under way
        self._num_outside = 0  # so many were seen
        self._left_alone, self._stuck = Lasting(), Lasting()
        self._first_beats: dict[int, int] = {}  # of those that are stuck, when it was first seen
        self._own: Sign | None = None  # the last one
        self._store, self._host, self._host_rank = store, host, host_rank  # who hosts the store; None: no rank
        self._logs = {lane: LaneLog(lane) for lane in lanes}
        self._others: dict[int, _Other] = {}
        self._lock = threading.Lock()
        self._beat = 0
        self._fault: Fault | None = None
        self._failure: RankFailure | None = None
        self._ended: str | None = None
        self._lost_store: str | None = None
        self._heard_s = 0.0  # when the store last answered
        self._warned: set[tuple[str, int]] = set()
        self._num_asked = self._num_told = 0  # signs that somebody waits for
        self._give, self._look = threading.Event(), threading.Event()  # wake the threads
        self._over, self._broken_off = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._birthplace = Birthplace()

    # ---- begin and end

    def give_first_sign(self) -> None:
        self._store.set(self._key(self.rank), self._sign().to_json())

    def begin(self) -> None:
        now_s = self._heard_s = time.monotonic()
        signs = self._read([rank for rank in range(self.world) if rank != self.rank])
        self._others = {rank: _Other(sign, now_s) for rank, sign in signs.items()}
        self._threads = [background(SIGNS, self._give_signs), background(CLOCK, self._watch)]
        atexit.register(self._at_exit)

    def end(self, why: str = "it has ended") -> None:
        """The others are told, so that none takes this rank for dead."""
        if self._ended is not None or not self._birthplace.is_here:
            return
        atexit.unregister(self._at_exit)
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

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # what has ended the program
        self.end("it has ended" if error is None else f"it has ended with {in_a_line(error)}")

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

    @property
    def moment(self) -> str:
        """Which parameters a rank means, in the name of a collective: ranks that have called step() unequally often
        differ, and ranks of which one evaluates."""
        steps = self.calls["step()"]
        return f"{', of an evaluation,' if self.is_evaluating else ''} after {steps} step{'' if steps == 1 else 's'}"

    def issue(self, lane: str, name: str, is_through: Callable[[], bool] = lambda: False) -> Issued:
        """Before a collective. The caller waits for it, and then calls `through`; or it is put on a stream, and is
        asked whether it is through."""
        self.check()
        with self._lock:
            return self._logs[lane].add(name, time.monotonic(), is_through)

    def through(self, issued: Issued) -> None:
        with self._lock:
            self._logs[issued.lane].through()

    def check(self) -> None:
        """RankFailure when a fault is known."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: the others are told, and all its collectives are broken off."""
        if not isinstance(error, RankFailure):
            self._declare(Fault(self.rank, f"rank {self.rank} raised {in_a_line(error)} (at {self.doing})"))
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
        return Fault(self.rank, f"rank {self.rank} could not do {in_full(issued)}: {in_a_line(error)}")

    def _who_hosts(self) -> str:
        other = self._others.get(-1 if self._host_rank is None else self._host_rank)
        return f"{self._host}{'' if other is None else f' (at {other.sign.doing})'}, which hosts the store,"

    def _known(self) -> RankFailure:
        assert self._failure is not None
        return self._failure

    # ---- faults

    def _declare(self, fault: Fault) -> None:
        with self._lock:
            if self._fault is None:
                self._fault = fault
                self._failure = RankFailure(f"rank {self.rank}{self._waiting()} cannot go on: {fault.text}")
        self._look.set()  # the clock's thread breaks off

    def _waiting(self) -> str:
        now_s = time.monotonic()
        waits = [
            f"{now_s - oldest.since_s:.1f} s for {in_full(oldest)}"
            for log in self._logs.values()
            if (oldest := log.oldest()) is not None
        ]
        return f", at {self.doing}, waited {', '.join(waits)}, and" if waits else f", at {self.doing},"

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
        frame = frame_of(self._users_thread)
        self._look_outside(outside(frame))
        where, lanes = line_of(frame), self.standing()
        del frame  # and all that it holds
        with self._lock:
            self._beat += 1
            positions = {lane: Position.of(log) for lane, log in self._logs.items() if log.number}
            still = None if lanes is None else self._standstill(lanes)
            self._own = Sign(
                self._beat, self.doing, positions, self._fault, self._ended, where, dict(self.calls), still
            )
            return self._own

    def _look_outside(self, found: Outside | None) -> None:
        if found is not None and (self._outside is None or found.frame is not self._outside.frame):
            self._num_outside += 1
        self._outside = found

    def _standstill(self, lanes: Standing) -> Standstill | None:
        """None: something is done here. See [Note: standstill] in verdicts.py."""
        under_way = {
            lane: oldest
            for lane, log in self._logs.items()
            if lane not in self._apart and (oldest := log.oldest()) is not None
        }
        is_stopped = lanes.waits or self._callers_lane in under_way or self._outside is not None
        if not (is_stopped and lanes.is_idle and all(not under_way.keys().isdisjoint(at) for at in lanes.at_others)):
            return None
        everyone = tuple(range(self.world))
        waits = [
            Wait(lane, oldest.number, oldest.name, self.circles.get(lane, everyone))
            for lane, oldest in under_way.items()
        ]
        if self._outside is not None:
            members = tuple(self._members.index(one) for one in self._outside.members if one in self._members)
            waits.append(Wait(OUTSIDE, 0, self._outside.name, members))
        counted = (log.number + log.num_through for log in self._logs.values())
        moment = lanes.num_done + self._num_outside + sum(counted)
        return Standstill(moment, tuple(waits)) if waits else None

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
            self._lost_store = in_a_line(error)
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
                fault = Fault(self.rank, f"rank {self.rank} raised {in_a_line(error)} (at {self.doing})")
            if fault is not None:
                self._declare(fault)
                self._give.set()
            if self._fault is not None:
                try:
                    self.break_off()
                finally:
                    self._broken_off.set()
                self._tell_outside()
                return
            self._look.wait(self.patience.beat_s)
            self._look.clear()

    def _tell_outside(self) -> None:
        """A rank that waits in a collective of the user's own, which is not broken off: it ends when the others do, and
        its exception will not say why."""
        waiting, failure = outside(frame_of(self._users_thread)), self._failure
        if waiting is not None and failure is not None:
            with suppress(Warning):
                warnings.warn(f"{OUTSIDE}.{waiting.name}() waits for ranks that do not come: {failure}", stacklevel=2)

    def _forgive(self, now_s: float) -> None:
        with self._lock:
            self._heard_s = now_s
            for other in self._others.values():
                other.heard_s = now_s

    def _find_fault(self, now_s: float) -> Fault | None:
        with self._lock:
            signs = {rank: other.sign for rank, other in self._others.items()}
            silent_s = {rank: self._heard_s - other.heard_s for rank, other in self._others.items()}
            waits = [oldest for log in self._logs.values() if (oldest := log.oldest()) is not None]
            found = (compare(self.rank, self._logs, rank, sign) for rank, sign in signs.items())
            fault = next((one for one in found if one is not None), None)
        if fault is not None:
            return fault
        if not waits:
            return None
        oldest = min(waits, key=lambda issued: issued.since_s)
        fault = lost(waits, signs, silent_s, self.patience.silent_s) or self._deaf(now_s)
        fault = fault or self._gone_on(signs, now_s) or self._deadlock(signs, now_s)
        return fault or self._late(oldest, signs, now_s - oldest.since_s)

    def _deaf(self, now_s: float) -> Fault | None:
        deaf_s = now_s - self._heard_s
        if self._lost_store is not None and deaf_s > BEATS_OF_DOUBT * self.patience.beat_s:
            return Fault(None, f"{self._who_hosts()} is gone ({self._lost_store})")
        if deaf_s > self.patience.silent_s:
            return Fault(None, f"{self._who_hosts()} has not answered for {deaf_s:.0f} s")
        return None

    def _gone_on(self, signs: Mapping[int, Sign], now_s: float) -> Fault | None:
        fault, waited = None, None
        if self._callers_lane in self._logs and not self.owes_others():
            with self._lock:
                waited = self._logs[self._callers_lane].oldest()
                numbers = {lane: log.number for lane, log in self._logs.items()}
            if waited is not None:
                fault = gone_on(self.rank, waited, numbers, signs, self._apart)
        lasts_s = self._left_alone.for_s(None if fault is None or waited is None else waited.number, now_s)
        return fault if lasts_s >= BEATS_OF_DOUBT * self.patience.beat_s else None

    def _deadlock(self, signs: Mapping[int, Sign], now_s: float) -> Fault | None:
        if self._own is None:
            return None
        signs = {**signs, self.rank: self._own}
        ranks = stuck(signs)
        moments = tuple((rank, still.moment) for rank in ranks if (still := signs[rank].standstill) is not None)
        lasts_s = self._stuck.for_s(moments or None, now_s)
        if not lasts_s:
            self._first_beats = {rank: signs[rank].beat for rank in ranks}
        lanes = self.standing()
        beats = BEATS_OF_GPU if lanes is not None and lanes.on_gpu else BEATS_OF_DOUBT
        came_again = all(signs[rank].beat >= self._first_beats[rank] + SIGNS_AGAIN for rank in ranks)
        return deadlock(ranks, signs) if ranks and came_again and lasts_s >= beats * self.patience.beat_s else None

    def _late(self, oldest: Issued, signs: Mapping[int, Sign], waited_s: float) -> Fault | None:
        """Somebody who lives, and does something else."""
        late = behind(oldest, signs)
        found = "; ".join(f"rank {rank} is at {signs[rank].at}" for rank in late) or "all ranks have come to it"
        if waited_s > self.patience.timeout_s:
            remedy = f"A rank that may take longer needs a larger timeout_s than {self.patience.timeout_s:g}"
            text = f"{in_full(oldest)} was not through within {waited_s:.0f} s: {found}. {remedy}"
            return Fault(late[0] if len(late) == 1 else None, text)
        if waited_s > self.patience.warn_s and (oldest.lane, oldest.number) not in self._warned:
            self._warned.add((oldest.lane, oldest.number))
            warnings.warn(
                f"rank {self.rank} has waited {waited_s:.0f} s for {in_full(oldest)}: {found}. It gives up after "
                f"{self.patience.timeout_s:g} s (timeout_s)",
                stacklevel=2,
            )
        return None
