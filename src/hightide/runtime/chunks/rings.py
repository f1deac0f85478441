"""Buffers on the host through which everything passes that lives on disk. Which action uses which buffer is in the
schedule: see [Note: rings of buffers] in planner/lower/pass_through_disk.py.

[Note: what is in a buffer] The user's thread notes what each buffer is for when it issues the action that fills it,
and who uses it until it is filled again. An action finds its buffer as the schedule says, unless the model left the
plan, or an evaluation came between forward and backward: then another content is there, or one that somebody has made
obsolete. So whoever empties a buffer looks at what is in it, and fills it again if need be: slower, never wrong. And
whoever uses a buffer stands behind all who did, whatever pass they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hightide.ir.action import Action, Op
from hightide.ir.chunk import DISK_REGION_BYTES
from hightide.ir.tier import ChunkKind
from hightide.planner.chunk_place import RINGS, Buffer
from hightide.planner.placement import Placement
from hightide.stores.array import Array
from hightide.stores.store import MemoryStore
from hightide.stores.ticket import Ticket

FILLING = frozenset({Op.READ, Op.WRITE_BACK, Op.STASH})
EMPTYING = frozenset({Op.WRITE, Op.FETCH, Op.UNSTASH})


@dataclass(eq=False, slots=True)
class BufferContent:
    """What is in a buffer, or will be when the lane has come to it."""

    chunk: int
    kind: ChunkKind
    buffer: int
    is_good: bool = False  # it is there, and as it is on disk. Changed by lanes, and by `forget` when they are done
    is_changed: bool = False  # by an update: it is to be written


class Ring:
    """Buffers of one kind."""

    def __init__(self, host: MemoryStore, num_buffers: int, buffer_bytes: int) -> None:
        num_bytes = num_buffers * buffer_bytes
        self._host, self._buffer_bytes = host, buffer_bytes
        self._region = host.allocate(num_bytes, "buffers of the disk") if num_bytes else None
        self._contents: list[BufferContent | None] = [None] * num_buffers
        self.users: list[list[Ticket]] = [[] for _ in range(num_buffers)]  # since it was filled last
        self._arrays: dict[tuple[int, torch.dtype, int, int], Array] = {}
        if num_bytes:
            address = self.array(0, torch.uint8, num_bytes).view.data_ptr()
            assert address % DISK_REGION_BYTES == 0, "direct transfers need buffers that begin with a page"

    def array(self, buffer: int, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> Array:
        """So many elements of a buffer. Buffers never move: made once."""
        key = (buffer, dtype, numel, offset_bytes)
        if key not in self._arrays:
            self._arrays[key] = self.fresh(buffer, dtype, numel, offset_bytes)
        return self._arrays[key]

    def fresh(self, buffer: int, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> Array:
        """The same for once, where sizes are the batch's."""
        assert self._region is not None, "the plan has no such buffers"
        start = buffer * self._buffer_bytes + offset_bytes
        return Array(self._host, self._region, dtype, (numel,), start)

    def fill(self, buffer: int, chunk: int, kind: ChunkKind) -> BufferContent:
        """From now on the buffer is for this. Of gradients and states there is one content of each chunk at most."""
        if kind is not ChunkKind.PARAM and (former := self.of(chunk, kind)) is not None:
            self.leave(former)
        content = self._contents[buffer] = BufferContent(chunk, kind, buffer)
        return content

    def holding(self, buffer: int, chunk: int, kind: ChunkKind) -> BufferContent | None:
        content = self._contents[buffer]
        return content if content is not None and (content.chunk, content.kind) == (chunk, kind) else None

    def of(self, chunk: int, kind: ChunkKind) -> BufferContent | None:
        """What there is of a chunk, in whichever buffer."""
        found = (self.holding(buffer, chunk, kind) for buffer in range(len(self._contents)))
        return next((content for content in found if content is not None), None)

    def leave(self, content: BufferContent) -> None:
        """Whoever empties the buffer is on its way: from now on it is for nobody."""
        if self._contents[content.buffer] is content:
            self._contents[content.buffer] = None

    def forget(self, chunk: int) -> None:
        """There are other values on disk, or in a moment. Nothing of the chunk may be under way to a buffer."""
        for content in self._contents:
            if content is not None and content.chunk == chunk:
                content.is_good = False

    def drop(self) -> None:
        """What is in the buffers is for nobody any more."""
        self._contents = [None] * len(self._contents)

    def forget_views(self) -> None:
        for array in self._arrays.values():
            array.forget_view()


class Spot(NamedTuple):
    ring: Ring
    buffer: int


class Rings:
    def __init__(self, placement: Placement, host: MemoryStore, input_bytes: int = 0) -> None:
        """First of all that is on the host: its memory begins with a page. `input_bytes`: of a buffer for inputs of
        blocks."""
        counts, sizes = placement.num_buffers, placement.buffer_bytes
        rings = {buffer: Ring(host, counts[buffer], sizes[buffer]) for buffer in RINGS}
        self.up, self.down, self.state = (rings[one] for one in (Buffer.READ, Buffer.WRITTEN, Buffer.UPDATED))
        self.inputs = Ring(host, placement.plan.num_input_buffers, input_bytes)  # see waiting/inputs_on_disk.py
        self._all = (*rings.values(), self.inputs)

    def spots(self, action: Action) -> list[Spot]:
        """The buffers that an action uses. An update finds them by what is in them."""
        if action.op is Op.UPDATE and action.chunk is not None:
            state, gradient = (
                self.state.of(action.chunk, ChunkKind.STATE),
                self.down.of(action.chunk, ChunkKind.GRAD),
            )
            spots = [None if state is None else Spot(self.state, state.buffer)]
            spots += [None if gradient is None else Spot(self.down, gradient.buffer)]
            return [spot for spot in spots if spot is not None]
        place = action.target if action.op in FILLING else action.source
        if action.op not in FILLING | EMPTYING or place is None or place.slot is None:
            return []
        if action.chunk is None:
            return [Spot(self.inputs, place.slot)]
        if action.op is Op.WRITE_BACK or (action.op is Op.WRITE and action.kind is ChunkKind.GRAD):
            return [Spot(self.down, place.slot)]
        return [Spot(self.state if action.kind is ChunkKind.STATE else self.up, place.slot)]

    def users(self, spots: list[Spot]) -> Iterator[Ticket]:
        for ring, buffer in spots:
            yield from ring.users[buffer]

    def used_by(self, action: Action, spots: list[Spot], ticket: Ticket) -> None:
        for ring, buffer in spots:
            if action.op in FILLING:  # it stands behind all others
                ring.users[buffer].clear()
            ring.users[buffer].append(ticket)

    def forget(self, chunk: int) -> None:
        for ring in self._all:
            ring.forget(chunk)

    def drop(self) -> None:
        for ring in self._all:
            ring.drop()

    def under_way(self) -> list[Ticket]:
        return [ticket for ring in self._all for users in ring.users for ticket in users]

    def forget_views(self) -> None:
        for ring in self._all:
            ring.forget_views()
