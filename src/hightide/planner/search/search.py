"""The fastest plan within the limits, by simulated step time.

First, fillings: from a few plain starts (micro-batch, where inputs wait) memory is filled in several orders of kinds,
and each result is simulated. Then the best few, the best in another form and the best that swaps are improved by moves
(see moves.py) until none gains more than `LEAST_GAIN`; a quick search stops before that. A plan that cannot be faster
than the best so far, because one lane alone takes longer, is not simulated (see bounds.py). The number of trials is
bounded, not their time, so the same problem has the same answer everywhere.

The disk is used where else nothing or only a last resort fits: from everything there, the GPU is filled first and then
the host.

Not searched: how much of a block's update is deferred (α). It follows from what is due; see docs/planning.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from hightide.ir.tier import Tier
from hightide.planner.advice.missing import refusal
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.problem import Problem
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.ladders import DISK_ORDERS, ORDERS
from hightide.planner.search.moves import Moves
from hightide.planner.search.trials import Trials
from hightide.planner.solution import Searched

LEAST_GAIN = 0.002  # of a step, for which a plan is changed
NUM_FILLED = 4  # so many starts are filled in every order; of a few blocks all
NUM_IMPROVED = 2  # so many fillings are improved; of a few blocks more
NUM_IMPROVED_FEW = 12
MOST_IN_VAIN = 2  # so many plans from a disk, of one kind, are tried after the best
QUICK_SHARE = 0.95  # of the GPU, that a quick search fills with what need not be there
NUM_TRIALS = 24  # of plans, while improving, at least; of small models many more
NUM_TRIED_ACTIONS = 20_000  # in all those trials, at most: of a deep model in fine chunks a schedule has thousands
NUM_TRIED_CALLS = 1_500  # calls of blocks in all those trials, if that allows more: what trials cost


def search(problem: Problem, looked: Trials | None = None) -> Searched:
    """Raises InfeasiblePlan, with the least that is missing, if nothing fits. `looked`: those of a quick look at it."""
    trials = Trials(problem) if looked is None else looked.anew()
    candidate = _found(trials, problem.quick, says_why=True)
    return Searched.made(problem, candidate, trials.space.placed(candidate), trials.num_simulated)


def quick_step_s(problem: Problem, below_s: float = math.inf, trials: Trials | None = None) -> float:
    """Of the plan that a quick search finds; infinite if that surely takes `below_s` or more. Raises InfeasiblePlan,
    without what is missing: that takes a while. `trials`: what remembers it."""
    trials = trials or Trials(problem)
    return trials.step_s(_found(trials, quick=True, says_why=False, below_s=below_s), below_s)


def _found(trials: Trials, quick: bool, says_why: bool, below_s: float = math.inf) -> Candidate:
    num_samples, terms = trials.problem.profile.num_samples, trials.problem.terms
    terms.check_micro_batch(num_samples)
    sizes = equal_parts(num_samples) if terms.micro_batch is None else (terms.micro_batch,)
    may_fill = _with_room_left(trials) if quick else trials.may_fit
    candidate = _Search(trials, Moves(trials.space, may_fill, sizes), quick, says_why, below_s).run()
    return _with_uncalled(trials, candidate, may_fill)


def _with_uncalled(trials: Trials, candidate: Candidate, may_fill: Callable[[Candidate], bool]) -> Candidate:
    """Blocks that the example does not call, and that no slot could take, live on the GPU as far as there is room: an
    evaluation may call them. Of several ranks' blocks there it would take slots too."""
    space = trials.space
    if space.is_cut:
        return candidate
    placement = space.placed(candidate)
    needed = [sum(place.num_slots for place in places) for places in placement.by_block]
    uncalled = [
        block.index
        for block in space.profile.blocks
        if not block.loose and block.index not in space.called and needed[block.index] > placement.plan.num_slots
    ]
    found = candidate
    for block in sorted(uncalled, key=space.block_numel):
        more = replace(found, whole=found.whole | {block})
        found = more if may_fill(more) else found
    return found if found != candidate and trials.step_s(found) < math.inf else candidate


