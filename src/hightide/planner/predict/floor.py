"""The floor of a step under a plan: what each lane would need if it were alone.

Links and the host's update have the plan's own work. Compute has the model's: forward and backward of the whole batch
at once, with everything on the GPU and nothing computed twice, so that recomputation counts as a loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.plan import Plan, Sharing
from hightide.ir.tier import COLLECTIVES, Lane, Tier
from hightide.planner.loss_tiles import num_rows
from hightide.planner.lower import lower_step
from hightide.planner.placement import Placement
from hightide.planner.predict.bounds import lanes_alone
from hightide.planner.predict.collective_seconds import collective_s, links_of
from hightide.planner.predict.step_seconds import seconds_of
from hightide.planner.solution import Searched


def floors(solution: Searched) -> dict[Lane, float]:
    """Seconds per step of each lane. The step's floor is the largest."""
    machine = solution.problem.machine
    moved = {lane: solution.passes.moved_bytes(lane) for lane in Lane if lane not in (Lane.COMPUTE, *COLLECTIVES)}
    alone = lanes_alone(moved, lambda lane: machine.speeds_of({lane})[lane]) | _collectives(solution)
    return {Lane.COMPUTE: _compute(solution.profile, solution.plan, solution.problem.costs), **alone}


def _collectives(solution: Searched) -> dict[Lane, float]:
    links, plan, chunks = links_of(solution.problem.machine, solution.plan), solution.plan, solution.placement.chunks
    if links is None:
        return dict.fromkeys(COLLECTIVES, 0.0)
    return {
        lane: sum(
            count * collective_s(links, plan, action.op, chunks[action.chunk])
            for schedule, count in solution.passes.runs
            for action in schedule.lane(lane)
            if action.chunk is not None
        )
        for lane in COLLECTIVES
    }


def _compute(profile: ModelProfile, plan: Plan, costs: Costs) -> float:
    there: dict[str, Any] = dict.fromkeys(("params", "states", "inputs", "held", "compute"), Tier.GPU)
    blocks = tuple(replace(block, activation=Activation.KEEP, **there) for block in plan.blocks)
    if plan.is_cut:  # parameters are whole, so that no slots are needed
        cut = {Sharing.SHARDED: Sharing.PARAMS_REPLICATED}
        blocks = tuple(replace(block, sharing=cut.get(block.sharing, block.sharing)) for block in blocks)
    kept = num_rows(profile) if all(block.plain_linear for block in profile.blocks if block.lazy_head) else 0
    resident = replace(plan, blocks=blocks, micro_batch=plan.num_samples, num_slots=0, loss_kept_tokens=kept)
    resident = replace(resident, loss_in_forward=False)
    called = {call.block for call in profile.calls}
    _, grad_slots = Placement(resident).widest_tick(called)  # of updates in backward
    resident = replace(resident, num_grad_slots=grad_slots)
    seconds = seconds_of(profile, resident, costs)
    runs = lower_step(profile, resident).runs
    return sum(count * sum(map(seconds, schedule.lane(Lane.COMPUTE))) for schedule, count in runs)
