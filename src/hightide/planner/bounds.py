"""The least that a step takes, without lowering the plan: each lane for itself, at its best speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from hightide.ir.action import Mode
from hightide.ir.machine import Machine
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane, Tier
from hightide.planner.cost import seconds_of
from hightide.planner.lower.draft import Draft
from hightide.planner.lower.ticks import lay_ticks
from hightide.planner.place import (
    grad_on_disk,
    has_host_params,
    host_grad_bytes,
    params_on_disk,
    read_state_bytes,
    states_on_disk,
    states_on_gpu,
    update_bytes,
    written_state_bytes,
)
from hightide.planner.problem import Problem


def least_step_s(problem: Problem, plan: Plan) -> float:
    """No simulation of this plan is shorter. Chunks that a slot may hold from forward to backward cross the link
    once."""
    profile, costs, machine = problem.profile, problem.costs, problem.machine
    draft = Draft(profile, plan, Mode.TRAIN)
    lay_ticks(draft)
    seconds = seconds_of(profile, plan, costs)
    compute_s = sum(seconds(tick) for tick in draft.ticks)
    moved: Counter[Lane] = Counter()
    backward = {call.block for call in profile.calls if call.needs_backward}
    for chunk in plan.layout.chunks:
        if draft.uses.get(chunk.index) and has_host_params(plan, chunk):
            moved[Lane.H2D] += chunk.param_bytes
        if draft.uses.get(chunk.index) and params_on_disk(plan, chunk):
            moved[Lane.H2D] += chunk.param_bytes
            moved[Lane.DISK_READ] += chunk.param_bytes
        if not backward.isdisjoint(chunk.users) and not states_on_gpu(plan, chunk):
            moved[Lane.D2H] += host_grad_bytes(plan, chunk)
            if chunk.optimised_numel:
                moved[Lane.CPU] += update_bytes(plan, chunk)
            if states_on_disk(plan, chunk):
                gradient = host_grad_bytes(plan, chunk) if grad_on_disk(plan, chunk) else 0
                moved[Lane.DISK_WRITE] += gradient + (written_state_bytes(plan, chunk) if chunk.optimised_numel else 0)
                moved[Lane.DISK_READ] += read_state_bytes(plan, chunk) if chunk.optimised_numel else 0
        elif not backward.isdisjoint(chunk.users) and chunk.optimised_numel:
            compute_s += update_bytes(plan, chunk) / costs.update_bytes_per_s
    for call in profile.calls:
        if call.needs_backward and plan.blocks[call.block].inputs is Tier.HOST:
            num_bytes = call.saved_inputs.at(plan.num_samples)
            moved[Lane.D2H] += num_bytes
            moved[Lane.H2D] += num_bytes
    disk_s = _disk_s(machine, moved[Lane.DISK_READ], moved[Lane.DISK_WRITE])
    return max(compute_s, disk_s, *lanes_alone(moved, machine.best_speed).values())


def lanes_alone(moved_bytes: Mapping[Lane, int], speed: Callable[[Lane], float]) -> dict[Lane, float]:
    """The seconds that each lane would need if it were alone."""
    return {lane: num_bytes / speed(lane) if num_bytes else 0.0 for lane, num_bytes in moved_bytes.items()}


def _disk_s(machine: Machine, read_bytes: int, written_bytes: int) -> float:
    """Both at once while there is something of both, the rest alone; or one after the other, if that is faster."""
    if not read_bytes + written_bytes:
        return 0.0
    lanes = (Lane.DISK_READ, Lane.DISK_WRITE)
    both = machine.speeds_of(set(lanes))
    reads, writes = ((both[lane], machine.speeds_of({lane})[lane]) for lane in lanes)
    together_s = min(read_bytes / reads[0], written_bytes / writes[0])
    read_s = (read_bytes - together_s * reads[0]) / reads[1]
    written_s = (written_bytes - together_s * writes[0]) / writes[1]
    return min(together_s + read_s + written_s, read_bytes / reads[1] + written_bytes / writes[1])
