"""Checks what an action says by itself, whatever comes before and after it: its lane, what it moves, from where to
where, and how many bytes."""

from __future__ import annotations

from hightide.ir.action import TICK_OPS, Action, Op, Place
from hightide.ir.block import ModelProfile
from hightide.ir.plan import Plan
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.lookup import rows_bytes, sum_bytes
from hightide.planner.placement import Placement
from hightide.planner.waiting import away

_LANES = {
    Op.FETCH: Lane.H2D,
    Op.UNSTASH: Lane.H2D,
    Op.WRITE_BACK: Lane.D2H,
    Op.STASH: Lane.D2H,
    Op.LOOK_UP: Lane.H2D,
    Op.SUM: Lane.CPU,
    Op.SETTLE: Lane.CPU,
    Op.READ: Lane.DISK_READ,
    Op.WRITE: Lane.DISK_WRITE,
    Op.GATHER: Lane.GATHER,
    Op.REDUCE: Lane.REDUCE,
}  # others: compute, and updates where the states are
_WAYS: dict[Op, tuple[Tier | None, Tier | None]] = {
    Op.FETCH: (Tier.HOST, Tier.GPU),
    Op.UNSTASH: (Tier.HOST, Tier.GPU),
    Op.WRITE_BACK: (Tier.GPU, Tier.HOST),
    Op.STASH: (Tier.GPU, Tier.HOST),
    Op.LOOK_UP: (Tier.HOST, Tier.GPU),
    Op.EVICT: (Tier.GPU, None),
    Op.CLEAR: (None, Tier.GPU),
    Op.READ: (Tier.DISK, Tier.HOST),
    Op.WRITE: (Tier.HOST, Tier.DISK),
    Op.GATHER: (Tier.GPU, Tier.GPU),
    Op.REDUCE: (Tier.GPU, Tier.GPU),
}
_KINDS = {
    Op.FETCH: (ChunkKind.PARAM, ChunkKind.GRAD),
    Op.EVICT: (ChunkKind.PARAM,),
    Op.CLEAR: (ChunkKind.GRAD,),
    Op.WRITE_BACK: (ChunkKind.GRAD,),
    Op.SUM: (ChunkKind.GRAD,),
    Op.UPDATE: (ChunkKind.STATE,),
    Op.SETTLE: (ChunkKind.STATE,),
    Op.READ: (ChunkKind.PARAM, ChunkKind.GRAD, ChunkKind.STATE),
    Op.WRITE: (ChunkKind.GRAD, ChunkKind.STATE),
    Op.GATHER: (ChunkKind.PARAM,),
    Op.REDUCE: (ChunkKind.GRAD,),
}


def objection(profile: ModelProfile, placement: Placement, action: Action) -> str | None:
    """What is wrong with it, if anything."""
    of_inputs = is_of_inputs(action)
    if (
        (action.op in _KINDS or action.op is Op.LOOK_UP)
        and not of_inputs
        and not 0 <= (-1 if action.chunk is None else action.chunk) < len(placement.chunks)
    ):
        return f"names the chunk {action.chunk}; the plan has {len(placement.chunks)}"
    is_of_call = action.op in (Op.STASH, Op.UNSTASH, Op.LOOK_UP, Op.SUM) or of_inputs
    if is_of_call and not 0 <= (-1 if action.call is None else action.call) < len(profile.calls):
        return f"names the call {action.call}; the model has {len(profile.calls)}"
    if action.kind not in _KINDS.get(action.op, (None,)) and not of_inputs:
        return f"is about {action.kind}, which no {action.op} is"
    place = None if action.chunk is None else placement.chunks[action.chunk]
    lane = _lane(action.op, place)
    if action.lane is not lane:
        return f"is on the lane {action.lane}; it belongs on {lane}"
    way = _tier(action.source), _tier(action.target)
    if way != _WAYS.get(action.op, (None, None)):
        return f"goes from {action.source} to {action.target}, which is no way of a {action.op}"
    if action.op in (Op.LOOK_UP, Op.SUM) and not (place is not None and place.is_looked_up):
        return f"is about chunk {action.chunk}, which is used on the GPU"
    num_bytes = _num_bytes(profile, placement.plan, action, place)
    if action.num_bytes != num_bytes:
        return f"moves {action.num_bytes} bytes; it has {num_bytes} to move"
    return None


def is_of_inputs(action: Action) -> bool:
    """A READ or WRITE of what a call leaves for its backward, and not of a chunk."""
    return action.op in (Op.READ, Op.WRITE) and action.chunk is None and action.call is not None


def _lane(op: Op, place: ChunkPlace | None) -> Lane:
    if op is Op.UPDATE and place is not None and place.states is not Tier.GPU:
        return Lane.CPU
    return _LANES.get(op, Lane.COMPUTE)


def _tier(place: Place | None) -> Tier | None:
    return None if place is None else place.tier


def _num_bytes(profile: ModelProfile, plan: Plan, action: Action, place: ChunkPlace | None) -> int:
    if action.op in TICK_OPS or action.op is Op.EVICT:
        return 0
    if action.op in (Op.STASH, Op.UNSTASH) or is_of_inputs(action):
        assert action.call is not None
        return away(plan, profile.calls[action.call]).num_bytes
    assert place is not None
    if place.is_looked_up and action.call is not None:
        call = profile.calls[action.call]
        return sum_bytes(profile, plan, call) if action.op is Op.SUM else rows_bytes(plan, call)
    if action.op in (Op.UPDATE, Op.SETTLE):
        return place.update_bytes if action.op is Op.UPDATE else place.settle_bytes
    if action.kind is ChunkKind.STATE:
        return place.read_bytes if action.op is Op.READ else place.written_bytes
    if action.op is Op.CLEAR:
        return place.chunk.grad_bytes
    if action.op in (Op.GATHER, Op.REDUCE):
        return place.gathered_bytes if action.op is Op.GATHER else place.reduced_bytes
    return place.shard.param_bytes if action.kind is ChunkKind.PARAM else place.grad_bytes
