"""The fastest plan within the limits, by simulated step time.

First, fillings: from a few plain starts (micro-batch, where inputs wait) memory is filled in several orders of kinds,
and each result is simulated. Then the best few are improved by moves (see moves.py) until none gains more than
`LEAST_GAIN`. A plan that cannot be faster than the best so far, because one lane alone takes longer, is not simulated
(see bounds.py). The number of trials is bounded, not their time, so the same problem has the same answer everywhere.

The disk is used where else nothing or only a last resort fits: from everything there, the GPU is filled first and then
the host.

Not searched: how much of a block's update is deferred (α). It follows from what is due; see docs/planning.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hightide.ir.action import Mode
from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.machine import Machine
from hightide.ir.plan import GradientDtype, Plan, Update
from hightide.ir.state_spec import ADAM_STATES, StateSpecs
from hightide.ir.tier import Tier
from hightide.planner.choice import Choice, Problem, check_micro_batch
from hightide.planner.cost import StepForecast, forecast
from hightide.planner.explain import explain
from hightide.planner.lower import lower
from hightide.planner.memory import bytes_forecast, peaks
from hightide.planner.missing import refusal
from hightide.planner.moves import ORDERS, Moves
from hightide.planner.trials import Trials

LEAST_GAIN = 0.002  # of a step, for which a plan is changed
NUM_FILLED = 4  # so many starts are filled in every order; of a few blocks all
NUM_IMPROVED = 2  # so many fillings are improved; of a few blocks more
NUM_IMPROVED_FEW = 12
QUICK_SHARE = 0.95  # of the GPU, that a quick search fills with what need not be there
NUM_TRIALS = 24  # of plans, while improving, at least; of small models many more
NUM_TRIED_ACTIONS = 20_000  # in all those trials, at most: of a deep model in fine chunks a schedule has thousands
NUM_TRIED_CALLS = 1_500  # calls of blocks in all those trials, if that allows more: what trials cost


@dataclass(frozen=True)
class Found:
    plan: Plan
    step: StepForecast
    choice: Choice
    num_simulated: int


def search(
    profile: ModelProfile,
    costs: Costs,
    machine: Machine,
    gpu_bytes: int,
    host_bytes: int,
    update: Update,
    micro_batch: int | None = None,
    states: StateSpecs = ADAM_STATES,
    gradients: GradientDtype = GradientDtype.FLOAT32,
    disk_bytes: int = 0,
    quick: bool = False,
) -> Found:
    """Raises InfeasiblePlan, with the least that is missing, if nothing fits. `quick`: only a few fillings, for models
    whose step takes less time than a search."""
    check_micro_batch(profile, micro_batch)
    problem = Problem(profile, gpu_bytes, host_bytes, update, states, gradients, disk_bytes)
    trials = Trials(problem, costs, machine)
    sizes = equal_parts(profile.num_samples) if micro_batch is None else (micro_batch,)
    may_fill = _with_room_left(trials) if quick else trials.may_fit
    choice = _Search(problem, trials, Moves(problem, may_fill, sizes), quick).run()
    return _finish(problem, trials, choice)


def _with_room_left(trials: Trials) -> Callable[[Choice], bool]:
    """For what nobody forecasts, such as tensors of the user's own: of a small model they are a larger share."""
    most_bytes = QUICK_SHARE * trials.problem.gpu_bytes
    return lambda choice: trials.may_fit(choice) and trials.guess(choice).gpu_bytes <= most_bytes


def _finish(problem: Problem, trials: Trials, choice: Choice) -> Found:
    profile, plan = problem.profile, problem.build(choice)
    schedule = lower(profile, plan, Mode.TRAIN)
    step = forecast(profile, plan, trials.costs, trials.machine, schedule)
    sizes = bytes_forecast(schedule, peaks(schedule), trials.machine)
    plan = replace(plan, forecast=replace(sizes, step_s=step.step_s))
    plan = plan.explained(explain(profile, plan, {Mode.TRAIN: schedule}))
    return Found(plan, step, choice, trials.num_simulated)


