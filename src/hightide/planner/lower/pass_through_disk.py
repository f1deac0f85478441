"""Pass 6: what lives on disk passes through buffers on the host, and so may gradients on their way to their update, and
block inputs that wait on disk ([Note: inputs on disk] in planner/disk_inputs.py).

[Note: rings of buffers] There are three rings, each with a number of buffers of its own: towards the GPU (a READ fills
one, a FETCH empties it), away from it (a WRITE_BACK fills one; a WRITE empties it, or the update, if that follows at
once), and for updates (READ, UPDATE, WRITE). A buffer is filled again when it is empty, in the order of the lane that
meets the GPU, or of the updates. So what is under way is bounded, and a ring never waits for what stands behind it on a
lane. The passes of a step differ in what goes through a ring: the first entry of each buffer waits for whoever has
emptied it last, in whichever pass that was.

[Note: parked gradients] With updates in backward, a gradient that leaves the GPU may park instead: it takes host memory
when it comes and gives it back when its update is through, at the latest before the next forward uses its block. By
then the block's inputs are not there yet, and when it comes they are there no more: where they wait on the host and are
larger, parking takes nothing of the peak. Updates from disk take their turn in the order in which gradients come, the
last block first, although that is due last. Those that are `late` come after all others, in the order of need: so the
disk has work in forward too, and the first block does not wait for all. A late gradient must park: in the ring it would
keep those from coming that are updated before it.

In a step of several passes states are read and written with the last one only. Sums wait in between on the host, or go
to the disk and come back with each pass; those that stay on the GPU leave it once, in the last pass, and park then.

Gradients of deferred updates go where their states are. Per byte of host memory that saves as much as keeping states
there: one read and one write a step. Parameters on the host save more, two reads and a write, so they go last (see
planner/search/ladders.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hightide.ir.action import Action, ActionKey, Op, Place
from hightide.ir.plan import Update
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.disk_inputs import passing_calls, stored_bytes
from hightide.planner.lower.draft import Draft, DraftRing

Written = dict[ActionKey, Action]  # WRITE_BACK of a gradient -> the WRITE that follows it


def move_through_disk(
    draft: Draft, fetches: list[Action], exits: list[Action], updates: list[Action]
) -> Iterator[Action]:
    """All of them, and reads and writes beside. Each list is in the order of its lane."""
    up, down, state = (DraftRing(count) for count in draft.placement.num_buffers.values())
    inputs = _Inputs(draft)
    draft.rings = (up, down, state, inputs.ring)
    updated = {action.chunk: action for action in updates}
    written: Written = {}
    home = [
        moved for action in exits for moved in (inputs.leave(action) or _away(draft, down, action, updated, written))
    ]
    coming = [
        moved for action in fetches for moved in (inputs.come_back(action) or _towards(draft, up, action, written))
    ]
    in_turn = sorted(updates, key=lambda action: _turn(draft, action))
    yield from (*home, *coming, *(moved for action in in_turn for moved in _around(draft, state, action, written)))


class _Inputs:
    """Those that wait on disk. None of the others is its business: it returns nothing for them."""

    def __init__(self, draft: Draft) -> None:
        self.ring = DraftRing(draft.plan.num_input_buffers)
        self._passing = set(passing_calls(draft.profile, draft.plan))
        self._stored = stored_bytes(draft.profile, draft.plan)
        self._writes: dict[int | None, Action] = {}  # by call
        self._buffers: dict[int | None, int] = {}  # of calls that wait in one
        self._left: list[tuple[int, Action]] = []  # buffers, by who has left them, in this order

    def leave(self, action: Action) -> list[Action]:
        call, ring = action.call, self.ring
        if action.op is not Op.STASH or call not in self._passing:
            return []
        buffer, before = _next(ring)
        entry = action.changed(target=buffer, after=(*action.after, *(one.id for one in before)))
        if call not in self._stored:
            self._buffers[call] = ring.fill(entry)
            return [entry]
        write = self._writes[call] = _write(action, ActionKey(Op.WRITE, call), buffer)
        ring.pass_through(entry, write)
        return [entry, write]

    def come_back(self, action: Action) -> list[Action]:
        call = action.call
        if action.op is not Op.UNSTASH or call not in self._passing:
            return []
        if call in self._buffers:
            buffer = self._buffers[call]
            exit = action.changed(source=Place(Tier.HOST, buffer))
            return [self._leaves(buffer, exit)]
        (buffer, before), write = self._left.pop(0), self._writes[call]
        read = _read(action, ActionKey(Op.READ, call), Place(Tier.HOST, buffer), [write, before])
        exit = action.changed(source=read.target, after=(*action.after, read.id))
        return [read, self._leaves(buffer, exit)]

    def _leaves(self, buffer: int, exit: Action) -> Action:
        self._left.append((buffer, exit))
        self.ring.exits[buffer] = exit
        return exit


def _turn(draft: Draft, action: Action) -> tuple[bool, int]:
    """Whether an update comes after those that are not late, and in which order then."""
    late = draft.plan.update is Update.IN_BACKWARD and draft.plan.blocks[draft.place_of(action).chunk.block].late
    return (True, action.tick) if late else (False, -1)


def _away(
    draft: Draft, ring: DraftRing, action: Action, updated: dict[int | None, Action], written: Written
) -> list[Action]:
    if action.op is not Op.WRITE_BACK or not (place := draft.place_of(action)).passes_ring:
        return [action]
    buffer, before = _next(ring)
    entry = action.changed(target=buffer, after=(*action.after, *(one.id for one in before)))
    if place.grad is None:
        ring.pass_through(entry, updated[action.chunk])
        return [entry]
    key = ActionKey(Op.WRITE, place.chunk.index, ChunkKind.GRAD, action.id.at)
    exit = written[action.id] = _write(action, key, buffer)
    ring.pass_through(entry, exit)
    return [entry, exit]


def _towards(draft: Draft, ring: DraftRing, action: Action, written: Written) -> list[Action]:
    """A parameter as its last update has left it, or a sum as this pass or the one before has."""
    if action.op is not Op.FETCH or action.kind is None:
        return [action]
    place = draft.place_of(action)
    if place.tier_of(action.kind) is not Tier.DISK:
        return [action]
    chunk, is_param = place.chunk, action.kind is ChunkKind.PARAM
    buffer, after = _next(ring)
    stored = ActionKey(Op.WRITE, chunk.index, ChunkKind.STATE)
    earlier: tuple[ActionKey, ...] = (stored,) if is_param and chunk.optimised_numel else ()
    if not is_param:
        after += [written[name] for name in action.after if name in written and written[name].chunk == chunk.index]
        sums = [written[name] for name in action.after_prev if name in written]
        earlier = tuple(dict.fromkeys(one.id for one in sums if one.chunk == chunk.index))
    key = ActionKey(Op.READ, chunk.index, action.kind, action.id.at)
    read = _read(action, key, buffer, after, after_prev=earlier)
    fetch = action.changed(source=buffer, after=(*action.after, read.id))
    ring.pass_through(read, fetch)
    return [read, fetch]


def _around(draft: Draft, ring: DraftRing, action: Action, written: Written) -> list[Action]:
    """In backward, states are read ahead of their gradient, as soon as a buffer is free."""
    place = draft.place_of(action)
    if place.states is not Tier.DISK:
        return [action]
    buffer, after = _next(ring)
    after += [one for one in written.values() if one.chunk == action.chunk]
    begin = draft.ticks[-1].tick if draft.plan.update is Update.DEFERRED else len(draft.profile.calls) - 1
    stored = ActionKey(Op.WRITE, place.chunk.index, ChunkKind.STATE)
    key, prev = ActionKey(Op.READ, place.chunk.index, ChunkKind.STATE), (stored,)
    read = _read(action, key, buffer, after, begin, num_bytes=place.read_bytes, after_prev=prev)
    update = action.changed(opens=max(action.opens, read.opens), after=(*action.after, read.id))
    write = _write(update, stored, buffer, num_bytes=place.written_bytes, after_prev=update.after_prev)
    ring.pass_through(read, write)
    return [read, update, write]


def _next(ring: DraftRing) -> tuple[Place, list[Action]]:
    """The buffer that is next, and who empties it before, if anybody has filled it."""
    return Place(Tier.HOST, ring.buffer), [] if ring.before is None else [ring.before]


def _read(action: Action, key: ActionKey, buffer: Place, after: list[Action], begin: int = -1, **more: Any) -> Action:
    """Ahead of an action, into a buffer, when others are done with it and `begin` is left."""
    return action.changed(
        id=key,
        op=Op.READ,
        lane=Lane.DISK_READ,
        opens=max([begin, *(one.opens for one in after)]),
        source=Place(Tier.DISK),
        target=buffer,
        after=tuple(dict.fromkeys(one.id for one in after)),
        **{"after_prev": (), **more},
    )


def _write(action: Action, key: ActionKey, buffer: Place, **more: Any) -> Action:
    """Behind an action, out of a buffer."""
    return action.changed(
        id=key,
        op=Op.WRITE,
        lane=Lane.DISK_WRITE,
        source=buffer,
        target=Place(Tier.DISK),
        after=(action.id,),
        **{"after_prev": (), **more},
    )
