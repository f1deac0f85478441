"""The plan that follows from a person's choices."""

from __future__ import annotations

from dataclasses import replace

from hightide.ir.action import Mode
from hightide.ir.block import ModelProfile
from hightide.ir.machine import Machine
from hightide.ir.plan import GradientDtype, Plan, Update
from hightide.ir.state_spec import ADAM_STATES, StateSpecs
from hightide.ir.tier import Tier
from hightide.ir.units import format_bytes
from hightide.planner.choice import Choice, Problem
from hightide.planner.explain import explain
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower
from hightide.planner.memory import bytes_forecast, peaks


def plan_by_hand(
    profile: ModelProfile,
    choice: Choice,
    gpu_bytes: int,
    host_bytes: int,
    update: Update,
    states: StateSpecs = ADAM_STATES,
    gradients: GradientDtype = GradientDtype.FLOAT32,
    machine: Machine | None = None,
) -> Plan:
    """`machine`: the plan must fit what torch reserves there. None: it must fit by its tensors, whatever the GPU."""
    plan = Problem(profile, gpu_bytes, host_bytes, update, states, gradients).build(choice)
    schedule = lower(profile, plan, Mode.TRAIN)
    peak = peaks(schedule)
    plan = replace(plan, forecast=bytes_forecast(schedule, peak, machine))
    _require(Tier.GPU, plan.forecast.gpu_bytes, gpu_bytes, peak.gpu_peak_at)
    _require(Tier.HOST, plan.forecast.host_peak_bytes, host_bytes, peak.host_peak_at)
    return plan.explained(explain(profile, plan, {Mode.TRAIN: schedule}))


def _require(tier: Tier, needed_bytes: int, limit_bytes: int, moment: str) -> None:
    if needed_bytes <= limit_bytes:
        return
    raise InfeasiblePlan(
        f"this plan does not fit the {tier}: it needs {needed_bytes} bytes ({format_bytes(needed_bytes)}), the "
        f"limit is {limit_bytes} ({format_bytes(limit_bytes)}), {needed_bytes - limit_bytes} bytes "
        f"({format_bytes(needed_bytes - limit_bytes)}) are missing; choose less for it, or a larger Limits({tier}=...)",
        moment,
        tier,
        needed_bytes,
    )
