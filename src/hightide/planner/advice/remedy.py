"""A change for a plan that does not fit: by what holds the memory at the moment at which it is short."""

from __future__ import annotations

from collections import Counter

from hightide.ir.action import Action, Op, Schedule
from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.ir.units import format_bytes
from hightide.planner.chunk_place import RING_COUNTS, Buffer
from hightide.planner.disk_inputs import buffer_bytes
from hightide.planner.loss_tiles import kept_logits_bytes
from hightide.planner.placement import Placement

NUM_NAMED = 2
SMALLER_BATCH = "a smaller batch"
SMALLER_MICRO_BATCH = "a smaller micro_batch"


def remedy(
    profile: ModelProfile, placement: Placement, schedule: Schedule, tier: Tier, peak_bytes: int, moment: str
) -> str:
    """The changes that would free most, with what they would free at most. `moment`: the action at which the peak is;
    "": it is what is always there."""
    if tier is Tier.DISK:
        return "fewer blocks, or inputs of fewer blocks, on the disk"
    if tier is Tier.HOST:
        shares = _on_host(profile, placement, peak_bytes - schedule.host_base_bytes)
    else:
        shares = _on_gpu(profile, placement, schedule, peak_bytes, moment)
    found = [(change, num_bytes) for change, num_bytes in shares.most_common(NUM_NAMED) if num_bytes > 0]
    named = [f"{change} (up to {format_bytes(num_bytes)})" for change, num_bytes in found]
    return ", or ".join(named) or SMALLER_BATCH


def _on_host(profile: ModelProfile, placement: Placement, waiting_bytes: int) -> Counter[str]:
    """`waiting_bytes`: block inputs and parked gradients, the only things that come and go there."""
    plan = placement.plan
    return Counter(
        {
            "params and states of more blocks on the gpu": placement.bytes_on[Tier.HOST],
            "inputs of more blocks on the gpu": waiting_bytes,
            "a smaller num_input_buffers": max(0, plan.num_input_buffers - 1) * buffer_bytes(profile, plan),
            **{
                f"a smaller {name}": max(0, placement.num_buffers[ring] - 1) * placement.buffer_bytes[ring]
                for ring, name in RING_COUNTS.items()
            },
        }
    )


def _on_gpu(
    profile: ModelProfile, placement: Placement, schedule: Schedule, peak_bytes: int, moment: str
) -> Counter[str]:
    slots, grad_slots = placement.widest_tick({call.block for call in profile.calls})
    plan, sizes = placement.plan, placement.buffer_bytes
    movable = [place for place in placement.chunks if not profile.blocks[place.chunk.block].loose]
    shares = Counter(
        {
            "a smaller num_slots": (plan.num_slots - slots) * sizes[Buffer.SLOT],
            "a smaller num_grad_slots": (plan.num_grad_slots - grad_slots) * sizes[Buffer.GRAD_SLOT],
            "params and states of more blocks on the host": sum(place.bytes_on[Tier.GPU] for place in movable),
        }
    )
    if not moment:
        return shares
    now = schedule.by_id[moment]
    kept = _kept(profile, plan, schedule, now)
    passing_bytes = peak_bytes - schedule.gpu_base_bytes - kept.total() - now.gpu_transient
    # Where activations are kept, their graph holds the inputs on the GPU.
    waits = any(block.inputs is Tier.GPU and block.activation is not Activation.KEEP for block in plan.blocks)
    shares += kept
    shares["inputs of more blocks on the host" if waits else SMALLER_BATCH] += passing_bytes
    if now.op in (Op.FORWARD, Op.BACKWARD):
        shares[_for_a_tick(profile, plan, now)] += now.gpu_transient
    return shares


def _kept(profile: ModelProfile, plan: Plan, schedule: Schedule, now: Action) -> Counter[str]:
    """What forwards have kept by now for backwards that have not ended."""
    kept: Counter[str] = Counter()
    for action in schedule.actions[: schedule.actions.index(now) + 1]:
        if not action.gpu_kept or (action is now and action.op is Op.BACKWARD):
            continue
        is_head = _is_head(profile, action)
        is_early = is_head and plan.loss_in_forward
        # A head keeps sums of rows, too.
        num_bytes = kept_logits_bytes(profile, plan) if is_head and not is_early else action.gpu_kept
        change = "a smaller loss_kept_tokens" if is_head else "activation=recompute in more blocks"
        change = "loss_in_forward=false" if is_early else change
        kept[change] += num_bytes if action.op in (Op.FORWARD, Op.UNSTASH) else -num_bytes
    return kept


def _for_a_tick(profile: ModelProfile, plan: Plan, tick: Action) -> str:
    assert tick.call is not None
    if _is_head(profile, tick):
        return "a smaller loss_tile_tokens"
    return SMALLER_MICRO_BATCH if profile.calls[tick.call].splittable and plan.micro_batch > 1 else SMALLER_BATCH


def _is_head(profile: ModelProfile, action: Action) -> bool:
    return action.block is not None and profile.blocks[action.block].lazy_head
