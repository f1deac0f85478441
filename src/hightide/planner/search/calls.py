"""How many calls a step's samples are cut into: each is a forward and a backward, and step() follows the last.

One call fetches every parameter twice, however many samples it has, but the activations of all of them exist at once.
Several calls fetch parameters anew, and leave more of the GPU to fewer activations. Where each is better depends on the
whole plan, so every number is looked at quickly, and those that look best are searched."""

from __future__ import annotations

import math

from hightide.planner.infeasible import InfeasiblePlan, growth
from hightide.planner.problem import Problem
from hightide.planner.search.nearby import why_not
from hightide.planner.search.search import LEAST_GAIN, quick_step_s, search
from hightide.planner.search.trials import Trials
from hightide.planner.solution import Searched

NUM_SEARCHED = 2  # numbers of calls
NUM_LOOKED_AT = 10
LIKELY = 1.03  # times the best of the quick looks: what looks slower is not searched


def search_calls(step: Problem) -> Searched:
    """`step`: with all samples of a step in one call. Raises InfeasiblePlan if nothing fits."""
    numbers = numbers_of_calls(step)
    if len(numbers) == 1:
        return search(step)
    looks: dict[int, float] = {}
    trials = {number: Trials(in_calls(step, number)) for number in numbers}
    for number, tried in trials.items():
        # What surely takes longer than that is not searched, whatever it takes.
        below_s = LIKELY * min(looks.values(), default=math.inf) / (1 - LEAST_GAIN)
        try:
            looks[number] = quick_step_s(tried.problem, below_s, tried)
        except InfeasiblePlan:
            continue
    if not looks:
        raise _refusal(step)
    likely = sorted(looks, key=lambda number: (looks[number], number))[:NUM_SEARCHED]
    found = search(trials[likely[0]].problem, trials[likely[0]])
    for number in likely[1:]:
        if looks[number] <= LIKELY * looks[likely[0]]:
            other = search(trials[number].problem, trials[number])
            if other.step.step_s < (1 - LEAST_GAIN) * found.step.step_s:
                found = other
    return found


def leanest_cuts(step: Problem) -> tuple[Problem, ...]:
    """One call needs no sums between calls, the most need the fewest activations."""
    numbers = numbers_of_calls(step)
    return tuple(in_calls(step, number) for number in dict.fromkeys((numbers[0], numbers[-1])))


def _refusal(step: Problem) -> InfeasiblePlan:
    """Of that number of calls for which limits must be raised least."""
    refusals = [why_not(one) for one in leanest_cuts(step)]
    return min(refusals, key=lambda refused: growth(refused.enough[0], step.terms.limits))


def in_calls(step: Problem, number: int) -> Problem:
    """The same step, cut into so many calls of equal size."""
    num_samples = step.profile.num_samples
    if not 1 <= number <= num_samples or num_samples % number:
        possible = ", ".join(map(str, _divisors(num_samples)))
        raise ValueError(f"{num_samples} samples cannot be cut into {number} equal calls; into {possible} they can")
    return step.with_samples(num_samples // number).with_terms(accumulate=number)


def numbers_of_calls(step: Problem) -> list[int]:
    """Into which a step can be cut: a few, about twice as many each time."""
    divisors = _divisors(step.profile.num_samples)
    powers = (2**power for power in range(step.profile.num_samples.bit_length()))
    near = {min(divisors, key=lambda one: (abs(one - power), one)) for power in powers}
    return sorted({*near, divisors[-1]})[:NUM_LOOKED_AT]


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
