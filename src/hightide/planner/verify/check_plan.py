"""A plan, perhaps edited by hand, is checked against the model before it is lowered."""

from __future__ import annotations

from dataclasses import fields

from hightide.ir.activation import Activation
from hightide.ir.block import DTYPE_BYTES, BlockSpec, ModelProfile
from hightide.ir.codec import check_numbers
from hightide.ir.costs import Costs
from hightide.ir.foreign import MAX_COUNT, quoted, shown
from hightide.ir.plan import PLAN_VERSION, BlockPlan, Plan, Sharing, Update
from hightide.ir.state_spec import StateSpecs
from hightide.ir.tier import Tier
from hightide.planner.chunk_place import RING_COUNTS, Buffer
from hightide.planner.disk_inputs import buffer_bytes
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.layout import made_again
from hightide.planner.loss_tiles import may_run_in_forward
from hightide.planner.placement import Placement

MAX_BLOCKS, MAX_CHUNKS, MAX_CALLS = 20_000, 100_000, 100_000  # a hundred times those of the largest models
MAX_SLOTS, MAX_MICRO_BATCHES, MAX_SAMPLES = 4096, 65_536, 2**31
MAX_STATES, MAX_PASSES, MAX_RANKS = 8, 65_536, 65_536


def check_profile(profile: ModelProfile) -> None:
    """Facts from a file, which nobody has just found out: whether they can be those of a model."""
    check_numbers(profile, "the plan's profile")
    _check_most("blocks in its profile", len(profile.blocks), MAX_BLOCKS)
    _check_most("calls in its profile", len(profile.calls), MAX_CALLS)
    _check_most("samples in its profile", profile.num_samples, MAX_SAMPLES)
    if not profile.num_samples or not profile.tokens_per_sample or not profile.calls:
        raise InfeasiblePlan(
            f"the plan's profile has {profile.num_samples} samples of {profile.tokens_per_sample} tokens and "
            f"{len(profile.calls)} calls; none may be 0: make a new plan"
        )
    if not all(spec.names for spec in profile.params):
        raise InfeasiblePlan("the plan's profile has a parameter with 0 names; make a new plan")
    keys = {spec.name for spec in profile.params}
    if len(keys) != len(profile.params):
        raise InfeasiblePlan(f"{len(profile.params)} parameters of the plan's profile have {len(keys)} names")
    for spec in profile.params:
        if spec.dtype not in DTYPE_BYTES or spec.numel > MAX_COUNT // 64:
            raise InfeasiblePlan(
                f"the plan's profile has {quoted(spec.name)} of {quoted(spec.shape)} in {quoted(spec.dtype)}, which is "
                "no parameter; make a new plan"
            )
    for index, block in enumerate(profile.blocks):
        if block.index != index or not keys.issuperset(block.params):
            raise InfeasiblePlan(
                f"block {index} of the plan's profile ({quoted(block.name)}) has the index {block.index} and "
                f"{len(set(block.params) - keys)} parameters that are not in it; make a new plan"
            )
    homeless = keys - {key for block in profile.blocks for key in block.params}
    if homeless:
        raise InfeasiblePlan(
            f"{len(homeless)} parameters of the plan's profile, such as {quoted(min(homeless))}, belong to no block; "
            "make a new plan"
        )
    lost = [call.block for call in profile.calls if call.block >= len(profile.blocks)]
    if lost or max(call.kind for call in profile.calls) >= len(profile.calls):
        raise InfeasiblePlan(
            f"the calls of the plan's profile are of {len(lost)} blocks that it does not have, or of more kinds than "
            f"there are calls ({len(profile.calls)}); make a new plan"
        )


def check_costs(profile: ModelProfile, costs: Costs) -> None:
    """Costs from a file: whether they are those of this model."""
    kinds = 1 + max(call.kind for call in profile.calls)
    has_head = any(block.lazy_head for block in profile.blocks)
    if len(costs.calls) < kinds or (has_head and costs.loss is None) or len(costs.peaks) not in (0, len(costs.calls)):
        raise ValueError(
            f"these costs know {len(costs.calls)} kinds of calls and {'no' if costs.loss is None else 'a'} loss, the "
            f"model has {kinds} kinds and {'a' if has_head else 'no'} fused head; rehearse the model again"
        )


