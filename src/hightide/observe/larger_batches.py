"""A batch that no plan was made for: the run's plan holds it, or is exchanged for one that does, or it is refused.

Read [Note: larger batches] in runtime/known_batches.py. Costs are estimated here: blocks cannot be timed alone while
the run has the memory. The plan fits all the same. Which blocks may be split was tried before, and stays. Batches that
take another way through the model (no pictures this time) have a profile of their own, and the plan must hold all."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from hightide.ir.block import ModelProfile
from hightide.ir.plan import Plan
from hightide.ir.refusal import Refused, RefusedArgument
from hightide.ir.tier import Tier
from hightide.ir.units import exactly, format_seconds
from hightide.observe.watch import Watch
from hightide.planner.disk_inputs import buffer_bytes, stored_bytes
from hightide.planner.infeasible import InfeasiblePlan, TooFewSlots
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.peaks import needed_bytes
from hightide.planner.problem import Problem
from hightide.planner.search.search import search
from hightide.planner.solution import Searched, Solution
from hightide.planner.wider_profile import wider, with_blocks_of
from hightide.process.interrupts import in_a_line
from hightide.process.progress import LOG, progress_line, tell
from hightide.profiler.model.batch_sizes import BatchSizes
from hightide.profiler.model.call_tree import Arguments
from hightide.profiler.model.model_profile import profile_again
from hightide.runtime.blocks.splits import on_cpu
from hightide.runtime.chunks.moving import check_room
from hightide.runtime.run import Run
from hightide.stores.store import OutOfMemory

LARGEST = "wrap the model with the largest batch of your run as its example"
MOST_STARTS = 3  # profiles for which a plan is made that shall hold all others
SEARCH_ROUNDS = 8  # each with what the one before lacked
ROOM_ROUNDS = 8  # in which it is found how much to keep free for an evaluation
EVAL_MARGIN = 1.1  # on what an evaluation had taken when it ran out: it had not ended


class Larger(NamedTuple):
    """A batch that is larger than all before."""

    sizes: BatchSizes
    profile: ModelProfile | None  # None: without values nothing can be known of it
    where: str = ""  # " on rank 1", of several

    def __str__(self) -> str:
        return f"a batch of {self.sizes}{self.where}"


class LargerBatches:
    """An Admission."""

    _movers = "the model"  # to another plan

    def __init__(self, run: Run, solution: Solution, fixed: str = "") -> None:
        """`fixed`: why the plan must stay as it is; "": another may take its place."""
        self._run, self._fixed = run, fixed
        self._solution = solution
        self._problem = solution.problem if isinstance(solution, Searched) else None
        self._profiles = [run.profile]  # of all batches that a plan must hold
        self._buffer_bytes = run.profile.buffer_bytes
        self._kept_bytes = 0  # free on the GPU, for evaluations; plans count it as always there
        self._is_told_unknown = False

    # -- training --------------------------------------------------------------------------------------------------

    def admit(self, batch: Arguments, sizes: BatchSizes) -> None:
        began_s, run = time.perf_counter(), self._run
        assert run.batches is not None
        if run.observer is not None and not run.executor.has_open_forward:
            run.observer.settle()
        self._catch_up()
        before = str(run.batches)
        with progress_line("hightide plans for a larger batch"):
            found, why_not = self._of_all(batch, sizes)
            known = [(one, one.profile) for one in found if one.profile is not None]
            told = f"{'; '.join(map(str, found))}, where batches had up to {before}"
            for one in found:
                if one.profile is None:
                    self._let_in_unknown(one.sizes)
            following = self._decided([profile for _, profile in known], told, why_not) if known else None
            if following is not None:
                self._move_to(following, told)
            elif run.observer is not None:
                run.observer.let_in_larger()
            if not known:
                return
            for one, profile in known:
                self._remember(profile, one.sizes)
        took = format_seconds(time.perf_counter() - began_s)
        if following is None:
            LOG.info("%s: the plan holds it, which took %s to find out", told, took)
            return
        self._say(
            f"{told}. Planned again, and {self._movers} moved to the new plan, in {took}; results are the same. To do "
            f"it once and for all, {LARGEST}"
        )

    def hold_together(self, num_samples: int) -> None:
        began_s, run = time.perf_counter(), self._run
        self._catch_up()
        told = f"graphs of {num_samples} samples were alive at a time, and the plan has room for {run.plan.num_samples}"
        known, stays = run.profile, "The plan stays: in each step the earlier ones go to the host"
        batch_bytes = -(-known.batch_bytes * num_samples // known.num_samples)
        if why_not := self._kept_from_moving():
            self._say(f"{told}. {stays} ({why_not})")
            return
        with progress_line("hightide plans for several graphs"):
            tell("searching for a plan")
            try:
                found = self._searched(replace(known, num_samples=num_samples, batch_bytes=batch_bytes))
                check_room(run)
            except InfeasiblePlan as refusal:
                self._say(f"{told}. {stays}. {refusal}")
                return
            self._move_to(found, told)
        took = format_seconds(time.perf_counter() - began_s)
        self._say(f"{told}. Planned again, and {self._movers} moved to the new plan, in {took}; results are the same")

    def _of_all(self, batch: Arguments, sizes: BatchSizes) -> tuple[list[Larger], str]:
        """What is larger than all before; and why the plan cannot be exchanged now."""
        return [Larger(sizes, self._profiled(batch))], self._kept_from_moving()

    def _decided(self, profiles: Sequence[ModelProfile], told: str, why_not: str) -> Searched | None:
        """The plan that holds them too. None: the present one does."""
        if self._is_held(profiles):
            return None
        before, self._profiles = self._profiles, [*profiles[1:], *self._profiles]
        try:
            return self._found(profiles[0], told, why_not)
        finally:
            self._profiles = before

    def _catch_up(self) -> None:
        """The first steps may have shown that blocks take more, and have led to another plan: see watch.py."""
        run = self._run
        if run.plan is not self._solution.plan:
            self._solution = Solution.of(run.profile, run.plan)
            self._buffer_bytes = run.profile.buffer_bytes - self._kept_bytes
            self._profiles = [run.profile, *self._profiles[1:]]

    def _profiled(self, batch: Arguments) -> ModelProfile | None:
        """None: without values nothing can be known of it."""
        run = self._run
        tell("profiling the model", "for a larger batch")
        if run.probed.failure:
            return None
        place = run.gpu.device
        with run.splits.probing(), torch.autocast(place.type, enabled=False):
            found = profile_again(run.model, run.profile, run.probed, on_cpu(batch), place)
        return None if found is None else with_blocks_of(found, run.profile)

    def _let_in_unknown(self, sizes: BatchSizes) -> None:
        run = self._run
        if sizes.num_samples > run.plan.num_samples:
            raise RefusedArgument(
                f"a batch of {sizes.num_samples} samples, but the plan holds up to {run.plan.num_samples}; {LARGEST}, "
                "or pass smaller batches and step after several of them"
            )
        assert run.batches is not None
        if not self._is_told_unknown:
            self._is_told_unknown = True
            self._say(
                f"a batch of {sizes}, where batches had up to {run.batches}. What it takes cannot be known without its "
                f"values, so it may run out of memory: {LARGEST}"
            )
        run.batches.add(sizes)

    def _together(self, profile: ModelProfile) -> list[ModelProfile]:
        """One for each way through the model, that of this profile first: each holds all batches of its way so far, and
        whatever is larger nowhere than the largest sizes of all of them together."""
        others = []
        for known in self._profiles:
            both = wider(known, profile)
            if both is None:
                others.append(known)
            else:
                profile = both
        return [profile, *others]

    def _is_held(self, profiles: Sequence[ModelProfile]) -> bool:
        """By the plan as it is, in the memory that was taken for it."""
        try:
            others = [self._under(self._solution, profile) for profile in profiles]
        except InfeasiblePlan:
            return False
        return all(other.peaks.host_peak_bytes <= self._solution.peaks.host_peak_bytes for other in others)

    def _under(self, solution: Solution, profile: ModelProfile) -> Solution:
        """Batches of another profile under the same plan. Raises InfeasiblePlan where that does not hold them."""
        plan, machine = solution.plan, None if self._problem is None else self._problem.machine
        size = min(plan.micro_batch, profile.num_samples)
        profile = self._kept_free(profile)
        other = Solution.of(profile, replace(plan, num_samples=profile.num_samples, micro_batch=size))
        other.verify()
        taken = other.peaks.gpu_peak_bytes if machine is None else needed_bytes(other.passes, other.peaks, machine)
        if taken > plan.gpu_limit_bytes:
            raise InfeasiblePlan(f"it needs {exactly(taken)} of the GPU", tier=Tier.GPU, num_bytes=taken)
        places = stored_bytes(solution.profile, plan)
        for needed, there in (
            (other.peaks.disk_peak_bytes, solution.peaks.disk_peak_bytes),
            (buffer_bytes(profile, other.plan), buffer_bytes(solution.profile, plan)),
            *((room, places.get(call, 0)) for call, room in stored_bytes(profile, other.plan).items()),
        ):
            if needed > there:
                raise InfeasiblePlan(
                    f"block inputs on disk need {exactly(needed)}, where the plan has {exactly(there)}"
                )
        return other

    def _kept_free(self, profile: ModelProfile, more_bytes: int = 0) -> ModelProfile:
        """What is kept free counts as always there."""
        return replace(profile, buffer_bytes=self._buffer_bytes + self._kept_bytes + more_bytes)

    def _found(self, profile: ModelProfile, told: str, why_not: str) -> Searched:
        """A plan that holds this one and all before. `told`: what it is about. `why_not`: it cannot be exchanged."""
        if why_not:
            raise RefusedArgument(
                f"{told}: the plan does not hold it, and cannot be exchanged now ({why_not}). Or {LARGEST}"
            )
        tell("searching for a plan")
        try:
            found = self._searched(profile)
            check_room(self._run)
            return found
        except InfeasiblePlan as refusal:
            raise RefusedArgument(
                f"{told}: planned again, it does not fit. {refusal}. {self._that_fits(profile, refusal)}"
            ) from refusal

    def _searched(self, profile: ModelProfile, quick: bool = False) -> Searched:
        """For all sizes together, or where that is too much, for one that holds the others as they are."""
        together = self._together(profile)
        everything = [profile, *self._profiles]
        starts = [(together[0], together[1:])]
        if together[1:] != self._profiles:
            starts += [(one, [other for other in everything if other is not one]) for one in everything[:MOST_STARTS]]
        refusals = []
        for start, others in starts:
            try:
                return self._holding(start, others, quick)
            except InfeasiblePlan as refusal:
                refusals.append(refusal)
        raise refusals[0]

    def _holding(self, profile: ModelProfile, others: Sequence[ModelProfile], quick: bool) -> Searched:
        """A plan for one that holds the others. It is filled to the brim, as far as the others leave room. Blocks that
        only the others call pass through slots, if it has none for them."""
        more_bytes, slots = 0, 0
        for last in (*[False] * SEARCH_ROUNDS, True):
            found = tight = search(self._posed(profile, quick, more_bytes))
            if slots:  # what was kept free for them is theirs
                found = replace(tight, problem=self._posed(profile, quick)).with_slots(slots)
            try:
                found.verify()
                on_host = [self._under(found, other).peaks.host_peak_bytes for other in others]
            except TooFewSlots as short:
                if last:
                    raise
                slots = max(slots, short.num_slots)
                continue
            except InfeasiblePlan as short:
                if last or short.tier is not Tier.GPU:
                    raise
                of_slots = found.peaks.gpu_peak_bytes - (tight.peaks.gpu_peak_bytes - more_bytes)
                more_bytes = max(more_bytes + short.num_bytes - found.plan.gpu_limit_bytes, of_slots)
                continue
            most = max([found.peaks.host_peak_bytes, *on_host])
            return replace(found, peaks=replace(found.peaks, host_peak_bytes=most))
        raise AssertionError("the last round returns or raises")

    def _posed(self, profile: ModelProfile, quick: bool = False, more_bytes: int = 0) -> Problem:
        problem = self._problem
        assert problem is not None
        profile, terms = self._kept_free(profile, more_bytes), problem.terms
        if terms.micro_batch is not None:
            terms = replace(terms, micro_batch=min(terms.micro_batch, profile.num_samples))
        costs = estimate(profile, problem.machine)
        return replace(problem, profile=profile, costs=costs, terms=terms, quick=problem.quick or quick)

    def _kept_from_moving(self) -> str:
        """Why the plan cannot be exchanged now. "": it can."""
        if self._fixed:
            return self._fixed
        if self._run.between_passes is not None:
            return "a recording is of one plan: end it first"
        if self._run.passes.awaits_backward:
            return "a forward before it still waits for its backward: call that first, or pass the larger batch first"
        return ""

    def _that_fits(self, profile: ModelProfile, refusal: InfeasiblePlan) -> str:
        """Tried, and not only promised: with as many samples as memory says, half of them, and one."""
        whole, limit_bytes = profile.num_samples, self._run.plan.gpu_limit_bytes
        share = min(1.0, limit_bytes / refusal.num_bytes) if refusal.tier is Tier.GPU and refusal.num_bytes else 1.0
        most = min(whole - 1, int(whole * share))
        for count in dict.fromkeys((most, most // 2, 1)):
            if 0 < count < whole:
                batch_bytes = -(-profile.batch_bytes * count // whole)
                fewer = replace(profile, num_samples=count, batch_bytes=batch_bytes)
                with suppress(InfeasiblePlan):
                    self._searched(fewer, quick=True)
                    return f"Of batches like this one, {count} of {whole} samples fit: step after several of them"
        return f"Not one sample of it fits; cut it to the sizes of before, {self._run.batches}"

    def _move_to(self, found: Searched, told: str) -> None:
        run, size = self._run, self._run.plan.micro_batch
        try:
            run.move_to(found)
        except (torch.OutOfMemoryError, MemoryError) as error:  # the old plan is as it was
            raise Refused(
                f"{told}: it needs another plan, and the model could not be moved to it ({in_a_line(error)}); {LARGEST}"
            ) from error
        self._solution, self._problem = found, found.problem
        if run.plan.micro_batch != size:
            run.compiled.forget()
        if run.observer is not None:
            run.observer = self._watch(found)

    def _watch(self, found: Searched) -> Watch:
        return Watch(self._run, found)

    def _say(self, text: str) -> None:
        warnings.warn(text, stacklevel=5)

    def _remember(self, profile: ModelProfile, sizes: BatchSizes) -> None:
        batches, together = self._run.batches, self._together(profile)
        assert batches is not None
        batches.add(sizes)
        if not self._is_held(together):
            self._profiles = [profile, *self._profiles]
            return
        self._profiles = together
        if len(together) == 1:
            batches.raise_samples(together[0].num_samples)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def make_room(self, error: OutOfMemory, sizes: BatchSizes) -> None:
        """`error`: of an evaluation."""
        began_s, run = time.perf_counter(), self._run
        self._catch_up()
        base_bytes = self._base_bytes(self._solution)
        wanted_bytes = int(
            EVAL_MARGIN * (error.used_bytes + error.requested_bytes - run.gpu.outside_bytes - base_bytes)
        )
        reason = (
            f"an evaluation of {sizes} needs {exactly(wanted_bytes)} of the GPU at least, beside {exactly(base_bytes)} "
            f"that the plan always has there, of {exactly(run.plan.gpu_limit_bytes)}"
        )
        fixed = self._kept_from_making_room()
        found = None if self._problem is None or fixed else self._leaner(wanted_bytes)
        if found is None or run.between_passes is not None or run.passes.awaits_backward:
            why = "the plan cannot be exchanged now" if found else fixed or "no plan leaves so much free"
            fewer_than = sizes.num_samples * (run.plan.gpu_limit_bytes - base_bytes) // wanted_bytes + 1
            error.add_note(
                f"{reason}; {why}. Pass smaller batches: fewer than {fewer_than} of {sizes.num_samples} samples"
            )
            raise error
        with progress_line("hightide makes room for an evaluation"):
            self._move_to(found, f"an evaluation of {sizes}")
        warnings.warn(
            f"{reason}. Planned again, with so much left free, and the model moved to the new plan in "
            f"{format_seconds(time.perf_counter() - began_s)}. Training is {_slower(run.plan)}; smaller batches in "
            "evaluation avoid it",
            stacklevel=5,
        )

    def _kept_from_making_room(self) -> str:
        """Why the plan stays, whatever an evaluation needs."""
        return self._fixed

    def _leaner(self, wanted_bytes: int) -> Searched | None:
        """A plan for training that leaves so much of the GPU free between passes; None: there is none. The more is kept
        free beside what training itself takes, the less lies there for good, until nothing fits any more."""
        before_bytes, limit_bytes = self._kept_bytes, self._run.plan.gpu_limit_bytes
        low, high = before_bytes, limit_bytes
        missing = wanted_bytes - (limit_bytes - self._base_bytes(self._solution))
        for number in range(ROOM_ROUNDS):
            self._kept_bytes = min(low + max(1, missing) * 2**number, (low + high) // 2)
            try:
                found = self._searched(self._profiles[0])
                check_room(self._run)
            except InfeasiblePlan:
                high = self._kept_bytes
                continue
            missing = wanted_bytes - (limit_bytes - self._base_bytes(found))
            if missing <= 0:
                return found
            low = self._kept_bytes
        self._kept_bytes = before_bytes
        return None

    def _base_bytes(self, solution: Solution) -> int:
        """What a plan always has on the GPU, without what is kept free there."""
        kept_bytes = solution.profile.buffer_bytes - self._buffer_bytes
        return max(schedule.gpu_base_bytes for schedule in solution.schedules.values()) - kept_bytes


def _slower(plan: Plan) -> str:
    return f"forecast to take {format_seconds(plan.forecast.step_s)} a step" if plan.forecast.step_s else "as before"
