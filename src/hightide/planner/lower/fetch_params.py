"""Pass 2: parameters into slots before the ticks that use them, as early as the slot is free. Of several ranks each
fetches its shard, and a GATHER brings the rest; of a shard that stays on the GPU there is nothing to fetch."""

from __future__ import annotations

import math
from bisect import bisect_left

from hightide.ir.action import Action, ActionKey, Op, Place
from hightide.ir.chunk import ChunkSpec
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.lower.draft import Draft
from hightide.planner.slot_choice import Use, choose_windows

Slots = list[int | None]  # by slot, the chunk in it

# What all have in common: see Action.changed.
_EVICT = Action(ActionKey(Op.EVICT), Op.EVICT, Lane.COMPUTE, tick=0, kind=ChunkKind.PARAM)
_FETCH = Action(ActionKey(Op.FETCH), Op.FETCH, Lane.H2D, tick=0, kind=ChunkKind.PARAM, source=Place(Tier.HOST))


def fetch_params(draft: Draft, reuses_slots: bool = True) -> Slots:
    """Of a pass that starts with empty slots, because a step has made their copies stale. Returns what is in them at
    its end. Unless it `reuses_slots`, backward starts with empty ones too."""
    slots: Slots = [None] * draft.plan.num_slots
    _fill(draft, slots, reuses_slots)
    return slots


def fetch_params_again(laid: Draft, left: Slots, reuses_slots: bool = True) -> Draft:
    """Of a later pass of the same step: what is in the same slots at the end of the first pass (`left`), and of those
    that begin with it, need not be fetched. `laid`: with nothing but its ticks."""
    standing: Slots = left if reuses_slots else [None] * len(left)
    while True:
        draft, end = laid.copied(laid.mode), [*standing]
        _fill(draft, end, reuses_slots)
        gone = {index for index, after in zip(standing, end, strict=True) if index != after} - {None}
        if not gone:
            draft.standing = tuple(
                (index, standing.index(index)) for index in dict.fromkeys(standing) if index is not None
            )
            return draft
        standing = [None if index in gone else index for index in standing]


def _fill(draft: Draft, slots: Slots, reuses_slots: bool = True) -> None:
    """Before each tick what it needs; `slots` are those of the beginning, and of the end. What a slot still has is not
    fetched again (see `choose_windows`): in backward not even what forward has left there, unless `reuses_slots`."""
    of_forward: set[int] = set()  # chunks that backward must not find
    freed: dict[int, Action] = {}  # by slot that nothing has entered since: who has left it
    for tick in draft.ticks:
        needed = {}
        for place in draft.chunks_at(tick):
            index = place.chunk.index
            if place.is_looked_up:
                continue
            if place.is_streamed:
                needed[index] = place.num_slots
            elif place.is_refreshed and draft.uses[index][0] == tick.tick and not draft.mode.continues_step:
                _bring(draft, place, tick, None, [])
            elif place.is_gathered_after_update and draft.uses[index][0] == tick.tick:
                _await_gather(draft, tick, index)
        is_backward = tick.op is Op.BACKWARD
        seen = [None if is_backward and chunk in of_forward else chunk for chunk in slots]
        windows = choose_windows(seen, needed, _next_use(draft, tick.tick), _last_use(draft, tick.tick))
        gone = _make_room(draft, tick, slots, windows, needed)
        freed |= gone
        for index, start in windows.items():
            place = draft.placement.chunks[index]
            window = range(start, start + needed[index])
            left = [e for s, e in gone.items() if s in window or e.chunk == index]
            if draft.plan.is_cut:  # what enters on one lane does not follow what has entered on the other
                left += [e for s, e in freed.items() if s in window]
            _bring(draft, place, tick, start, left)
            for slot in window:
                slots[slot] = index
                freed.pop(slot, None)
            if not reuses_slots:
                (of_forward.discard if is_backward else of_forward.add)(index)


def _make_room(
    draft: Draft, tick: Action, slots: Slots, windows: dict[int, int], widths: dict[int, int]
) -> dict[int, Action]:
    """Evicts whoever stands in the windows, and chunks that move to another window. Returns slot -> EVICT that frees
    it."""
    taken = {slot for index, start in windows.items() for slot in range(start, start + widths[index])}
    leaving = {slots[slot] for slot in taken} | set(windows)
    evicts: dict[int, Action] = {}
    gone: dict[int, Action] = {}
    for slot, occupant in enumerate(slots):
        if occupant is None or occupant not in leaving:
            continue
        if occupant not in evicts:
            evicts[occupant] = _evict(draft, draft.plan.layout.chunks[occupant], tick, slot)
        gone[slot] = evicts[occupant]
        slots[slot] = None
    return gone


def _evict(draft: Draft, chunk: ChunkSpec, tick: Action, slot: int) -> Action:
    action = _EVICT.changed(
        id=ActionKey(Op.EVICT, chunk.index, ChunkKind.PARAM, tick.id),
        tick=tick.tick,
        opens=int(_last_use(draft, tick.tick)(chunk.index)),
        block=chunk.block,
        chunk=chunk.index,
        source=Place(Tier.GPU, slot),
    )
    draft.actions.append(action)
    return action


def _await_gather(draft: Draft, tick: Action, chunk: int) -> None:
    """Parameters that stay were gathered after their last update."""
    tick = draft.ticks[tick.tick]
    draft.ticks[tick.tick] = tick.changed(after_prev=(*tick.after_prev, ActionKey(Op.GATHER, chunk)))


def _bring(draft: Draft, place: ChunkPlace, tick: Action, slot: int | None, evicts: list[Action]) -> None:
    brought, is_here = _fetch(place, tick, slot, evicts), place.home is Tier.GPU
    if not is_here:
        draft.actions.append(brought)
    if place.is_gathered:
        gather = brought.changed(
            id=ActionKey(Op.GATHER, place.chunk.index, at=tick.id),
            op=Op.GATHER,
            lane=Lane.GATHER,
            source=Place(Tier.GPU) if is_here else brought.target,
            num_bytes=place.gathered_bytes,
        )
        brought = gather if is_here else gather.changed(after=(brought.id,), after_prev=())
        draft.actions.append(brought)
    draft.awaited[tick.tick].append(brought.id)


def _fetch(place: ChunkPlace, tick: Action, slot: int | None, evicts: list[Action]) -> Action:
    chunk = place.chunk
    return _FETCH.changed(
        id=ActionKey(Op.FETCH, chunk.index, ChunkKind.PARAM, tick.id),
        tick=tick.tick,
        opens=max((evict.opens for evict in evicts), default=-1),
        block=chunk.block,
        chunk=chunk.index,
        target=Place(Tier.GPU, slot),
        num_bytes=place.shard.param_bytes,
        after=tuple(dict.fromkeys(evict.id for evict in evicts)),
        after_prev=(ActionKey(Op.UPDATE, chunk.index),) if chunk.optimised_numel else (),
    )


def _next_use(draft: Draft, tick: int) -> Use:
    """First use at or after a tick; infinity if there is none in this pass."""

    def next_use(chunk: int) -> float:
        ticks = draft.uses[chunk]
        place = bisect_left(ticks, tick)
        return ticks[place] if place < len(ticks) else math.inf

    return next_use


def _last_use(draft: Draft, tick: int) -> Use:
    """Last use before a tick. -1: in the pass before; who asks knows that the chunk is in a slot, so there was one."""

    def last_use(chunk: int) -> float:
        at = bisect_left(draft.uses[chunk], tick)
        return draft.uses[chunk][at - 1] if at else -1

    return last_use