def _check_most(what: str, number: int, most: int) -> None:
    if number > most:
        raise InfeasiblePlan(f"the plan has {number} {what}; at most {most} make sense: make a new plan")


def check_plan(profile: ModelProfile, plan: Plan) -> None:
    """Whether a plan is one for this model, and makes sense."""
    if plan.version != PLAN_VERSION:
        raise InfeasiblePlan(f"the plan has version {plan.version}, this is version {PLAN_VERSION}; make a new plan")
    if plan.fingerprint != profile.fingerprint:
        raise InfeasiblePlan(
            "this is a plan for another model: names, shapes or dtypes of parameters, groups or blocks differ "
            f"(its fingerprint is {shown(plan.fingerprint)}, the model's {shown(profile.fingerprint)}); make a new "
            "plan with hightide.plan(model, optimizer, batch)"
        )
    _check_most("chunks", len(plan.layout.chunks), MAX_CHUNKS)
    names, planned = [block.name for block in profile.blocks], [block.name for block in plan.blocks]
    if names != planned:
        wrong = next((pair for pair in zip(names, planned, strict=False) if pair[0] != pair[1]), None)
        raise InfeasiblePlan(
            f"the plan lists {len(planned)} blocks, the model has {len(names)}"
            + (f"; where the model has {quoted(wrong[0])} the plan has {quoted(wrong[1])}" if wrong else "")
        )
    _check_ranks(plan)
    _check_layout(profile, plan)
    _check_blocks(profile, plan)
    _check_numbers(profile, plan)


def _check_ranks(plan: Plan) -> None:
    if not 1 <= plan.ranks <= MAX_RANKS or plan.replicas < 1 or plan.ranks % plan.replicas:
        raise InfeasiblePlan(
            f"the plan is for {plan.ranks} ranks in {plan.replicas} groups; there must be from 1 to {MAX_RANKS} ranks, "
            "in groups of equal size: make a new plan"
        )
    if plan.even_alone and plan.ranks > 1:
        raise InfeasiblePlan(f"the plan has even_alone=true and {plan.ranks} ranks; it is for one: use false")


def check_states(plan: Plan, states: StateSpecs) -> None:
    """Whether a plan was made for an optimizer that keeps the same states."""
    for chunk in plan.layout.chunks:
        if chunk.optimised_numel and chunk.rule_states != states:
            planned, has = (", ".join(map(str, one)) or "no states" for one in (chunk.rule_states, states))
            raise InfeasiblePlan(
                f"the plan was made for an optimizer that keeps {planned} of each parameter, this one keeps {has}; "
                "make a new plan with hightide.plan(model, optimizer, batch)"
            )


def _check_layout(profile: ModelProfile, plan: Plan) -> None:
    placed = [(place.param, place.numel) for chunk in plan.layout.chunks for place in chunk.params]
    if sorted(placed) != sorted((spec.name, spec.numel) for spec in profile.params):
        raise InfeasiblePlan("the plan's layout does not hold each parameter of the model once; make a new plan")
    if [chunk.index for chunk in plan.layout.chunks] != list(range(len(plan.layout.chunks))):
        raise InfeasiblePlan("the chunks of the plan's layout are not numbered 0, 1, 2, ...; make a new plan")
    empty = [chunk.index for chunk in plan.layout.chunks if not chunk.params]
    if empty:
        raise InfeasiblePlan(f"the chunks {quoted(empty)} of the plan's layout hold no parameter; make a new plan")
    for chunk in plan.layout.chunks:
        if len(chunk.states) > MAX_STATES or not 0 <= chunk.num_backwards <= MAX_CALLS:
            raise InfeasiblePlan(
                f"chunk {chunk.index} of the plan's layout has {len(chunk.states)} states and "
                f"num_backwards={chunk.num_backwards}, which no optimizer and no model has; make a new plan"
            )
    for chunk, right in zip(plan.layout.chunks, made_again(profile, plan.layout, plan.num_shards), strict=True):
        wrong = [field.name for field in fields(chunk) if getattr(chunk, field.name) != getattr(right, field.name)]
        if wrong:
            raise InfeasiblePlan(
                f"chunk {chunk.index} of the plan's layout has {wrong[0]}={quoted(getattr(chunk, wrong[0]))}, which by "
                f"its parameters is {quoted(getattr(right, wrong[0]))}; leave the layout as it was made, or make a new "
                "plan"
            )


