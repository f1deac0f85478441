"""What a step takes at least, without lowering the plan: each lane for itself, at its best speed."""

from __future__ import annotations

from hightide.ir.action import Mode
from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.machine import Machine
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.planner.cost import seconds_of
from hightide.planner.lower.draft import Draft
from hightide.planner.lower.ticks import lay_ticks
from hightide.planner.place import has_host_params, host_grad_bytes, states_on_gpu, update_bytes


def least_step_s(profile: ModelProfile, plan: Plan, costs: Costs, machine: Machine) -> float:
    """No simulation of this plan is shorter. Chunks that a slot may hold from forward to backward cross the link
    once."""
    draft = Draft(profile, plan, Mode.TRAIN)
    lay_ticks(draft)
    seconds = seconds_of(profile, plan, costs)
    compute_s = sum(seconds(tick) for tick in draft.ticks)
    best = {lane: max(machine.speeds_of({lane, *others})[lane] for others in _OTHERS) for lane in _MOVING}
    moved = dict.fromkeys(_MOVING, 0)
    backward = {call.block for call in profile.calls if call.needs_backward}
    for chunk in plan.layout.chunks:
        if draft.uses.get(chunk.index) and has_host_params(plan, chunk):
            moved[Lane.H2D] += chunk.param_bytes
        if not backward.isdisjoint(chunk.users) and not states_on_gpu(plan, chunk):
            moved[Lane.D2H] += host_grad_bytes(plan, chunk)
            moved[Lane.CPU] += update_bytes(plan, chunk) if chunk.optimised_numel else 0
        elif not backward.isdisjoint(chunk.users) and chunk.optimised_numel:
            compute_s += update_bytes(plan, chunk) / costs.update_bytes_per_s
    for call in profile.calls:
        if call.needs_backward and plan.blocks[call.block].inputs is Tier.HOST:
            num_bytes = call.saved_inputs.at(plan.num_samples)
            moved[Lane.D2H] += num_bytes
            moved[Lane.H2D] += num_bytes
    return max(compute_s, *(moved[lane] / best[lane] for lane in _MOVING))


_MOVING = (Lane.H2D, Lane.D2H, Lane.CPU)
_OTHERS: tuple[set[Lane], ...] = (set(), {Lane.H2D}, {Lane.D2H}, {Lane.CPU}, set(_MOVING))
