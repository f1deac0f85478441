"""Why nothing fits, and the smallest change that would."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from hightide.ir.tier import Tier
from hightide.ir.units import format_bytes
from hightide.planner.base import Needs
from hightide.planner.choice import Choice
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.trials import Trials


def refuse(trials: Trials, leanest: Iterable[Choice]) -> NoReturn:
    """Says how much more of one tier would do with the others as they are, whichever is least; or, where all lack, how
    much more of each."""
    problem = trials.problem
    limits = {Tier.GPU: problem.gpu_bytes, Tier.HOST: problem.host_bytes, Tier.DISK: problem.disk_bytes}
    needs = [_by_tier(trials.guess(choice)) for choice in dict.fromkeys(leanest)]
    best: dict[Tier, int] = {}
    for need in needs:
        lacking = [tier for tier in limits if need[tier] > limits[tier]]
        if len(lacking) == 1:
            (tier,) = lacking
            best[tier] = min(best.get(tier, need[tier]), need[tier])
    if not best:
        raise _several(min(needs, key=lambda need: need[Tier.GPU]), limits)
    tier = min(best, key=lambda one: best[one] - limits[one])
    missing = {one: best[one] - limits[one] for one in (tier, *(other for other in best if other is not tier))}
    others = [f", or {_more(other, missing[other])}" for other in missing if other is not tier]
    raise InfeasiblePlan(
        f"no plan fits {_given(limits)}: {_bytes(missing[tier])} are missing on the {tier}; give it "
        f"{_more(tier, missing[tier])}, {_limits({tier: best[tier]})}" + "".join(others),
        tier=tier,
        num_bytes=best[tier],
    )


def _by_tier(needs: Needs) -> dict[Tier, int]:
    return {Tier.GPU: needs.gpu_bytes, Tier.HOST: needs.host_bytes, Tier.DISK: needs.disk_bytes}


def _several(need: dict[Tier, int], limits: dict[Tier, int]) -> InfeasiblePlan:
    short = {tier: need[tier] for tier in limits if need[tier] > limits[tier]}
    missing = " and ".join(f"{_bytes(short[tier] - limits[tier])} on the {tier}" for tier in short)
    first = next(iter(short))
    return InfeasiblePlan(
        f"no plan fits {_given(limits)}: {missing} are missing; give it {_limits(short)}",
        tier=first,
        num_bytes=short[first],
    )


def _given(limits: dict[Tier, int]) -> str:
    memory = f"{_bytes(limits[Tier.GPU])} of GPU and {_bytes(limits[Tier.HOST])} of host memory"
    return memory + (f" and {_bytes(limits[Tier.DISK])} of disk" if limits[Tier.DISK] else "")


def _limits(sizes: dict[Tier, int]) -> str:
    texts = {tier: f"'FOLDER:{size}'" if tier is Tier.DISK else str(size) for tier, size in sizes.items()}
    return f"Limits({', '.join(f'{tier}={text}' for tier, text in texts.items())})"


def _more(tier: Tier, num_bytes: int) -> str:
    return f"{_bytes(num_bytes)} more {tier}{'' if tier is Tier.DISK else ' memory'}"


def _bytes(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({format_bytes(num_bytes)})"