def _check_blocks(profile: ModelProfile, plan: Plan) -> None:
    for spec, block in zip(profile.blocks, plan.blocks, strict=True):
        where = f"the plan of block {quoted(block.name)}"
        if block.inputs is Tier.DISK and block.held is Tier.HOST:
            raise InfeasiblePlan(
                f"{where} has inputs on the disk and activations on the host, which leave the GPU together; use "
                "inputs=host, or held=gpu"
            )
        if block.params is Tier.DISK and block.states is Tier.HOST:
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
        if block.held is Tier.DISK:
            raise InfeasiblePlan(f"{where} has activations on the disk, which is not supported; use held=gpu or host")
        if block.held is Tier.HOST and block.activation is Activation.RECOMPUTE:
            raise InfeasiblePlan(f"{where} recomputes, so that nothing is held; use held=gpu, or another activation")
        if block.held is Tier.HOST and spec.lazy_head:
            raise InfeasiblePlan(
                f"{where} has activations on the host, but it is fused with the loss and holds none; use held=gpu, and "
                "loss_kept_tokens to keep logits"
            )
        if block.activation is Activation.KEEP and block.inputs is not block.held:
            raise InfeasiblePlan(
                f"{where} keeps activations on the {block.held}, and its inputs are among them; use inputs={block.held}"
            )
        if block.late and not block.parks:
            raise InfeasiblePlan(
                f"{where} is updated late, but its gradient does not park: it would hold a buffer for which the others "
                "wait; use parks=true, or late=false"
            )
        if block.sums is Tier.DISK and block.states is not Tier.DISK:
            raise InfeasiblePlan(
                f"{where} has sums of gradients on the disk but states on the {block.states}, where the update would "
                "look for them; use sums=gpu or host, or states=disk"
            )
        if block.compute is not Tier.GPU:
            _check_lookup(spec, block, plan, where)
        if plan.is_cut:
            _check_sharing(spec, block, plan, where)
        if spec.loose and (block.params, block.states) != (Tier.GPU, Tier.GPU):
            raise InfeasiblePlan(f"{where} (parameters used outside of blocks) must have params and states on the gpu")


def _check_update_from_disk(placement: Placement) -> None:
    for place in placement.chunks:
        if place.states is Tier.DISK and place.chunk.optimised_numel and not place.buffer_bytes.get(Buffer.UPDATED):
            name = placement.plan.blocks[place.chunk.block].name
            raise InfeasiblePlan(
                f"the plan of block {name!r} has states on the disk, but its update has 0 bytes there: this optimizer "
                f"keeps no states, and its gradient comes from the GPU; use states={Tier.HOST}"
            )


def _check_sharing(spec: BlockSpec, block: BlockPlan, plan: Plan, where: str) -> None:
    """Of a block on several ranks."""
    optimised = any(chunk.block == spec.index and chunk.optimised_numel for chunk in plan.layout.chunks)
    if spec.loose and block.sharing is not Sharing.REPLICATED:
        raise InfeasiblePlan(
            f"{where} (parameters used outside of blocks) has sharing={block.sharing}, but plain autograd needs all of "
            f"it on each of {plan.ranks} ranks; use sharing={Sharing.REPLICATED}"
        )
    is_updated_elsewhere = block.params is Tier.GPU is not block.states and optimised
    if is_updated_elsewhere and block.sharing is not Sharing.PARAMS_REPLICATED:
        raise InfeasiblePlan(
            f"{where} has params on the gpu and states on the {block.states} of {plan.ranks} ranks with "
            f"sharing={block.sharing}; its parameters are whole there and its states are not: use "
            f"sharing={Sharing.PARAMS_REPLICATED}"
        )


def _check_loss_in_forward(profile: ModelProfile, plan: Plan) -> None:
    calls = [call for call in profile.calls if profile.blocks[call.block].lazy_head]
    if not calls or not all(may_run_in_forward(profile, call) for call in calls):
        raise InfeasiblePlan(
            "loss_in_forward is true, but this model has no head that is a trained nn.Linear in bf16 or fp32 before a "
            "fused loss; use loss_in_forward=false"
        )
    if plan.loss_kept_tokens:
        raise InfeasiblePlan(
            f"loss_kept_tokens is {plan.loss_kept_tokens}, but with loss_in_forward no logits wait; use one of the two"
        )


