"""Why nothing fits, and the smallest change that would."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from hightide.ir.tier import Tier
from hightide.ir.units import format_bytes
from hightide.planner.choice import Choice
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.trials import Needs, Trials


def refuse(trials: Trials, leanest: Iterable[Choice]) -> NoReturn:
    """Says how much more GPU memory would do with the host as it is, or the other way round, whichever is less."""
    gpu_bytes, host_bytes = trials.problem.gpu_bytes, trials.problem.host_bytes
    needs = [trials.guess(choice) for choice in dict.fromkeys(leanest)]
    changes = [
        *((Tier.GPU, need) for need in needs if need.host_bytes <= host_bytes),
        *((Tier.HOST, need) for need in needs if need.gpu_bytes <= gpu_bytes),
    ]
    if not changes:
        raise _both(min(needs, key=lambda need: need.gpu_bytes), gpu_bytes, host_bytes)
    limits = {Tier.GPU: gpu_bytes, Tier.HOST: host_bytes}

    def lacking(change: tuple[Tier, Needs]) -> int:
        tier, need = change
        return (need.gpu_bytes if tier is Tier.GPU else need.host_bytes) - limits[tier]

    best = {
        tier: min(lacking(c) for c in changes if c[0] is tier) for tier in limits if any(c[0] is tier for c in changes)
    }
    tier = min(best, key=lambda one: best[one])
    others = [f"or {_more(other, missing)}" for other, missing in best.items() if other is not tier]
    needed = limits[tier] + best[tier]
    raise InfeasiblePlan(
        f"no plan fits {_bytes(gpu_bytes)} of GPU and {_bytes(host_bytes)} of host memory: {_bytes(best[tier])} are "
        f"missing on the {tier}; give it {_more(tier, best[tier])}, Limits({tier}={needed})"
        + "".join(f", {text}" for text in others),
        tier=tier,
        num_bytes=needed,
    )


def _both(need: Needs, gpu_bytes: int, host_bytes: int) -> InfeasiblePlan:
    gpu, host = need.gpu_bytes - gpu_bytes, need.host_bytes - host_bytes
    return InfeasiblePlan(
        f"no plan fits {_bytes(gpu_bytes)} of GPU and {_bytes(host_bytes)} of host memory: {_bytes(gpu)} are missing "
        f"on the gpu and {_bytes(host)} on the host; give it Limits(gpu={need.gpu_bytes}, host={need.host_bytes})",
        tier=Tier.GPU,
        num_bytes=need.gpu_bytes,
    )


def _more(tier: Tier, num_bytes: int) -> str:
    return f"{_bytes(num_bytes)} more {tier} memory"


def _bytes(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({format_bytes(num_bytes)})"
