"""Passes 2 and 3 of embeddings on the host: rows go to the GPU, their gradients come back and are summed there. See
[Note: looking up on the host] in planner/lookup.py."""

from __future__ import annotations

from hightide.ir.action import Action, ActionKey, Op, Place
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.lookup import is_looked_up, rows_bytes, sum_bytes
from hightide.planner.lower.draft import Draft


def look_up_rows(draft: Draft) -> None:
    """It opens with the tick before its own, and is issued when the block is called: only then is it known which
    rows."""
    for tick in draft.ticks:
        if tick.op is not Op.FORWARD or (place := _table(draft, tick)) is None:
            continue
        assert tick.call is not None
        action = Action(
            id=ActionKey(Op.LOOK_UP, tick.call),
            op=Op.LOOK_UP,
            lane=Lane.H2D,
            tick=tick.tick,
            opens=tick.tick - 1,
            block=tick.block,
            call=tick.call,
            chunk=place.chunk.index,
            source=Place(Tier.HOST),
            target=Place(Tier.GPU),
            num_bytes=rows_bytes(draft.plan, draft.profile.calls[tick.call]),
            after_prev=_updates(place),
        )
        draft.actions.append(action)
        draft.awaited[tick.tick].append(action.id)


def sum_rows(draft: Draft) -> None:
    """One after the other where a table is used by several calls: they share buffers, and sums keep their order. So do
    passes: the gradient in the GPU's buffer has left when the next is copied there, and that in the host's is summed
    when the next arrives."""
    added: dict[int, list[tuple[Action, Action]]] = {}
    for tick in draft.ticks:
        if tick.op is Op.BACKWARD and (place := _table(draft, tick)) is not None and place.chunk.trainable_numel:
            earlier = added.setdefault(place.chunk.index, [])
            if earlier:
                draft.awaited[tick.tick].append(earlier[-1][0].id)
            earlier.append(_sum(draft, tick, place, earlier[-1][1] if earlier else None))
    for chunk, pairs in added.items():
        (leaves, summed), (last_leaves, last) = pairs[0], pairs[-1]
        pairs[0] = leaves.changed(after_prev=(last.id,)), summed
        first = draft.ticks[leaves.opens]
        draft.ticks[leaves.opens] = first.changed(after_prev=(*first.after_prev, last_leaves.id))
        draft.actions += [action for pair in pairs for action in pair]
        draft.last_write_back[chunk] = last


def _sum(draft: Draft, tick: Action, place: ChunkPlace, earlier: Action | None) -> tuple[Action, Action]:
    assert tick.call is not None
    chunk, call = place.chunk, draft.profile.calls[tick.call]
    leaves = Action(
        id=ActionKey(Op.WRITE_BACK, chunk.index, at=tick.id),
        op=Op.WRITE_BACK,
        lane=Lane.D2H,
        tick=len(draft.ticks) - 1,  # at the latest step() needs it
        opens=tick.tick,
        block=chunk.block,
        call=tick.call,
        chunk=chunk.index,
        kind=ChunkKind.GRAD,
        source=Place(Tier.GPU),
        target=Place(Tier.HOST),
        num_bytes=rows_bytes(draft.plan, call),
        after=(tick.id, *([earlier.id] if earlier else [])),
    )
    summed = leaves.changed(
        id=ActionKey(Op.SUM, chunk.index, at=tick.id),
        op=Op.SUM,
        lane=Lane.CPU,
        source=None,
        target=None,
        num_bytes=sum_bytes(draft.profile, draft.plan, call),
        after=(leaves.id,),
        after_prev=_updates(place),
    )
    return leaves, summed


def _updates(place: ChunkPlace) -> tuple[ActionKey, ...]:
    return (ActionKey(Op.UPDATE, place.chunk.index),) if place.chunk.optimised_numel else ()


def _table(draft: Draft, tick: Action) -> ChunkPlace | None:
    if tick.call is None or not is_looked_up(draft.plan, draft.profile.calls[tick.call]):
        return None
    (place,) = draft.chunks_at(tick)
    return place
