"""The base of both replays: that an order is enforced, and that a slot or buffer holds one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from hightide.ir.action import Action, ActionKey, Schedule
from hightide.ir.tier import ChunkKind
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.placement import Placement
from hightide.planner.verify.precedence import Precedence


class OrderedPlaces:
    """Slots on the GPU or buffers on the host: who let in what stands there, who came first, and who left last."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.entries: list[Action | None] = [None] * number
        self.firsts: list[Action | None] = [None] * number
        self.exits: list[Action | None] = [None] * number

    def holding(self, chunk: int | None, kind: ChunkKind) -> list[int]:
        """The places that hold this of a chunk."""
        return [
            place
            for place, entry in enumerate(self.entries)
            if entry is not None and entry.chunk == chunk and entry.kind is kind
        ]

    def entry(self, chunk: int | None, kind: ChunkKind) -> Action | None:
        return next((self.entries[place] for place in self.holding(chunk, kind)), None)

    def leave(self, action: Action, places: Iterable[int]) -> None:
        for place in places:
            self.entries[place], self.exits[place] = None, action


class OrderedReplay:
    def __init__(self, placement: Placement, schedule: Schedule, precedence: Precedence) -> None:
        self.placement, self.schedule, self.precedence = placement, schedule, precedence
        self.plan = placement.plan

    def place(self, action: Action) -> ChunkPlace:
        assert action.chunk is not None
        return self.placement.chunks[action.chunk]

    def fail(self, action: Action, message: str) -> NoReturn:
        raise InfeasiblePlan(f"the schedule is wrong: {action.id} {message}", action.id)

    def after(self, action: Action, earlier: Action | None, message: str) -> None:
        if earlier is None or not self.precedence.before(earlier.id, action.id):
            self.fail(action, message + ("" if earlier is None else f" ({earlier.id} may still be running)"))

    def follows(self, action: Action, key: ActionKey, message: str) -> None:
        """After an action of the pass before."""
        if key not in action.after_prev:
            self.fail(action, f"{message} (it does not wait for the previous {key})")

    def enter(self, room: OrderedPlaces, action: Action, places: Iterable[int]) -> None:
        for place in places:
            entry, last_exit = room.entries[place], room.exits[place]
            if entry is not None:
                self.fail(action, f"goes to {room.name} {place}, which chunk {entry.chunk} occupies")
            if last_exit is not None:
                message = f"goes to {room.name} {place} before chunk {last_exit.chunk} has left it"
                self.after(action, last_exit, message)
            room.entries[place] = action
            room.firsts[place] = room.firsts[place] or action

    def enter_window(self, slots: OrderedPlaces, action: Action, width: int) -> None:
        start = None if action.target is None else action.target.slot
        if start is None or start < 0 or start + width > len(slots.entries):
            self.fail(action, f"goes to {action.target}, {width} slots wide; there are {len(slots.entries)} slots")
        assert action.kind is not None
        if slots.holding(action.chunk, action.kind):
            self.fail(action, f"brings in chunk {action.chunk}, which is in a slot already")
        self.enter(slots, action, range(start, start + width))

    def leave_window(self, slots: OrderedPlaces, action: Action) -> None:
        assert action.kind is not None
        window = slots.holding(action.chunk, action.kind)
        start = window[0] if window else None
        if action.source is None or action.source.slot != start:
            self.fail(action, f"leaves {action.source}, but chunk {action.chunk} stands in slot {start}")
        slots.leave(action, window)

    def check_next_pass(self, room: OrderedPlaces, before: Sequence[OrderedPlaces] = ()) -> None:
        """What comes first in each place waits until the last has left it: in one of the passes `before`, the latest
        first, or, since the pass before may have the same ids, in this one."""
        rooms = [*before, room]
        for place, first in enumerate(room.firsts):
            last_exit = next((exit for one in rooms if (exit := one.exits[place]) is not None), None)
            if first is not None and last_exit is not None:
                self.follows(first, last_exit.id, f"goes to a {room.name} that may not be free yet")