@dataclass(frozen=True)
class _Search:
    problem: Problem
    trials: Trials
    moves: Moves
    quick: bool

    def run(self) -> Choice:
        resident = next((choice for choice in self.moves.resident() if self._fits(choice)), None)
        if resident is not None and (self.quick or resident.micro_batch == self.moves.micro_batches[0]):
            return resident
        found = self._fillings()
        if resident is not None:  # in parts: recomputing in fewer may be faster
            found[resident] = self.trials.step_s(resident)
        if not found:
            leanest = self._leanest()
            found[leanest] = self.trials.step_s(leanest)
        if self.quick:
            return min(found, key=lambda choice: found[choice])
        starts = sorted(found, key=lambda choice: found[choice])[: self._num_improved()]
        if not self.moves.few:
            starts += self._recast(starts[0])
        return min((self._improved(choice) for choice in starts), key=self.trials.step_s)

    def _leanest(self) -> Choice:
        """That fits. Fillings of what nearly fits may all be a little too much."""
        for choice in self.moves.leanest():
            if self.trials.may_fit(choice) and self.trials.step_s(choice) < math.inf:
                return choice
        raise refusal(self.trials, self.moves.leanest())

    def _fits(self, choice: Choice) -> bool:
        return self.moves.may_fit(choice) and self.trials.step_s(choice) < math.inf

    def _fillings(self) -> dict[Choice, float]:
        """With their step times. Those of later groups only where nothing of the earlier ones fits."""
        found: dict[Choice, float] = {}
        for group in self._groups():
            for starts in group:
                self._fill(self._first_fitting(starts) if self.quick else self._fitting(starts), found)
            if found and (self.quick or not self.moves.few):
                break
        return found

    def _groups(self) -> Iterator[list[Iterator[Choice]]]:
        """Without a spare slot only where nothing fits with one; with the disk only where else only last resorts would
        do, which may be faster or slower; in other forms only where nothing fits in the plain one."""
        moves, problem = self.moves, self.problem
        needs_disk = self.trials.least_bytes() > problem.gpu_bytes + problem.host_bytes
        for form in moves.forms:
            plain = [] if needs_disk else [moves.starts(spare, form) for spare in (1, 0)]
            yield from ([starts] for starts in plain)
            on_disk = [moves.starts(spare, form, disk=True) for spare in (1, 0)]
            yield [*([] if needs_disk else [moves.last_resorts(form)]), on_disk[0]]
            yield [on_disk[1]]

    def _fill(self, starts: list[Choice], found: dict[Choice, float]) -> None:
        """Each in one order; those of the best starts, or of a few blocks all, in the other orders too."""
        reached = {start: self._try(self.moves.fill(start, ORDERS[0]), found) for start in starts}
        best = sorted(starts, key=lambda start: reached[start])
        for start in best if self.moves.few else best[:NUM_FILLED]:
            for order in ORDERS[2::2] if self.quick else ORDERS[1:]:
                self._try(self.moves.fill(start, order), found)

    def _recast(self, best: Choice) -> list[Choice]:
        """The best of its other forms, if one fits: of another kind, so that moves lead elsewhere from it."""
        found: dict[Choice, float] = {}
        for other in self.moves.recast(best):
            self._try(other, found)
        return sorted(found, key=lambda choice: found[choice])[:1]

    def _try(self, choice: Choice, found: dict[Choice, float]) -> float:
        below_s = math.inf if self.moves.few else min(found.values(), default=math.inf) * (1 - LEAST_GAIN)
        if not self.trials.within(self.trials.guess(choice)):
            return math.inf
        step_s = self.trials.step_s(choice, below_s)
        if step_s < math.inf:
            found[choice] = step_s
        return step_s

    def _fitting(self, starts: Iterator[Choice]) -> list[Choice]:
        return [start for start in dict.fromkeys(starts) if self.trials.may_fit(start)]

    def _first_fitting(self, starts: Iterator[Choice]) -> list[Choice]:
        """With inputs on the GPU and on the host: of the largest micro-batch that fits."""
        found: dict[Tier, Choice] = {}
        for start in starts:
            if start.inputs not in found and self.trials.may_fit(start):
                found[start.inputs] = start
        return list(found.values())

    def _improved(self, choice: Choice) -> Choice:
        """Takes every move that gains, until none does or the trials are used up."""
        last = self.trials.num_simulated + self._num_trials()
        last_action = self.trials.num_actions + NUM_TRIED_ACTIONS // self._num_improved()
        best_s = self.trials.step_s(choice)
        seen: set[Choice] = set()
        while True:
            for other in self.moves.around(choice):
                if other in seen:
                    continue
                seen.add(other)
                below_s = best_s * (1 - LEAST_GAIN)
                step_s = self.trials.step_s(other, below_s)
                if step_s < below_s:
                    choice, best_s = other, step_s
                    break
                if self.trials.num_simulated >= last or self.trials.num_actions >= last_action:
                    return choice
            else:
                return choice

    def _num_improved(self) -> int:
        return NUM_IMPROVED_FEW if self.moves.few else NUM_IMPROVED

    def _num_trials(self) -> int:
        """While improving one filling."""
        calls = len(self.problem.profile.calls)
        return max(NUM_TRIALS, NUM_TRIED_CALLS // calls) // self._num_improved()


def equal_parts(num_samples: int) -> tuple[int, ...]:
    """Sizes of micro-batches, descending: the batch in 1, 2, 3, 4, 6, 8, 12, 16, ... parts, as equal as they can be."""
    powers = [2**power for power in range(num_samples.bit_length() + 1)]
    parts = [number for power in powers for number in (power, 3 * power)]
    return tuple(sorted({-(-num_samples // number) for number in parts}, reverse=True))