def _check_lookup(spec: BlockSpec, block: BlockPlan, plan: Plan, where: str) -> None:
    """Of an embedding on the host."""
    if plan.has_collectives:
        raise InfeasiblePlan(
            f"{where} has compute on the host, where each of {plan.ranks} ranks has a part of its table only; use "
            "compute=gpu"
        )
    if block.compute is Tier.DISK:
        raise InfeasiblePlan(f"{where} has compute on the disk; use gpu, or host for an embedding")
    if not spec.plain_embedding:
        raise InfeasiblePlan(
            f"{where} has compute on the host, but it ({quoted(spec.kind)}) is more than an nn.Embedding without "
            "max_norm, scale_grad_by_freq, sparse and hooks, whose rows alone can be looked up there; use compute=gpu"
        )
    if (block.params, block.states, block.sums) != (Tier.HOST, Tier.HOST, Tier.HOST):
        raise InfeasiblePlan(
            f"{where} has compute on the host, but params, states and sums on {block.params}, {block.states} and "
            f"{block.sums}; its table never leaves the host: put all of them there, or use compute=gpu"
        )
    chunks = [chunk for chunk in plan.layout.chunks if spec.index in chunk.users]
    if len(chunks) != 1 or len(chunks[0].users) != 1:
        raise InfeasiblePlan(
            f"{where} has compute on the host, but its table is used by {max(len(one.users) for one in chunks)} blocks "
            "(it is tied), and the others need it on the GPU anyway; use compute=gpu"
        )


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
    limits = "gpu_limit_bytes", "host_limit_bytes", "disk_limit_bytes"
    for name in (*limits, "num_input_buffers", *RING_COUNTS.values()):
        if getattr(plan, name) < 0:
            raise InfeasiblePlan(f"{name} is {getattr(plan, name)}; it must be 0 (nothing) or more")
    heads = [block for block in profile.blocks if block.lazy_head]
    if plan.loss_kept_tokens and not all(block.plain_linear for block in heads):
        raise InfeasiblePlan(
            f"loss_kept_tokens is {plan.loss_kept_tokens}, but the head ({', '.join(b.kind for b in heads)}) is more "
            "than an nn.Linear, whose logits are made again with a graph in backward; use loss_kept_tokens=0"
        )
    if plan.loss_in_forward:
        _check_loss_in_forward(profile, plan)
    if plan.rounded_on_gpu and (plan.update is Update.IN_BACKWARD or plan.accumulate > 1 or plan.has_collectives):
        raise InfeasiblePlan(
            f"rounded_on_gpu is true, but updates run {plan.update}, with accumulate={plan.accumulate} and "
            f"ranks={plan.ranks}: only with deferred updates, one pass a step and one rank do gradients wait rounded "
            "on the GPU; use rounded_on_gpu=false"
        )
    placement = Placement(plan)
    _check_update_from_disk(placement)
    for ring, name in RING_COUNTS.items():
        if placement.buffer_bytes[ring] and getattr(plan, name) < 1:
            raise InfeasiblePlan(f"{name} is 0, but chunks pass through such buffers; it must be at least 1")
    if buffer_bytes(profile, plan) and plan.num_input_buffers < 1:
        raise InfeasiblePlan("num_input_buffers is 0, but inputs of blocks wait on the disk; it must be at least 1")
    if plan.accumulate < 1:
        raise InfeasiblePlan(f"accumulate is {plan.accumulate}; it must be 1 (a step per backward) or more")
    _check_most("passes in a step", plan.accumulate, MAX_PASSES)
    _check_most("samples", plan.num_samples, MAX_SAMPLES)
    _check_most("micro-batches", -(-plan.num_samples // plan.micro_batch), MAX_MICRO_BATCHES)
    for name in ("num_slots", "num_grad_slots", "num_input_buffers", *RING_COUNTS.values()):
        _check_most(name, getattr(plan, name), MAX_SLOTS)
    slots, grad_slots = placement.widest_tick({call.block for call in profile.calls})
    if plan.num_slots < slots or plan.num_grad_slots < grad_slots:
        raise InfeasiblePlan(
            f"the plan has {plan.num_slots} slots and {plan.num_grad_slots} grad slots; its widest block needs "
            f"{slots} and {grad_slots} at once"
        )
