"""The schedule while it is being made: what the passes read and extend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

from hightide.ir.action import Action, ActionKey, Mode, Op
from hightide.ir.block import ModelProfile
from hightide.ir.plan import Plan
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.placement import Placement


@dataclass
class DraftRing:
    """Buffers on the host: who emptied each, and who filled it first in this pass. See [Note: rings of buffers] in
    pass_through_disk.py."""

    num_buffers: int
    num_entries: int = 0
    exits: dict[int, Action] = field(default_factory=dict)  # by buffer, the last one so far
    firsts: dict[int, ActionKey] = field(default_factory=dict)  # by buffer

    @property
    def buffer(self) -> int:
        """The next one, in turn."""
        return self.num_entries % self.num_buffers

    @property
    def before(self) -> Action | None:
        """Who empties it before it is filled."""
        return self.exits.get(self.buffer)

    def pass_through(self, entry: Action, exit: Action) -> None:
        self.fill(entry)
        self.exits[(self.num_entries - 1) % self.num_buffers] = exit

    def fill(self, entry: Action) -> int:
        """The next one; who empties it is known later."""
        buffer, self.num_entries = self.buffer, self.num_entries + 1
        self.firsts.setdefault(buffer, entry.id)
        return buffer


class Draft:
    def __init__(self, profile: ModelProfile, plan: Plan, mode: Mode, placement: Placement | None = None) -> None:
        self.profile = profile
        self.plan = plan
        self.placement = placement or Placement(plan)
        self.mode = mode
        self.ticks: list[Action] = []
        self.actions: list[Action] = []  # all but the ticks
        self.awaited: dict[int, list[ActionKey]] = defaultdict(list)  # tick -> ids that it waits for
        self.standing: tuple[tuple[int, int], ...] = ()  # chunks that are in slots from the pass before, and where
        self.rings: tuple[DraftRing, ...] = ()
        self.last_write_back: dict[int, Action] = {}  # chunk -> its final one in this pass, or SUM
        self.last_reduce: dict[int, Action] = {}  # chunk -> its final one in this pass

    def copied(self, mode: Mode) -> Draft:
        """As it is now, to go on in another mode. Actions are never changed, only replaced."""
        other = copy(self)
        other.mode, other.ticks, other.actions = mode, [*self.ticks], [*self.actions]
        other.awaited = defaultdict(list, {tick: [*names] for tick, names in self.awaited.items()})
        other.last_write_back, other.last_reduce = {**self.last_write_back}, {**self.last_reduce}
        return other

    def chunks_at(self, tick: Action) -> tuple[ChunkPlace, ...]:
        return () if tick.block is None else self.placement.by_block[tick.block]

    def place_of(self, action: Action) -> ChunkPlace:
        assert action.chunk is not None
        return self.placement.chunks[action.chunk]

    @cached_property
    def uses(self) -> dict[int, list[int]]:
        """chunk -> ticks that use it, ascending. Only for use after the ticks are laid."""
        uses: dict[int, list[int]] = defaultdict(list)
        for tick in self.ticks:
            for place in self.chunks_at(tick):
                uses[place.chunk.index].append(tick.tick)
        return uses

    @cached_property
    def backward_uses(self) -> dict[int, list[int]]:
        backward = {tick.tick for tick in self.ticks if tick.op is Op.BACKWARD}
        return {chunk: [tick for tick in ticks if tick in backward] for chunk, ticks in self.uses.items()}

    @cached_property
    def tick_index(self) -> dict[tuple[Op, int | None], int]:
        return {(tick.op, tick.call): tick.tick for tick in self.ticks}


def emptied_before(order: Sequence[Draft]) -> list[dict[ActionKey, ActionKey]]:
    """For each pass of a step: the first entry of each buffer -> who has emptied it last, in this step or in the one
    before, which is like it."""
    found = []
    for at, draft in enumerate(order):
        earlier = [*reversed(order[:at]), *reversed(order[at:])]
        exits = {
            entry: next(one.rings[number].exits[buffer].id for one in earlier if buffer in one.rings[number].exits)
            for number, ring in enumerate(draft.rings)
            for buffer, entry in ring.firsts.items()
        }
        found.append(exits)
    return found
