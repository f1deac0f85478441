"""The plan that follows from a person's candidates."""

from __future__ import annotations

from hightide.ir.block import ModelProfile
from hightide.ir.machine import Machine
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.ir.units import exactly, format_bytes
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.problem import Terms
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.space import Space
from hightide.planner.solution import Solution


def plan_by_hand(profile: ModelProfile, candidate: Candidate, terms: Terms, machine: Machine | None = None) -> Plan:
    """`machine`: the plan must fit what torch reserves there. None: it must fit by its tensors, whatever the GPU."""
    made = Solution.of(profile, Space(profile, terms).build(candidate)).described(machine)
    forecast, peak = made.plan.forecast, made.peaks
    _require(Tier.GPU, forecast.gpu_bytes, terms.gpu_bytes, peak.gpu_peak_at)
    _require(Tier.HOST, forecast.host_peak_bytes, terms.host_bytes, peak.host_peak_at)
    return made.plan


def _require(tier: Tier, needed_bytes: int, limit_bytes: int, moment: str) -> None:
    if needed_bytes <= limit_bytes:
        return
    raise InfeasiblePlan(
        f"this plan does not fit the {tier}: it needs {exactly(needed_bytes)}, the "
        f"limit is {limit_bytes} ({format_bytes(limit_bytes)}), {needed_bytes - limit_bytes} bytes "
        f"({format_bytes(needed_bytes - limit_bytes)}) are missing; choose less for it, or a larger Limits({tier}=...)",
        moment,
        tier,
        needed_bytes,
    )