def _with_room_left(trials: Trials) -> Callable[[Candidate], bool]:
    """For what nobody forecasts, such as tensors of the user's own: of a small model they are a larger share."""
    most_bytes = QUICK_SHARE * trials.problem.terms.gpu_bytes
    return lambda candidate: trials.may_fit(candidate) and trials.guess(candidate).gpu_bytes <= most_bytes


@dataclass(frozen=True)
class _Search:
    trials: Trials
    moves: Moves
    quick: bool
    says_why: bool
    below_s: float = math.inf  # of what surely takes so long, a quick search knows no more

    def run(self) -> Candidate:
        resident = next((candidate for candidate in self.moves.resident() if self._fits(candidate)), None)
        if resident is not None and (self.quick or resident.micro_batch == self.moves.micro_batches[0]):
            return resident
        found = {} if self.trials.is_too_much() else self._fillings()
        if resident is not None:  # in parts: recomputing in fewer may be faster
            found[resident] = self.trials.step_s(resident)
        if not found:
            leanest = self._leanest()
            found[leanest] = self.trials.step_s(leanest)
        if self.quick:
            return min(found, key=lambda candidate: found[candidate])
        ranked = sorted(found, key=lambda candidate: found[candidate])
        starts = ranked[: self._num_improved()]
        if (on_disk := next((one for one in ranked if one.disk), None)) is not None:
            ways = (True, False) if self.moves.space.updates_in_backward else (True,)
            starts += [one for parks in ways for one in self._best(self.moves.other_rings(on_disk, parks))]
            starts = sorted(starts, key=self.trials.step_s)[: self._num_improved() if self.moves.few else 1]
        if not self.moves.few:
            starts += self._best(self.moves.recast(starts[0]))
        starts += self._best(self.moves.swaps(starts[0]))
        starts += self._best(self.moves.lookups(starts[0]))
        starts += self._best(self.moves.settled(starts[0]))
        starts += self._best(self.moves.gradient_rings(starts[0]))
        best = min((self._improved(candidate) for candidate in starts), key=self.trials.step_s)
        stored = [self._improved(candidate) for candidate in self._best(self.moves.stored(best))]
        return min((best, *stored), key=self.trials.step_s)

    def _leanest(self) -> Candidate:
        """That fits. Fillings of what nearly fits may all be a little too much."""
        leanest = () if self.trials.is_too_much() else self.moves.leanest(self.trials.host_fits)
        for candidate in leanest:
            if self.trials.may_fit(candidate) and self.trials.step_s(candidate) < math.inf:
                return candidate
        if not self.says_why:
            raise InfeasiblePlan("no plan fits")
        raise refusal(self.trials, self.moves.leanest(self.trials.host_fits))

    def _fits(self, candidate: Candidate) -> bool:
        return self.moves.may_fit(candidate) and self.trials.step_s(candidate) < math.inf

    def _fillings(self) -> dict[Candidate, float]:
        """With their step times. Those of later groups only where nothing of the earlier ones fits."""
        found: dict[Candidate, float] = {}
        for group in self._groups():
            for starts in group:
                self._fill(self._first_fitting(starts) if self.quick else self._fitting(starts), found)
            if found and (self.quick or not self.moves.few):
                break
        return found

    def _groups(self) -> Iterator[list[Iterator[Candidate]]]:
        """Without a spare slot only where nothing fits with one; with the disk only where else only last resorts would
        do, which may be faster or slower; in other forms only where nothing fits in the plain one."""
        moves = self.moves
        needs_disk = self.trials.is_too_much(disk=False)
        for form in moves.forms:
            plain = [] if needs_disk else [moves.starts(spare, form) for spare in (1, 0)]
            yield from ([starts] for starts in plain)
            on_disk = [moves.disk_starts(spare, form, self.trials.host_fits) for spare in (1, 0)]
            relieved = [moves.relieved(spare, form, self.trials.host_fits) for spare in (1, 0)]
            lean = [] if needs_disk else [*relieved, moves.last_resorts(form), moves.lean_starts(form)]
            yield [*lean, *on_disk]
            yield [moves.starts(0, form, disk=True)]
            yield [moves.lean_starts(form, disk=True)]

    def _fill(self, starts: list[Candidate], found: dict[Candidate, float]) -> None:
        """Each in one order; those of the best starts, or of a few blocks all, in the other orders too."""
        if starts and starts[0].disk and not self.moves.few:  # in other orders and chunks later: see Moves.other_rings
            on_disk: dict[Candidate, float] = {}
            self._try_all((self.moves.fill(start, order) for start in starts for order in DISK_ORDERS[:2]), on_disk)
            found.update(on_disk)
            return
        reached = {start: self._try(self.moves.fill(start, ORDERS[0]), found) for start in starts}
        best = sorted(starts, key=lambda start: reached[start])
        for start in best if self.moves.few else best[:NUM_FILLED]:
            for order in ORDERS[2::2] if self.quick and not self.moves.space.summed else ORDERS[1:]:
                self._try(self.moves.fill(start, order), found)

    def _best(self, others: Iterator[Candidate]) -> list[Candidate]:
        """Of other forms of a filling, if one fits: of another kind, so that moves lead elsewhere from it."""
        found: dict[Candidate, float] = {}
        self._try_all(others, found)
        return sorted(found, key=lambda candidate: found[candidate])[:1]

    def _try_all(self, candidates: Iterable[Candidate], found: dict[Candidate, float]) -> None:
        """From a disk those that may be fastest first: few others are faster, and simulating them takes long."""
        different = list(dict.fromkeys(candidates))
        in_vain = 0
        for candidate in sorted(different, key=self.trials.least_s) if any(c.disk for c in different) else different:
            before_s = min(found.values(), default=math.inf)
            in_vain = 0 if self._try(candidate, found) < before_s else in_vain + candidate.disk
            if in_vain == MOST_IN_VAIN:
                return

    def _try(self, candidate: Candidate, found: dict[Candidate, float]) -> float:
        below_s = math.inf if self.moves.few else min(found.values(), default=math.inf) * (1 - LEAST_GAIN)
        if not self.trials.within(self.trials.guess(candidate)):
            return math.inf
        if self.below_s < math.inf and self.trials.least_s(candidate) >= self.below_s:
            return found.setdefault(candidate, math.inf)
        step_s = self.trials.step_s(candidate, below_s)
        if step_s < math.inf:
            found[candidate] = step_s
        return step_s

    def _fitting(self, starts: Iterator[Candidate]) -> list[Candidate]:
        return [start for start in dict.fromkeys(starts) if self.trials.may_fit(start)]

    def _first_fitting(self, starts: Iterator[Candidate]) -> list[Candidate]:
        """With inputs on the GPU and on the host: of the largest micro-batch that fits."""
        found: dict[Tier, Candidate] = {}
        for start in starts:
            if start.inputs not in found and self.trials.may_fit(start):
                found[start.inputs] = start
        return list(found.values())

    def _improved(self, candidate: Candidate) -> Candidate:
        """Takes every move that gains, until none does or the trials are used up."""
        last = self.trials.num_simulated + self._num_trials()
        last_action = self.trials.num_actions + NUM_TRIED_ACTIONS // (1 if candidate.disk else self._num_improved())
        best_s = self.trials.step_s(candidate)
        seen: set[Candidate] = set()
        while True:
            for other in self.moves.around(candidate):
                if other in seen:
                    continue
                seen.add(other)
                below_s = best_s * (1 - LEAST_GAIN)
                step_s = self.trials.step_s(other, below_s)
                if step_s < below_s:
                    candidate, best_s = other, step_s
                    break
                if self.trials.num_simulated >= last or self.trials.num_actions >= last_action:
                    return candidate
            else:
                return candidate

    def _num_improved(self) -> int:
        return NUM_IMPROVED_FEW if self.moves.few else NUM_IMPROVED

    def _num_trials(self) -> int:
        """While improving one filling."""
        calls = len(self.trials.problem.profile.calls)
        return max(NUM_TRIALS, NUM_TRIED_CALLS // calls) // self._num_improved()


def equal_parts(num_samples: int) -> tuple[int, ...]:
    """Sizes of micro-batches, descending: the batch in 1, 2, 3, 4, 6, 8, 12, 16, ... parts, as equal as they can be."""
    powers = [2**power for power in range(num_samples.bit_length() + 1)]
    parts = [number for power in powers for number in (power, 3 * power)]
    return tuple(sorted({-(-num_samples // number) for number in parts}, reverse=True))
