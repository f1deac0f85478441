"""Pass 3: gradients. One whose states are on the host is summed in a grad slot and written back when its block is done.
One that is used up by its update on the GPU leaves its grad slot with that.

A chunk that is used again later in the pass (tied parameters), or that has a gradient from an earlier pass, continues
its sum: it is fetched instead of cleared. So the GPU always adds to the whole sum, and rounding does not depend on
placement. On the link and at home a gradient may be narrower than its sum (plan.gradients).

One that is rounded and waits for the step on the GPU (ChunkPlace.is_rounded_home) leaves its grad slot likewise, by a
WRITE_BACK of the compute lane, and a sum that continues comes back by a FETCH of it.

In a step of several passes a sum may stay on the GPU, at a place of its own, until the last of them has added to it
(ChunkPlace.stays).

[Note: reducing gradients] Of several ranks each makes a whole gradient of its own batch. When a block's backward is
done, a REDUCE makes the mean over ranks of it, and only this rank's shard goes on: home, or to its update. A sum that
continues is the shard of a mean: its FETCH puts it into this rank's own ranges of a cleared slot, so (times the number
of ranks) that the next REDUCE leaves it in the mean. Sums whose home is the GPU are not fetched: the slot is cleared,
and the REDUCE adds to them, unless it is the first. Sums that stay on the GPU, and those that are whole on each rank,
are reduced where they are, in the last pass of a step only; a second pass of ACCUMULATE adds to the mean, which is the
same on all ranks, and so is the mean of it. Gradients that plain autograd makes are final only at the step: their
REDUCE is issued on its entry."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hightide.ir.action import Action, ActionKey, Op, Place
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.lower.add_updates import update_on_gpu
from hightide.planner.lower.draft import Draft
from hightide.planner.slot_choice import choose_windows

_OF_GRADIENT = Action(ActionKey(Op.CLEAR), Op.CLEAR, Lane.COMPUTE, tick=0, kind=ChunkKind.GRAD)


@dataclass
class _GradSlots:
    occupants: list[int | None]  # chunks whose gradient is open
    last_tick: dict[int, int] = field(default_factory=dict)  # chunk in a slot -> last BACKWARD that added to it
    exits: dict[int, Action] = field(default_factory=dict)  # slot -> WRITE_BACK or UPDATE that frees it
    first_entries: dict[int, ActionKey] = field(default_factory=dict)  # slot -> id of the first entry in this pass


def move_gradients(draft: Draft) -> None:
    slots = _GradSlots([None] * draft.plan.num_grad_slots)
    for tick in draft.ticks:
        if tick.op is not Op.BACKWARD:
            continue
        needed: dict[int, int] = {}
        for place in draft.chunks_at(tick):
            index = place.chunk.index
            if place.is_looked_up or not place.chunk.trainable_numel:
                continue
            if place.in_grad_slot:
                needed[index] = place.num_grad_slots
            elif draft.mode.starts_sums and draft.backward_uses[index][0] == tick.tick:
                _clear(draft, place, tick, None, [])
        _exit_all(draft, slots, {chunk for chunk in slots.last_tick if chunk not in needed})
        _enter_all(draft, slots, tick, needed)
    _exit_all(draft, slots, set(slots.last_tick))
    _follow_previous_pass(draft, slots)


def finish_gradients(draft: Draft) -> None:
    """Of the last pass of a step: those that no grad slot has."""
    _reduce_those_that_stayed(draft)
    _send_those_that_stayed(draft)


def _reduce_those_that_stayed(draft: Draft) -> None:
    for place in draft.placement.chunks:
        if not place.is_reduced or place.in_grad_slot:
            continue
        uses = draft.backward_uses.get(place.chunk.index)
        if draft.profile.blocks[place.chunk.block].loose:
            _reduce(draft, place, draft.ticks[-2], None)
        elif uses:
            _reduce(draft, place, draft.ticks[uses[-1]], None)


def _send_those_that_stayed(draft: Draft) -> None:
    for place in draft.placement.chunks:
        uses = draft.backward_uses.get(place.chunk.index)
        if place.stays and place.leaves and uses:
            last = draft.last_write_back[place.chunk.index] = _write_back(draft, place, draft.ticks[uses[-1]], None)
            draft.actions.append(last)


def _reduce(draft: Draft, place: ChunkPlace, tick: Action, slot: int | None) -> Action:
    """Where it is summed, or from there to the place of its shard."""
    chunk, home = place.chunk, place.is_reduced_home
    action = _of_gradient(
        draft,
        place,
        tick,
        Op.REDUCE,
        Lane.REDUCE,
        source=Place(Tier.GPU, slot),
        target=Place(Tier.GPU, None if home else slot),
        num_bytes=place.reduced_bytes,
        after=(tick.id,),
        after_prev=(ActionKey(Op.UPDATE, chunk.index),) if home and chunk.optimised_numel else (),
    )
    draft.last_reduce[chunk.index] = action
    draft.actions.append(action)
    return action


def _enter_all(draft: Draft, slots: _GradSlots, tick: Action, needed: dict[int, int]) -> None:
    """All chunks still in slots are needed by this tick; slots left by others stand in as ghosts, oldest exit first."""
    room = [
        _ghost(slot) if chunk is None and slot in slots.exits else chunk for slot, chunk in enumerate(slots.occupants)
    ]
    windows = choose_windows(room, needed, lambda _: math.inf, lambda ghost: slots.exits[_ghost(ghost)].opens)
    _exit_all(draft, slots, windows.keys() & slots.last_tick.keys())
    for index, start in windows.items():
        window = range(start, start + needed[index])
        entry = _enter(draft, slots, draft.placement.chunks[index], tick, window)
        for slot in window:
            slots.occupants[slot] = index
            slots.first_entries.setdefault(slot, entry)
    for index in needed:
        slots.last_tick[index] = tick.tick


def _ghost(slot: int) -> int:
    """A name for a slot that was left, which no chunk has. Its own inverse."""
    return -1 - slot


def _enter(draft: Draft, slots: _GradSlots, place: ChunkPlace, tick: Action, window: range) -> ActionKey:
    chunk = place.chunk
    before = [slots.exits[slot] for slot in window if slot in slots.exits]
    earlier = draft.last_write_back.get(chunk.index)
    if place.is_reduced_home or (earlier is None and draft.mode.starts_sums):
        return _clear(draft, place, tick, window.start, before)
    stays_here = place.is_rounded_home
    action = Action(
        id=ActionKey(Op.FETCH, chunk.index, ChunkKind.GRAD, tick.id),
        op=Op.FETCH,
        lane=Lane.COMPUTE if stays_here else Lane.H2D,
        tick=tick.tick,
        opens=tick.tick - 1
        if stays_here
        else max((exit.opens for exit in [*before, *([earlier] if earlier else [])]), default=-1),
        block=chunk.block,
        chunk=chunk.index,
        kind=ChunkKind.GRAD,
        source=Place(Tier.GPU if stays_here else Tier.HOST),
        target=Place(Tier.GPU, window.start),
        num_bytes=place.grad_bytes,
        after=tuple(dict.fromkeys(exit.id for exit in [*before, *([earlier] if earlier else [])])),
    )
    draft.actions.append(action)
    if not stays_here:
        draft.awaited[tick.tick].append(action.id)
    return action.id


def _clear(draft: Draft, place: ChunkPlace, tick: Action, slot: int | None, before: list[Action]) -> ActionKey:
    """Runs inline on entry of its tick."""
    chunk = place.chunk
    action = _OF_GRADIENT.changed(
        id=ActionKey(Op.CLEAR, chunk.index, at=tick.id),
        tick=tick.tick,
        opens=tick.tick - 1,
        block=chunk.block,
        chunk=chunk.index,
        target=Place(Tier.GPU, slot),
        num_bytes=chunk.grad_bytes,
        after=tuple(dict.fromkeys(exit.id for exit in before)),
        after_prev=_read_before(draft, place) if slot is None else (),
    )
    draft.actions.append(action)
    return action.id


def _read_before(draft: Draft, place: ChunkPlace) -> tuple[ActionKey, ...]:
    """Who has read a gradient at its place on the GPU last: the copy that took it away, or the update."""
    chunk = place.chunk
    last = draft.ticks[draft.backward_uses[chunk.index][-1]].id
    if place.stays and place.leaves:
        return (ActionKey(Op.WRITE_BACK, chunk.index, at=last),)
    if chunk.optimised_numel:
        return (ActionKey(Op.UPDATE, chunk.index),)
    return (ActionKey(Op.REDUCE, chunk.index, at=last),) if place.is_reduced else ()


def _exit_all(draft: Draft, slots: _GradSlots, chunks: set[int]) -> None:
    for index in sorted(chunks):
        _exit(draft, slots, draft.placement.chunks[index], slots.last_tick.pop(index))


def _exit(draft: Draft, slots: _GradSlots, place: ChunkPlace, last_tick: int) -> None:
    index = place.chunk.index
    left = [slot for slot, occupant in enumerate(slots.occupants) if occupant == index]
    tick = draft.ticks[last_tick]
    if place.is_reduced:
        action = _reduce(draft, place, tick, left[0])
    if place.is_used_up:
        action = update_on_gpu(draft, place)
        draft.actions.append(action)
    elif not place.is_reduced_home:
        action = draft.last_write_back[index] = _write_back(draft, place, tick, left[0])
        draft.actions.append(action)
    for slot in left:
        slots.occupants[slot] = None
        slots.exits[slot] = action


def _write_back(draft: Draft, place: ChunkPlace, tick: Action, slot: int | None) -> Action:
    chunk = place.chunk
    return _of_gradient(
        draft,
        place,
        tick,
        Op.WRITE_BACK,
        Lane.COMPUTE if place.is_rounded_home else Lane.D2H,
        source=Place(Tier.GPU, slot),
        target=Place(Tier.GPU if place.is_rounded_home else Tier.HOST),
        num_bytes=place.grad_bytes,
        after=(tick.id, *_reduced(draft, place)),
        after_prev=(place.last_of_update,) if chunk.optimised_numel else (),
    )


def _of_gradient(draft: Draft, place: ChunkPlace, tick: Action, op: Op, lane: Lane, **what: Any) -> Action:
    """What becomes of a chunk's gradient once a tick has made it."""
    chunk = place.chunk
    return _OF_GRADIENT.changed(
        id=ActionKey(op, chunk.index, at=tick.id),
        op=op,
        lane=lane,
        tick=len(draft.ticks) - 1,  # at the latest step() needs it
        opens=tick.tick,
        block=chunk.block,
        chunk=chunk.index,
        **what,
    )


def _reduced(draft: Draft, place: ChunkPlace) -> tuple[ActionKey, ...]:
    return (draft.last_reduce[place.chunk.index].id,) if place.is_reduced else ()


def _follow_previous_pass(draft: Draft, slots: _GradSlots) -> None:
    """The first entry of each grad slot waits for the last exit of the pass before, and a sum that continues one of an
    earlier pass waits for it to be at home. Both passes have the same ids: the windows do not depend on the mode."""
    previous: dict[ActionKey, list[ActionKey]] = {}
    for slot, entry in slots.first_entries.items():
        previous.setdefault(entry, []).append(slots.exits[slot].id)
    seen: set[int] = set()
    for place, action in enumerate(draft.actions):
        extra = previous.get(action.id, [])
        if action.op is Op.FETCH and action.kind is ChunkKind.GRAD and action.chunk not in seen:
            assert action.chunk is not None
            seen.add(action.chunk)
            if not draft.mode.starts_sums:
                extra = [*extra, draft.last_write_back[action.chunk].id]
        if extra:
            draft.actions[place] = action.changed(after_prev=(*action.after_prev, *dict.fromkeys(extra)))
