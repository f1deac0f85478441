"""A plan, perhaps edited by hand, is checked against the model before it is lowered."""

from __future__ import annotations

from dataclasses import fields

from hightide.ir.block import ModelProfile
from hightide.ir.plan import PLAN_VERSION, Activation, Plan
from hightide.ir.state_spec import StateSpecs
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.layout import made_again
from hightide.planner.placement import Placement


def check_plan(profile: ModelProfile, plan: Plan) -> None:
    """Whether a plan is one for this model, and makes sense."""
    if plan.version != PLAN_VERSION:
        raise InfeasiblePlan(f"the plan has version {plan.version}, this is version {PLAN_VERSION}; make a new plan")
    if plan.fingerprint != profile.fingerprint:
        raise InfeasiblePlan(
            f"this is a plan for another model: it has the fingerprint {plan.fingerprint}, the model has "
            f"{profile.fingerprint}; make a new plan with hightide.plan(model, optimizer, batch)"
        )
    names, planned = [block.name for block in profile.blocks], [block.name for block in plan.blocks]
    if names != planned:
        wrong = next((pair for pair in zip(names, planned, strict=False) if pair[0] != pair[1]), None)
        raise InfeasiblePlan(
            f"the plan lists {len(planned)} blocks, the model has {len(names)}"
            + (f"; where the model has {wrong[0]!r} the plan has {wrong[1]!r}" if wrong else "")
        )
    _check_layout(profile, plan)
    _check_blocks(profile, plan)
    _check_numbers(profile, plan)


def check_states(plan: Plan, states: StateSpecs) -> None:
    """Whether a plan was made for an optimizer that keeps the same states."""
    for chunk in plan.layout.chunks:
        if chunk.optimised_numel and chunk.rule_states != states:
            planned, has = (", ".join(map(str, one)) or "no states" for one in (chunk.rule_states, states))
            raise InfeasiblePlan(
                f"the plan was made for an optimizer that keeps {planned} of each parameter, this one keeps {has}; "
                "make a new plan with hightide.plan(model, optimizer, batch)"
            )


def check_executable(plan: Plan) -> None:
    """Whether this version can run it, too."""
    blocks = [block.name for block in plan.blocks if Tier.DISK in (block.params, block.states)]
    if blocks:
        raise InfeasiblePlan(
            f"the plan keeps {len(blocks)} blocks ({', '.join(blocks[:3])}{', ...' if len(blocks) > 3 else ''}) on the "
            "disk: `hightide plan` prices "
            "that, but this version cannot train from a disk; make a plan without disk, with more host memory or a "
            "smaller model"
        )


def _check_layout(profile: ModelProfile, plan: Plan) -> None:
    placed = [(place.param, place.numel) for chunk in plan.layout.chunks for place in chunk.params]
    if sorted(placed) != sorted((spec.name, spec.numel) for spec in profile.params):
        raise InfeasiblePlan("the plan's layout does not hold each parameter of the model once; make a new plan")
    if [chunk.index for chunk in plan.layout.chunks] != list(range(len(plan.layout.chunks))):
        raise InfeasiblePlan("the chunks of the plan's layout are not numbered 0, 1, 2, ...; make a new plan")
    empty = [chunk.index for chunk in plan.layout.chunks if not chunk.params]
    if empty:
        raise InfeasiblePlan(f"the chunks {empty} of the plan's layout hold no parameter; make a new plan")
    for chunk, right in zip(plan.layout.chunks, made_again(profile, plan.layout), strict=True):
        wrong = [field.name for field in fields(chunk) if getattr(chunk, field.name) != getattr(right, field.name)]
        if wrong:
            raise InfeasiblePlan(
                f"chunk {chunk.index} of the plan's layout has {wrong[0]}={getattr(chunk, wrong[0])!r}, which by its "
                f"parameters is {getattr(right, wrong[0])!r}; leave the layout as it was made, or make a new plan"
            )


def _check_blocks(profile: ModelProfile, plan: Plan) -> None:
    for spec, block in zip(profile.blocks, plan.blocks, strict=True):
        where = f"the plan of block {block.name!r}"
        if block.inputs is Tier.DISK:
            raise InfeasiblePlan(f"{where} has inputs on the disk, which is not supported yet; use gpu or host")
        if block.params is Tier.DISK and block.states is not Tier.DISK:
            raise InfeasiblePlan(
                f"{where} has params on the disk but states on the {block.states}; params are read twice a step and "
                "states once, so put states on the disk too, or params on the host"
            )
        frozen = any(c.block == spec.index and not c.trainable_numel for c in plan.layout.chunks)
        if block.states is Tier.GPU and block.params is not Tier.GPU and not frozen:
            raise InfeasiblePlan(
                f"{where} has states on the gpu but params on the {block.params}, and no frozen chunk that could "
                "stream; put params there too"
            )
        if block.activation is Activation.KEEP and block.inputs is Tier.HOST:
            raise InfeasiblePlan(f"{where} keeps activations, whose graph holds the inputs on the gpu; use inputs=gpu")
        if spec.loose and (block.params, block.states) != (Tier.GPU, Tier.GPU):
            raise InfeasiblePlan(f"{where} (parameters used outside of blocks) must have params and states on the gpu")


def _check_numbers(profile: ModelProfile, plan: Plan) -> None:
    if plan.num_samples < profile.num_samples:
        raise InfeasiblePlan(
            f"the plan holds batches of up to {plan.num_samples} samples, this batch has {profile.num_samples}; "
            f"make a new plan with it"
        )
    if not 1 <= plan.micro_batch <= plan.num_samples:
        raise InfeasiblePlan(f"micro_batch is {plan.micro_batch}; it must be from 1 to num_samples={plan.num_samples}")
    if plan.loss_tile_tokens < 1 or plan.layout.slot_numel < 1:
        raise InfeasiblePlan(
            f"loss_tile_tokens is {plan.loss_tile_tokens} and slot_numel {plan.layout.slot_numel}; both must be at "
            f"least 1"
        )
    if plan.loss_kept_tokens < 0:
        raise InfeasiblePlan(f"loss_kept_tokens is {plan.loss_kept_tokens}; it must be 0 (none) or more")
    for name in ("gpu_limit_bytes", "host_limit_bytes", "disk_limit_bytes", "num_disk_buffers"):
        if getattr(plan, name) < 0:
            raise InfeasiblePlan(f"{name} is {getattr(plan, name)}; it must be 0 (nothing) or more")
    heads = [block for block in profile.blocks if block.lazy_head]
    if plan.loss_kept_tokens and not all(block.plain_linear for block in heads):
        raise InfeasiblePlan(
            f"loss_kept_tokens is {plan.loss_kept_tokens}, but the head ({', '.join(b.kind for b in heads)}) is more "
            "than an nn.Linear, whose logits are made again with a graph in backward; use loss_kept_tokens=0"
        )
    placement = Placement(plan)
    if placement.uses_disk and plan.num_disk_buffers < 1:
        raise InfeasiblePlan("num_disk_buffers is 0, but blocks live on the disk; it must be at least 1")
    slots, grad_slots = placement.widest_tick({call.block for call in profile.calls})
    if plan.num_slots < slots or plan.num_grad_slots < grad_slots:
        raise InfeasiblePlan(
            f"the plan has {plan.num_slots} slots and {plan.num_grad_slots} grad slots; its widest block needs "
            f"{slots} and {grad_slots} at once"
        )
