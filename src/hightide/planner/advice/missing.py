"""Why nothing fits, and the smallest change that would."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from hightide.ir.machine import Machine
from hightide.ir.tier import Tier
from hightide.ir.units import exactly
from hightide.planner.infeasible import InfeasiblePlan, growth
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.trials import Trials

REMEDY = "give it "


def refusal(trials: Trials, leanest: Iterable[Candidate]) -> InfeasiblePlan:
    """Says how much more of one tier would do with the others as they are, first of the one that grows least by it and
    not beyond what the GPU has; or, where several lack, how much more of each. What it names is enough: these
    candidates were lowered, and not only added up."""
    limits = trials.problem.terms.limits
    needs = {one: trials.guess(one).by_tier for one in leanest if not trials.is_forbidden(one)}
    exact: set[Candidate] = set()
    there_bytes = _gpu_memory_bytes(trials.problem.machine)
    while True:
        found = sorted(_least(needs, limits), key=lambda one: one[0].get(Tier.GPU, 0) > there_bytes)
        guessed = [candidate for _, candidate in found if candidate not in exact]
        if not guessed:
            break
        for candidate in guessed:  # a search asks for both, what was added up and what is exact
            lowered = trials.needs(candidate).by_tier
            needs[candidate] = {tier: max(size, lowered[tier]) for tier, size in needs[candidate].items()}
        exact.update(guessed)
    needed, candidate = found[0]
    assert needed, f"this fits, and the search has not found it: {candidate}"
    tier = next(iter(needed))
    moment = trials.peaks(candidate).by_tier[tier][1]  # at which the tier needs most
    missing = " and ".join(f"{exactly(size - limits[one])} are missing on the {one}" for one, size in needed.items())
    others = "".join(f", or {_limits(other)}" for other, _ in found[1:])
    return InfeasiblePlan(
        f"no plan fits {_given(limits)}: {missing}{f', the most during {moment}' if moment else ''}; "
        f"{REMEDY}{_limits(needed)}{others}",
        moment,
        tier,
        needed[tier],
        tuple(short for short, _ in found),
        trials.problem.terms.accumulate,
    )


def of_node(refused: InfeasiblePlan, num_ranks: int) -> InfeasiblePlan:
    """The same for whoever gives limits: those of host memory and disk are of all ranks of a node together, where a
    plan's are of one."""
    enough = tuple(
        {tier: size if tier is Tier.GPU else num_ranks * size for tier, size in one.items()} for one in refused.enough
    )
    if enough == refused.enough:
        return refused
    missing = str(refused).rpartition(f"; {REMEDY}")[0]
    message = f"{missing}, each for one of the {num_ranks} ranks of a node; for all of them {REMEDY}"
    limits = ", or ".join(map(_limits, enough))
    return InfeasiblePlan(message + limits, refused.moment, refused.tier, refused.num_bytes, enough, refused.num_calls)


def _gpu_memory_bytes(machine: Machine) -> float:
    """That there is at all. Infinite: nobody says, or it is simulated."""
    return math.inf if machine.gpu is None or machine.is_simulated else machine.gpu.memory_bytes


def _least(
    needs: Mapping[Candidate, Mapping[Tier, int]], limits: Mapping[Tier, int]
) -> list[tuple[dict[Tier, int], Candidate]]:
    """For each set of tiers that lack, the candidate that takes least; that first which grows least. Of more tiers than
    it takes only where the others would have to grow far more."""
    best: dict[tuple[Tier, ...], tuple[dict[Tier, int], Candidate]] = {}
    for candidate, need in needs.items():
        short = {tier: need[tier] for tier in limits if need[tier] > limits[tier]}
        if tuple(short) not in best or tuple(short.values()) < tuple(best[tuple(short)][0].values()):
            best[tuple(short)] = short, candidate
    found = [one for one in best.values() if not any(_does_with_less(other[0], one[0]) for other in best.values())]

    def grows(one: tuple[dict[Tier, int], Candidate]) -> float:
        return growth(one[0], limits)

    fewest = min(len(short) for short, _ in found)
    most = min(grows(one) for one in found if len(one[0]) == fewest)
    return sorted((one for one in found if len(one[0]) == fewest or grows(one) < most), key=grows)


def _does_with_less(one: Mapping[Tier, int], other: Mapping[Tier, int]) -> bool:
    """One raises only limits that the other raises too, and none further."""
    return one != other and all(size <= other.get(tier, -1) for tier, size in one.items())


def _given(limits: dict[Tier, int]) -> str:
    memory = f"{exactly(limits[Tier.GPU])} of GPU and {exactly(limits[Tier.HOST])} of host memory"
    return memory + (f" and {exactly(limits[Tier.DISK])} of disk" if limits[Tier.DISK] else "")


def _limits(sizes: Mapping[Tier, int]) -> str:
    texts = {tier: f"'FOLDER:{size}'" if tier is Tier.DISK else str(size) for tier, size in sizes.items()}
    return f"Limits({', '.join(f'{tier}={text}' for tier, text in texts.items())})"
