"""The first steps of several ranks, which are watched together.

[Note: watching together] Each rank looks at its own memory and times. While there is something to compare, all of them
tell what they have seen at the end of every forward and every step: the largest need of memory counts, and the slowest
of each lane (of collectives the fastest, since whoever comes early waits for the others in them). The first rank
decides, and all of them go over to its plan before the same pass, when they have no gradients. What one rank may do
and another not (a recording, a forward that cannot be done once more) none does. A rank that runs out of memory inside
of a block cannot begin again: the others are in the middle of their passes. That ends the run, as it does with DDP.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

from hightide.ir import codec
from hightide.ir.plan import Plan
from hightide.ir.tier import COLLECTIVES, Lane
from hightide.observe.timing import Measured
from hightide.observe.watch import Following, Watch
from hightide.planner.advice.correct import MemoryShortage
from hightide.planner.advice.missing import of_node
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.problem import Problem
from hightide.planner.solution import Searched, Solution
from hightide.runtime.chunks.moving import check_room
from hightide.runtime.run import Run
from hightide.shard.agreement import from_first
from hightide.shard.collectives import Collectives
from hightide.stores.store import OutOfMemory


def no_room(run: Run) -> str:
    """Why nobody moves: the host of this rank, or of another, has no memory for it. "": all have. All ranks ask."""
    problem = ""
    try:
        check_room(run)
    except InfeasiblePlan as refusal:
        problem = str(refusal)
    anywhere = run.any_rank("no room to move to another plan", bool(problem))
    return (problem or "another rank has no memory for a move") if anywhere else ""


class RankedWatch(Watch):
    """An Observer (see runtime/observer.py). What is exchanged depends on nothing that differs between ranks."""

    def __init__(self, run: Run, solution: Searched, collectives: Collectives) -> None:
        super().__init__(run, solution)
        self._collectives = collectives

    def may_repeat(self, can: bool) -> bool:
        return not self._run.any_rank("a forward that cannot be done again", not can)

    def ran_out(self, error: OutOfMemory) -> bool:
        return False

    def end_step(self) -> None:
        was_comparing = self._is_comparing
        super().end_step()
        if was_comparing:
            self._leave()

    def let_in_larger(self) -> None:
        super().let_in_larger()
        self._leave()

    def _leave(self) -> None:
        """Nobody comes back to what is no longer compared."""
        if not self._is_comparing and self._next is None:
            self.is_watching, self._run.observer = False, None

    def _follow(self, following: Following | None) -> None:
        """Before the next pass, when all have ended this one."""
        self._next = following

    def _search(self, problem: Problem) -> Searched:
        try:
            return super()._search(problem)
        except InfeasiblePlan as refused:
            raise of_node(refused, len(self._collectives.ranks.ranks_of_node)) from None

    # -- together --------------------------------------------------------------------------------------------------

    def _is_kept_from_moving(self) -> bool:
        """Gradients in shards stay where they are, and a recording is of one plan."""
        has = self._run.has_gradients or self._run.between_passes is not None
        return self._run.any_rank("a reason to stay under this plan", has)

    def _of_all(
        self, shortage: MemoryShortage | None, measured: Measured | None
    ) -> tuple[MemoryShortage | None, Measured | None]:
        own = {
            "shortage": shortage and [shortage.needed_bytes, shortage.num_ticks, dict(shortage.factors)],
            "measured": measured and [measured.step_s, {str(lane): s for lane, s in measured.lane_s.items()}],
        }
        rows = [json.loads(row) for row in self._collectives.exchange("what was seen", json.dumps(own).encode())]
        return _largest([r["shortage"] for r in rows]), _slowest([r["measured"] for r in rows])

    def _decided(self, decide: Callable[[], Following | None]) -> Following | None:
        found: Following | None = None

        def told() -> str:
            nonlocal found
            found = decide()
            return "" if found is None else json.dumps([codec.to_json(found.solution.plan), found.reason])

        text = from_first(self._collectives, "another plan", told)
        if not text:
            return None
        if found is None:
            plan, reason = json.loads(text)
            searched = codec.from_json(Plan, plan)
            found = Following(Solution.of(searched.profile or self.problem.profile, searched), reason)
            found.solution.verify()
        return found

    def _go_on_with(self, following: Following) -> None:
        if problem := no_room(self._run):
            self._next, self.is_watching, self._run.observer = None, False, None
            self._say(f"{following.reason}. The plan stays: {problem}")
            return
        super()._go_on_with(following)

    def _say(self, text: str) -> None:
        """Once for all ranks."""
        if self._collectives.ranks.rank == 0:
            warnings.warn(text, stacklevel=5)


def _largest(found: list[Any]) -> MemoryShortage | None:
    rows = [row for row in found if row]
    if not rows:
        return None
    factors: dict[int, float] = {}
    for _, _, of_rank in rows:
        for kind, factor in of_rank.items():
            factors[int(kind)] = max(factors.get(int(kind), 0.0), factor)
    return MemoryShortage(max(row[0] for row in rows), max(row[1] for row in rows), factors)


def _slowest(found: list[Any]) -> Measured | None:
    if not all(found):
        return None
    lane_s = {}
    for lane in Lane:
        seconds = [row[1][str(lane)] for row in found]
        lane_s[lane] = min(seconds) if lane in COLLECTIVES else max(seconds)
    return Measured(max(row[0] for row in found), lane_s)
