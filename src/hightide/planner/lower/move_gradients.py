"""Pass 3: gradients. One whose states are on the host is summed in a grad slot and written back when its block is done.
One that is used up by its update on the GPU leaves its grad slot with that.

A chunk that is used again later in the pass (tied parameters), or that has a gradient from an earlier pass, continues
its sum: it is fetched instead of cleared. So the GPU always adds to the whole sum, and rounding does not depend on
placement. On the link and at home a gradient may be narrower than its sum (plan.gradients).

In a step of several passes a sum may stay on the GPU, at a place of its own, until the last of them has added to it
(ChunkPlace.stays)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hightide.ir.action import Action, ActionKey, Op, Place
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.lower.add_updates import update_on_gpu
from hightide.planner.lower.draft import Draft
from hightide.planner.placement import ChunkPlace
from hightide.planner.slot_choice import choose_windows


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
    if draft.mode.ends_step:
        _send_those_that_stayed(draft)


def _send_those_that_stayed(draft: Draft) -> None:
    for place in draft.placement.chunks:
        uses = draft.backward_uses.get(place.chunk.index)
        if place.stays and uses:
            last = draft.last_write_back[place.chunk.index] = _write_back(draft, place, draft.ticks[uses[-1]], None)
            draft.actions.append(last)


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
    if earlier is None and draft.mode.starts_sums:
        return _clear(draft, place, tick, window.start, before)
    action = Action(
        id=ActionKey(Op.FETCH, chunk.index, ChunkKind.GRAD, tick.id),
        op=Op.FETCH,
        lane=Lane.H2D,
        tick=tick.tick,
        opens=max((exit.opens for exit in [*before, *([earlier] if earlier else [])]), default=-1),
        block=chunk.block,
        chunk=chunk.index,
        kind=ChunkKind.GRAD,
        source=Place(Tier.HOST),
        target=Place(Tier.GPU, window.start),
        num_bytes=place.grad_bytes,
        after=tuple(dict.fromkeys(exit.id for exit in [*before, *([earlier] if earlier else [])])),
    )
    draft.actions.append(action)
    draft.awaited[tick.tick].append(action.id)
    return action.id


def _clear(draft: Draft, place: ChunkPlace, tick: Action, slot: int | None, before: list[Action]) -> ActionKey:
    """Runs inline on entry of its tick."""
    chunk = place.chunk
    action = Action(
        id=ActionKey(Op.CLEAR, chunk.index, at=tick.id),
        op=Op.CLEAR,
        lane=Lane.COMPUTE,
        tick=tick.tick,
        opens=tick.tick - 1,
        block=chunk.block,
        chunk=chunk.index,
        kind=ChunkKind.GRAD,
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
    if place.stays:
        return (ActionKey(Op.WRITE_BACK, chunk.index, at=draft.ticks[draft.backward_uses[chunk.index][-1]].id),)
    return (ActionKey(Op.UPDATE, chunk.index),) if chunk.optimised_numel else ()


def _exit_all(draft: Draft, slots: _GradSlots, chunks: set[int]) -> None:
    for index in sorted(chunks):
        _exit(draft, slots, draft.placement.chunks[index], slots.last_tick.pop(index))


def _exit(draft: Draft, slots: _GradSlots, place: ChunkPlace, last_tick: int) -> None:
    index = place.chunk.index
    left = [slot for slot, occupant in enumerate(slots.occupants) if occupant == index]
    if place.is_used_up:
        action = update_on_gpu(draft, place)
    else:
        action = draft.last_write_back[index] = _write_back(draft, place, draft.ticks[last_tick], left[0])
    draft.actions.append(action)
    for slot in left:
        slots.occupants[slot] = None
        slots.exits[slot] = action


def _write_back(draft: Draft, place: ChunkPlace, tick: Action, slot: int | None) -> Action:
    chunk = place.chunk
    return Action(
        id=ActionKey(Op.WRITE_BACK, chunk.index, at=tick.id),
        op=Op.WRITE_BACK,
        lane=Lane.D2H,
        tick=len(draft.ticks) - 1,  # at the latest step() needs it
        opens=tick.tick,
        block=chunk.block,
        chunk=chunk.index,
        kind=ChunkKind.GRAD,
        source=Place(Tier.GPU, slot),
        target=Place(Tier.HOST),
        num_bytes=place.grad_bytes,
        after=(tick.id,),
        after_prev=(ActionKey(Op.UPDATE, chunk.index),) if chunk.optimised_numel else (),
    )


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
