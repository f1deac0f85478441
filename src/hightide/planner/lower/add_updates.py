"""Pass 5: the optimizer's update of each chunk that got a gradient, where its states are."""

from __future__ import annotations

from hightide.ir.action import Action, ActionKey, Op
from hightide.ir.plan import Update
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.lower.draft import Draft
from hightide.planner.placement import ChunkPlace


def add_updates(draft: Draft) -> None:
    for place in draft.placement.chunks:
        if place.chunk.optimised_numel == 0:
            continue
        if draft.profile.blocks[place.chunk.block].loose:
            draft.actions.append(_at_step(draft, place, _last_backward(draft)))
        elif draft.backward_uses.get(place.chunk.index) and not place.is_used_up:  # those left grad slots by it
            on_gpu = place.states is Tier.GPU
            draft.actions.append(update_on_gpu(draft, place) if on_gpu else _on_host(draft, place))


def update_on_gpu(draft: Draft, place: ChunkPlace) -> Action:
    last = draft.ticks[draft.backward_uses[place.chunk.index][-1]]
    if draft.plan.update is Update.DEFERRED:
        return _at_step(draft, place, last)
    return _action(place, Lane.COMPUTE, tick=_due(draft, place), opens=last.tick, after=(last.id,))


def _on_host(draft: Draft, place: ChunkPlace) -> Action:
    due = _due(draft, place)
    home = draft.last_write_back[place.chunk.index]
    if draft.plan.update is Update.IN_BACKWARD:
        return _action(place, Lane.CPU, tick=due, opens=home.opens, after=(home.id,))
    step = draft.ticks[-1]
    return _action(place, Lane.CPU, tick=due, opens=step.tick, after=(step.id, home.id))


def _due(draft: Draft, place: ChunkPlace) -> int:
    """When the next pass uses the chunk first: that is the order in which the cpu lane takes updates."""
    return len(draft.ticks) + draft.uses[place.chunk.index][0]


def _at_step(draft: Draft, place: ChunkPlace, last: Action | None) -> Action:
    """Inline on entry of the STEP tick, in the user's thread."""
    step = draft.ticks[-1]
    return _action(place, Lane.COMPUTE, tick=step.tick, opens=step.tick - 1, after=(last.id,) if last else ())


def _last_backward(draft: Draft) -> Action | None:
    last = draft.ticks[-2] if len(draft.ticks) > 1 else None
    return last if last is not None and last.op is Op.BACKWARD else None


def _action(place: ChunkPlace, lane: Lane, tick: int, opens: int, after: tuple[ActionKey, ...]) -> Action:
    return Action(
        id=ActionKey(Op.UPDATE, place.chunk.index),
        op=Op.UPDATE,
        lane=lane,
        tick=tick,
        opens=opens,
        block=place.chunk.block,
        chunk=place.chunk.index,
        kind=ChunkKind.STATE,
        num_bytes=place.update_bytes,
        after=after,
    )
