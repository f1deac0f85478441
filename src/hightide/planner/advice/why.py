"""Why a block is planned as it is: every other way to plan this one block, simulated, with the rest left alone."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.plan import BlockPlan, Plan
from hightide.ir.tier import Tier
from hightide.planner.chunk_place import RING_COUNTS
from hightide.planner.disk_inputs import passing_calls
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower_step
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import bytes_forecast, step_peaks
from hightide.planner.predict.step_seconds import forecast
from hightide.planner.solution import Searched
from hightide.planner.verify.check_plan import check_plan

NOISE = 1e-6  # of a step: what sums of floating-point numbers are off
_PLACES = {
    (Tier.GPU, Tier.GPU): "params and states on the GPU",
    (Tier.GPU, Tier.HOST): "params on the GPU, states on host",
    (Tier.HOST, Tier.GPU): "frozen streamed, trained on the GPU",
    (Tier.HOST, Tier.HOST): "params streamed, states on host",
    (Tier.GPU, Tier.DISK): "params on the GPU, states on disk",
    (Tier.HOST, Tier.DISK): "params streamed, states on disk",
    (Tier.DISK, Tier.DISK): "params and states on disk",
}
LOOKED_UP = "looked up on the host"


@dataclass(frozen=True)
class Alternative:
    """Differences are against the plan: what it would be, less what it is."""

    text: str
    step_s: float
    step_difference_s: float
    gpu_difference_bytes: int  # of the peak: on a real GPU, of what torch reserves
    host_difference_bytes: int
    too_many_bytes: int  # above a tier's limit, where most is missing; 0: it fits


@dataclass(frozen=True)
class Reasons:
    block: str
    planned: str  # in words
    alternatives: tuple[Alternative, ...]  # the fastest first; without those that would change neither time nor bytes


def why(solution: Searched, block: str) -> Reasons:
    problem, profile, plan = solution.problem, solution.profile, solution.plan
    index = find_block([one.name for one in plan.blocks], block)
    placement = solution.placement
    planned, owner = placement.blocks_in_effect[index], placement.owners[index]
    step_s = solution.step.step_s
    now = bytes_forecast(solution.passes, solution.peaks, problem.machine)
    alternatives = []
    for text, other in _others(planned, owner == index, plan.uses_disk, plan.accumulate > 1):
        changed = _with_block(profile, placement, index, other)
        try:
            check_plan(profile, changed)
        except InfeasiblePlan:  # not a way to plan this block
            continue
        changed_placement = Placement(changed)
        passes = lower_step(profile, changed, changed_placement)
        other_s = forecast(problem, changed_placement, passes).step_s
        then = bytes_forecast(passes, step_peaks(passes), problem.machine)
        if then == now and abs(other_s - step_s) <= NOISE * step_s:  # it is the same in other words
            continue
        alternatives.append(
            Alternative(
                text=text,
                step_s=other_s,
                step_difference_s=other_s - step_s,
                gpu_difference_bytes=then.gpu_bytes - now.gpu_bytes,
                host_difference_bytes=then.host_peak_bytes - now.host_peak_bytes,
                too_many_bytes=max(0, *(size - plan.limits[tier] for tier, size in then.by_tier.items())),
            )
        )
    places = _places(planned) if owner is not None else "no parameters"
    if owner not in (None, index):
        places += f", with {plan.blocks[owner].name}"
    words = f"{places}; activations {_activation(planned)}; {_inputs(planned.inputs)}"
    return Reasons(planned.name, words, tuple(sorted(alternatives, key=lambda one: one.step_s)))


def _places(block: BlockPlan) -> str:
    return LOOKED_UP if block.compute is Tier.HOST else _PLACES[block.params, block.states]


_ACTIVATIONS = {
    Activation.KEEP: "kept",
    Activation.SELECTIVE: "kept in part",
    Activation.RECOMPUTE: "recomputed",
}


def _activation(block: BlockPlan) -> str:
    if block.held is Tier.GPU or block.activation is Activation.RECOMPUTE:
        return _ACTIVATIONS[block.activation]
    return "swapped to the host" if block.activation is Activation.SELECTIVE else "all swapped to the host"


def _inputs(tier: Tier) -> str:
    return "inputs on the GPU" if tier is Tier.GPU else f"inputs on {tier}"


def _others(planned: BlockPlan, owns: bool, disk: bool, accumulates: bool) -> list[tuple[str, BlockPlan]]:
    """`owns`: whether it decides where its parameters are. `disk`: whether the plan uses one anyway."""
    others = [
        (text, replace(planned, params=params, states=states, sums=_sums(planned, states), compute=Tier.GPU))
        for (params, states), text in _PLACES.items()
        if owns and text != _places(planned) and (disk or states is not Tier.DISK)
    ]
    if owns and planned.compute is Tier.GPU:
        home = Tier.HOST
        others.append((LOOKED_UP, replace(planned, params=home, states=home, sums=home, compute=home)))
    for activation in Activation:
        inputs = Tier.GPU if activation is Activation.KEEP else planned.inputs
        other = replace(planned, activation=activation, inputs=inputs, held=Tier.GPU)
        if other != planned:
            others.append((f"activations {_activation(other)}", other))
    if planned.activation is Activation.KEEP:
        moved = replace(planned, activation=Activation.RECOMPUTE, inputs=Tier.HOST, held=Tier.GPU)
        others.append((f"recomputed, {_inputs(Tier.HOST)}", moved))
        return others
    for elsewhere in Tier if disk and planned.held is Tier.GPU else (Tier.GPU, Tier.HOST):
        if elsewhere is not planned.inputs:
            others.append((_inputs(elsewhere), replace(planned, inputs=elsewhere)))
    if accumulates and owns and planned.states is not Tier.GPU:
        possible = Tier if planned.states is Tier.DISK else (Tier.GPU, Tier.HOST)
        for sums in possible:
            if sums is not planned.sums:
                others.append((f"sums of gradients on the {sums}", replace(planned, sums=sums)))
    if planned.held is Tier.GPU:
        inputs = Tier.HOST if planned.inputs is Tier.DISK else planned.inputs  # what is swapped leaves with them
        swapped = replace(planned, activation=Activation.SELECTIVE, held=Tier.HOST, inputs=inputs)
        others.append((f"activations {_activation(swapped)}", swapped))
    return others


def _sums(planned: BlockPlan, states: Tier) -> Tier:
    """They can be on the disk only where the states are."""
    return Tier.HOST if planned.sums is Tier.DISK is not states else planned.sums


def _with_block(profile: ModelProfile, known: Placement, index: int, block: BlockPlan) -> Plan:
    """With as many spare slots and buffers as before, if anything goes through them at all."""
    plan = known.plan
    blocks = (*plan.blocks[:index], block, *plan.blocks[index + 1 :])
    changed = replace(plan, blocks=blocks)
    called = {call.block for call in profile.calls}
    placement = Placement(changed)
    before, after = known.widest_tick(called), placement.widest_tick(called)
    slots, grad_slots = (
        widest + max(0, has - needed) if widest else 0
        for widest, has, needed in zip(after, (plan.num_slots, plan.num_grad_slots), before, strict=True)
    )
    needed = {name: placement.buffer_bytes[ring] > 0 for ring, name in RING_COUNTS.items()}
    rings: dict[str, Any] = {name: max(1, getattr(plan, name)) if one else 0 for name, one in needed.items()}
    rings["num_input_buffers"] = max(1, plan.num_input_buffers) if passing_calls(profile, changed) else 0
    return replace(changed, num_slots=slots, num_grad_slots=grad_slots, **rings)


def find_block(names: Sequence[str], name: str) -> int:
    """`name` may be the end of one of the blocks' names, from a dot on, if there is only one such."""
    matches = [at for at, one in enumerate(names) if one == name] or [
        at for at, one in enumerate(names) if one.endswith(f".{name}")
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ValueError(
            f"{len(matches)} blocks end in {name!r}: {', '.join(names[at] for at in matches[:4])}; name one"
        )
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
    raise ValueError(f"none of the {len(names)} blocks is called {name!r}; near are {', '.join(map(repr, near))}")
