"""A batch of one of several ranks that no plan was made for: all ranks keep their plan, move to another, or refuse.

[Note: larger batches of ranks] Ranks have batches of different shapes in the same step, and one plan. So each tells at
the beginning of every training forward whether it has a batch that is larger than all before: one byte, in the user's
thread, over the lane of control. Nothing else could tell it in time: what ranks exchange at the end of a backward is
before the next batch is known, and once the others have begun their forward, they wait for this rank's gathers under
the old plan. It took 0.2 to 0.3 ms with two ranks on two busy cores (bench/exchange.py), as much as the exchange at the
end of each backward; and the thread that waits is ahead of a GPU, as a rule.

Where somebody has one, all come here. Those that have one profile it, and tell the profile; the first rank plans for
all of them, or finds that the plan holds them or that nothing does; and all do the same: each verifies the plan and
goes over to it, or raises the same refusal before anything has begun. What any rank raises meanwhile ends all of
them. What they know of batches is the same on all ranks, so the next question is too."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace

from hightide.ir import codec
from hightide.ir.block import ModelProfile
from hightide.ir.plan import Plan
from hightide.ir.refusal import RefusedArgument
from hightide.observe.larger_batches import LARGEST, Larger, LargerBatches
from hightide.observe.ranked_watch import RankedWatch, no_room
from hightide.observe.watch import Watch
from hightide.planner.advice.missing import of_node
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.solution import Searched, Solution
from hightide.profiler.model.batch_sizes import BatchSizes
from hightide.profiler.model.call_tree import Arguments
from hightide.runtime.run import Run
from hightide.shard.agreement import from_first, of_each
from hightide.shard.collectives import Collectives


class RankedLargerBatches(LargerBatches):
    """An Admission. All ranks call `admit`, whoever has the batch."""

    _movers = "all ranks"

    def __init__(self, run: Run, solution: Solution, collectives: Collectives, fixed: str = "") -> None:
        super().__init__(run, solution, fixed)
        self._collectives = collectives
        self._is_first = collectives.ranks.rank == 0

    def hold_together(self, num_samples: int) -> None:
        """Ranks come here one by one, and plan together only where all know of it: the plan stays."""

    def _searched(self, profile: ModelProfile, quick: bool = False) -> Searched:
        try:
            return super()._searched(profile, quick)
        except InfeasiblePlan as refused:
            raise of_node(refused, len(self._collectives.ranks.ranks_of_node)) from None

    def _of_all(self, batch: Arguments, sizes: BatchSizes) -> tuple[list[Larger], str]:
        """By rank; and why on any of them."""
        watchman = self._collectives.ranks.watchman
        assert watchman is not None and self._run.batches is not None
        is_larger = not self._run.batches.hold(sizes)

        def own() -> bytes:
            profile = self._profiled(batch) if is_larger else None
            told = {
                "sizes": sizes.plain() if is_larger else None,
                "profile": profile and codec.to_json(profile),
                "why": self._kept_from_moving(),
            }
            return json.dumps(told).encode()

        before, watchman.doing = watchman.doing, "profiling a larger batch"
        try:
            rows = [json.loads(row) for row in of_each(self._collectives, "profiles of larger batches", own)]
        finally:
            watchman.doing = before
        found = [
            Larger(
                BatchSizes.from_plain(row["sizes"]),
                row["profile"] and codec.from_json(ModelProfile, row["profile"]),
                f" on rank {rank}",
            )
            for rank, row in enumerate(rows)
            if row["sizes"] is not None
        ]
        return found, next((row["why"] for row in rows if row["why"]), "")

    def _kept_from_moving(self) -> str:
        why = super()._kept_from_moving()
        if not why and self._run.has_gradients:
            why = (
                "gradients in shards do not move: pass the larger batch in the first call of a step, after zero_grad()"
            )
        return why

    def _decided(self, profiles: Sequence[ModelProfile], told: str, why_not: str) -> Searched | None:
        """By the first rank, for all."""
        found: Searched | None = None
        alone = super()._decided

        def decide() -> str:
            nonlocal found
            try:
                found = alone(profiles, told, why_not)
            except RefusedArgument as refusal:
                return json.dumps({"refusal": str(refusal)})
            if found is None:
                return json.dumps({})
            return json.dumps({"plan": codec.to_json(found.plan), "host": found.peaks.host_peak_bytes})

        decided = json.loads(from_first(self._collectives, "a plan for a larger batch", decide))
        if "refusal" in decided:
            raise RefusedArgument(decided["refusal"])
        if "plan" in decided and found is None:
            found = self._elsewhere(codec.from_json(Plan, decided["plan"]), decided["host"])
        return found

    def _elsewhere(self, plan: Plan, host_peak_bytes: int) -> Searched:
        """What the first rank has found."""
        assert plan.profile is not None
        found = Searched.elsewhere(replace(self._posed(plan.profile), profile=plan.profile), plan)
        found.verify()
        return replace(found, peaks=replace(found.peaks, host_peak_bytes=host_peak_bytes))

    def _move_to(self, found: Searched, told: str) -> None:
        """Where all have memory of the host for it, while values move, or nobody does."""
        if problem := no_room(self._run):
            raise RefusedArgument(f"{told}: {problem}. Or {LARGEST}")
        super()._move_to(found, told)

    def _watch(self, found: Searched) -> Watch:
        return RankedWatch(self._run, found, self._collectives)

    def _kept_from_making_room(self) -> str:
        return f"the plan is that of {self._collectives.ranks.world} ranks, of which the others are in their passes"

    def _say(self, text: str) -> None:
        """Once for all ranks."""
        if self._is_first:
            warnings.warn(text, stacklevel=5)
