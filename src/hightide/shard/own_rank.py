"""This rank, as it tells the others of itself: what it is at, what it has issued, what it waits for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from hightide.ir.units import counted
from hightide.shard.issued import Issued, LaneLog
from hightide.shard.signs import ELSEWHERE, OUTSIDE, Fault, Position, Sign, Standstill, Wait
from hightide.shard.users_thread import Outside, frame_of, line_of, outside
from hightide.shard.verdicts import in_full


class Standing(NamedTuple):
    """What the lanes of this rank do, and the thread that runs the model."""

    waits: bool  # that thread does, for a lane
    is_idle: bool  # the lanes are, but for those that wait for other ranks
    at_others: tuple[tuple[str, ...], ...]  # of each of these that is at work, the names under which it issues
    num_done: int  # another number as soon as one of them does something
    on_gpu: bool = False


class OwnRank:
    def __init__(
        self,
        rank: int,
        world: int,
        lanes: Iterable[str],
        callers_lane: str = "",
        apart: Sequence[str] = (),
        members: Sequence[int] | None = None,
    ) -> None:
        """`callers_lane`, and lanes that are `apart` from the thread that runs the model: see [Note: two lanes] in
        verdicts.py. `members`: what torch.distributed calls the ranks."""
        self.rank, self.world = rank, world
        self.doing = "the start"  # for messages; whoever does something says so
        self.calls: Counter[str] = Counter()  # of the model, backward and step()
        self.is_evaluating = False
        self.owes_others: Callable[[], bool] = lambda: True  # see [Note: two lanes] in verdicts.py
        self.standing: Callable[[], Standing | None] = lambda: None  # see [Note: standstill] there; None: nobody knows
        self.circles: dict[str, tuple[int, ...]] = {}  # by lane, who takes part, where it is not all
        self.callers_lane, self.apart = callers_lane, apart
        self.logs = {lane: LaneLog(lane) for lane in lanes}
        self.lock = threading.Lock()  # of the logs
        self.last: Sign | None = None
        self.title = "this model"  # the same on all ranks
        self.beside: Collection[OwnRank] = ()  # of all models of this process
        self.stopped: int | None = None  # the moment in which the user's thread waits in here; None: it does not
        self._members = tuple(range(world)) if members is None else tuple(members)
        self._users_thread = threading.get_ident()
        self._outside: Outside | None = None  # a collective of the user's own that is under way
        self._num_outside = 0  # so many were seen
        self._beat = 0

    @property
    def moment(self) -> str:
        """Which parameters a rank means, in the name of a collective: ranks that have called step() unequally often
        differ, and ranks of which one evaluates."""
        steps = self.calls["step()"]
        return f"{', of an evaluation,' if self.is_evaluating else ''} after {counted(steps, 'step')}"

    # ---- collectives

    def issue(self, lane: str, name: str, is_through: Callable[[], bool]) -> Issued:
        with self.lock:
            return self.logs[lane].add(name, time.monotonic(), is_through)

    def through(self, issued: Issued) -> None:
        with self.lock:
            self.logs[issued.lane].through()

    def waits(self) -> list[Issued]:
        """The oldest of each lane that is not through."""
        with self.lock:
            return [oldest for log in self.logs.values() if (oldest := log.oldest()) is not None]

    def callers_wait(self) -> Issued | None:
        """In the thread that runs the model, once nothing is left to begin on other lanes."""
        if self.callers_lane not in self.logs or self.owes_others():
            return None
        with self.lock:
            return self.logs[self.callers_lane].oldest()

    def waiting_outside(self) -> str | None:
        """In which collective of the user's own."""
        found = outside(frame_of(self._users_thread))
        return None if found is None else f"{OUTSIDE}.{found.name}()"

    def in_words(self) -> str:
        """What it is at, and waits for."""
        now_s = time.monotonic()
        waits = [f"{now_s - oldest.since_s:.1f} s for {in_full(oldest)}" for oldest in self.waits()]
        return f", at {self.doing}, waited {', '.join(waits)}, and" if waits else f", at {self.doing},"

    # ---- signs

    def sign(self, fault: Fault | None = None, ended: str | None = None) -> Sign:
        frame = frame_of(self._users_thread)
        self._look_outside(outside(frame) or self._elsewhere())
        where, standing = line_of(frame), self.standing()
        del frame  # and all that it holds
        with self.lock:
            self._beat += 1
            lanes = {lane: Position.of(log) for lane, log in self.logs.items() if log.number}
            self.stopped = None
            still = None if standing is None else self._standstill(standing)
            self.last = Sign(self._beat, self.doing, lanes, fault, ended, where, dict(self.calls), still)
            return self.last

    def _elsewhere(self) -> Outside | None:
        """The user's thread may wait in another model. Who waits there for what, that model finds out."""
        for other in list(self.beside):
            if other is not self and (moment := other.stopped) is not None:
                return Outside(moment, other.title, other._members, ELSEWHERE)
        return None

    def _look_outside(self, found: Outside | None) -> None:
        if found is not None and (self._outside is None or found.call != self._outside.call):
            self._num_outside += 1
        self._outside = found

    def _standstill(self, standing: Standing) -> Standstill | None:
        """None: something is done here. See [Note: standstill] in verdicts.py."""
        under_way = {
            lane: oldest
            for lane, log in self.logs.items()
            if lane not in self.apart and (oldest := log.oldest()) is not None
        }
        waits_here = standing.waits or self.callers_lane in under_way
        all_wait = standing.is_idle and all(not under_way.keys().isdisjoint(names) for names in standing.at_others)
        num_collectives = sum(log.number + log.num_through for log in self.logs.values())
        moment = standing.num_done + num_collectives + self._num_outside
        self.stopped = moment if waits_here and all_wait else None
        if not (all_wait and (waits_here or self._outside is not None)):
            return None
        everyone = tuple(range(self.world))
        waits = [
            Wait(lane, oldest.number, oldest.name, self.circles.get(lane, everyone))
            for lane, oldest in under_way.items()
        ]
        if self._outside is not None and not waits_here:
            members = tuple(self._members.index(one) for one in self._outside.members if one in self._members)
            waits.append(Wait(self._outside.lane, 0, self._outside.name, members))
        return Standstill(moment, tuple(waits)) if waits else None
