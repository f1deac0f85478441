"""Pass 5: the optimizer's update of each chunk that got a gradient, where its states are. Where these may be written
later than parameters (`ChunkPlace.settles`), that is an action of its own. Parameters that are whole on each of several
GPUs, and updated in shards, are gathered after it: the next pass that uses them waits for that.

An update on the GPU in backward waits for the REDUCE of its gradient. So that compute does not, it comes a few ticks
later, if its grad slot is free so long."""

from __future__ import annotations

from hightide.ir.action import Action, ActionKey, Op, Place
from hightide.ir.plan import Update
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.lower.draft import Draft

TICKS_OF_REDUCE = 2  # for which an update on the GPU may be put off

_UPDATE = Action(ActionKey(Op.UPDATE), Op.UPDATE, Lane.CPU, tick=0, kind=ChunkKind.STATE)


def add_updates(draft: Draft) -> None:
    for place in draft.placement.chunks:
        if place.chunk.optimised_numel == 0:
            continue
        if draft.profile.blocks[place.chunk.block].loose:
            draft.actions.append(_at_step(draft, place, _last_backward(draft)))
        elif draft.backward_uses.get(place.chunk.index) and not place.is_used_up:  # those left grad slots by it
            on_gpu = place.states is Tier.GPU
            draft.actions.append(update_on_gpu(draft, place) if on_gpu else _on_host(draft, place))
            if place.settles:
                draft.actions.append(_settle(draft, place, draft.actions[-1]))
    _put_off(draft)
    updates = [action for action in draft.actions if action.op is Op.UPDATE]
    draft.actions += [_gather(draft, one) for one in updates if draft.place_of(one).is_gathered_after_update]


def _put_off(draft: Draft) -> None:
    if not draft.last_reduce:
        return
    last = draft.ticks[-2].tick
    first_waiting: dict[ActionKey, int] = {}  # by what is waited for, the tick
    for action in draft.actions:
        for name in action.after:
            first_waiting[name] = min(first_waiting.get(name, last + 1), action.tick)
    for at, action in enumerate(draft.actions):
        on_gpu = action.op is Op.UPDATE and action.lane is Lane.COMPUTE
        if on_gpu and action.runs_when_open and action.chunk in draft.last_reduce:
            opens = min(last, action.opens + TICKS_OF_REDUCE, first_waiting.get(action.id, last + 1) - 1)
            draft.actions[at] = action.changed(opens=max(action.opens, opens))


def _gather(draft: Draft, update: Action) -> Action:
    place = draft.place_of(update)
    return update.changed(
        id=ActionKey(Op.GATHER, place.chunk.index),
        op=Op.GATHER,
        lane=Lane.GATHER,
        tick=_due(draft, place),
        opens=update.opens if update.runs_when_open else update.tick,
        kind=ChunkKind.PARAM,
        source=Place(Tier.GPU),
        target=Place(Tier.GPU),
        num_bytes=place.gathered_bytes,
        after=(update.id,),
    )


def update_on_gpu(draft: Draft, place: ChunkPlace) -> Action:
    last = draft.ticks[draft.backward_uses[place.chunk.index][-1]]
    if draft.plan.update is Update.DEFERRED:
        return _at_step(draft, place, last)
    after = last.id, *_reduced(draft, place)
    return _action(place, Lane.COMPUTE, tick=_due(draft, place), opens=last.tick, after=after)


def _reduced(draft: Draft, place: ChunkPlace) -> tuple[ActionKey, ...]:
    reduce = draft.last_reduce.get(place.chunk.index)
    return () if reduce is None else (reduce.id,)


def _on_host(draft: Draft, place: ChunkPlace) -> Action:
    due = _due(draft, place)
    home = draft.last_write_back[place.chunk.index]
    if draft.plan.update is Update.IN_BACKWARD:
        return _action(place, Lane.CPU, tick=due, opens=home.opens, after=(home.id,))
    step = draft.ticks[-1]
    return _action(place, Lane.CPU, tick=due, opens=step.tick, after=(step.id, home.id))


def _settle(draft: Draft, place: ChunkPlace, update: Action) -> Action:
    """Before the next gradient comes to where this one is: the lane has all of the next pass for it."""
    due = len(draft.ticks) + draft.backward_uses[place.chunk.index][-1]
    return update.changed(
        id=place.last_of_update, op=Op.SETTLE, tick=due, num_bytes=place.settle_bytes, after=(update.id,)
    )


def _due(draft: Draft, place: ChunkPlace) -> int:
    """When the next pass uses the chunk first: that is the order in which the cpu lane takes updates."""
    return len(draft.ticks) + draft.uses[place.chunk.index][0]


def _at_step(draft: Draft, place: ChunkPlace, last: Action | None) -> Action:
    """Inline on entry of the STEP tick, in the user's thread."""
    step = draft.ticks[-1]
    after = *((last.id,) if last else ()), *_reduced(draft, place)
    if place.is_rounded_home:
        after = *after, draft.last_write_back[place.chunk.index].id
    return _action(place, Lane.COMPUTE, tick=step.tick, opens=step.tick - 1, after=after)


def _last_backward(draft: Draft) -> Action | None:
    last = draft.ticks[-2] if len(draft.ticks) > 1 else None
    return last if last is not None and last.op is Op.BACKWARD else None


def _action(place: ChunkPlace, lane: Lane, tick: int, opens: int, after: tuple[ActionKey, ...]) -> Action:
    return _UPDATE.changed(
        id=ActionKey(Op.UPDATE, place.chunk.index),
        lane=lane,
        tick=tick,
        opens=opens,
        block=place.chunk.block,
        chunk=place.chunk.index,
        num_bytes=place.update_bytes,
        after=after,
    )
