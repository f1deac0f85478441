"""Checks what an action says by itself, whatever comes before and after it: its lane, what it moves, from where to
where, and how many bytes."""

from __future__ import annotations

from typing import NamedTuple

from hightide.ir.action import TICK_OPS, Action, Op, Place
from hightide.ir.block import ModelProfile
from hightide.ir.plan import Plan
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.lookup import rows_bytes, sum_bytes
from hightide.planner.placement import Placement
from hightide.planner.waiting import away

_GPU, _HOST, _DISK = Tier.GPU, Tier.HOST, Tier.DISK
_PARAM, _GRAD, _STATE = ChunkKind.PARAM, ChunkKind.GRAD, ChunkKind.STATE


class _Form(NamedTuple):
    lane: Lane = Lane.COMPUTE
    source: Tier | None = None
    target: Tier | None = None
    kinds: tuple[ChunkKind | None, ...] = (None,)  # of chunks


_FORMS = {
    Op.FETCH: _Form(Lane.H2D, _HOST, _GPU, (_PARAM, _GRAD)),
    Op.EVICT: _Form(source=_GPU, kinds=(_PARAM,)),
    Op.CLEAR: _Form(target=_GPU, kinds=(_GRAD,)),
    Op.WRITE_BACK: _Form(Lane.D2H, _GPU, _HOST, (_GRAD,)),
    Op.LOOK_UP: _Form(Lane.H2D, _HOST, _GPU),
    Op.SUM: _Form(Lane.CPU, kinds=(_GRAD,)),
    Op.STASH: _Form(Lane.D2H, _GPU, _HOST),
    Op.UNSTASH: _Form(Lane.H2D, _HOST, _GPU),
    Op.UPDATE: _Form(kinds=(_STATE,)),  # on the lane of the tier where the states are
    Op.SETTLE: _Form(Lane.CPU, kinds=(_STATE,)),
    Op.READ: _Form(Lane.DISK_READ, _DISK, _HOST, (_PARAM, _GRAD, _STATE)),
    Op.WRITE: _Form(Lane.DISK_WRITE, _HOST, _DISK, (_GRAD, _STATE)),
    Op.GATHER: _Form(Lane.GATHER, _GPU, _GPU, (_PARAM,)),
    Op.REDUCE: _Form(Lane.REDUCE, _GPU, _GPU, (_GRAD,)),
}
_OF_TICKS = _Form()
_OF_CALLS = frozenset({Op.STASH, Op.UNSTASH, Op.LOOK_UP, Op.SUM})


def objection(profile: ModelProfile, placement: Placement, action: Action) -> str | None:
    """What is wrong with it, if anything."""
    form, of_inputs = _FORMS.get(action.op, _OF_TICKS), is_of_inputs(action)
    is_of_chunk = (form.kinds != (None,) or action.op is Op.LOOK_UP) and not of_inputs
    if is_of_chunk and not 0 <= (-1 if action.chunk is None else action.chunk) < len(placement.chunks):
        return f"names the chunk {action.chunk}; the plan has {len(placement.chunks)}"
    is_of_call = action.op in _OF_CALLS or of_inputs
    if is_of_call and not 0 <= (-1 if action.call is None else action.call) < len(profile.calls):
        return f"names the call {action.call}; the model has {len(profile.calls)}"
    if action.kind not in form.kinds and not of_inputs:
        return f"is about {action.kind}, which no {action.op} is"
    place = None if action.chunk is None else placement.chunks[action.chunk]
    form = _of_rounded(form, action, place)
    is_update = action.op is Op.UPDATE and place is not None and place.states is not Tier.GPU
    lane = Lane.CPU if is_update else form.lane
    if action.lane is not lane:
        return f"is on the lane {action.lane}; it belongs on {lane}"
    if (_tier(action.source), _tier(action.target)) != (form.source, form.target):
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


def _of_rounded(form: _Form, action: Action, place: ChunkPlace | None) -> _Form:
    """Between a grad slot and the place on the GPU where what is rounded waits."""
    is_of_gradient = action.kind is ChunkKind.GRAD and action.op in (Op.FETCH, Op.WRITE_BACK)
    if not is_of_gradient or place is None or not place.is_rounded_home:
        return form
    return form._replace(lane=Lane.COMPUTE, source=Tier.GPU, target=Tier.GPU)


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
