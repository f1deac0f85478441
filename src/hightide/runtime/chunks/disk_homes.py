"""Chunks, or parts of them, that live on disk: on their way to the buffers of the rings and back."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from hightide.ir.state_spec import StateSpec
from hightide.ir.tier import ChunkKind
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.placement import Placement
from hightide.runtime.chunks.rings import BufferContent, Rings
from hightide.stores.array import Array
from hightide.stores.store import MemoryStore
from hightide.stores.ticket import Ticket

TILE_NUMEL = 2**20  # off the plan, so many elements are in memory of their own at a time


class UpdateArrays(NamedTuple):
    """What an update of one chunk reads and writes."""

    param: Array
    grad: Array
    states: Mapping[StateSpec, Array]

    @property
    def is_memory(self) -> bool:
        if not (self.param.is_memory and self.grad.is_memory):
            return False
        return all([array.is_memory for array in self.states.values()])  # no generator: asked at each update

    def tiles(self, numel: int) -> Iterator[tuple[int, Tensor, Tensor, Mapping[StateSpec, Tensor]]]:
        """(start, parameter, gradient, states) of a chunk of which something is on disk, a few elements at a time:
        what was changed has been written when the next ones are asked for."""
        for start in range(0, numel, TILE_NUMEL):
            shape = (min(TILE_NUMEL, numel - start),)
            with ExitStack() as stack:
                param = stack.enter_context(self.param.part(start, shape).opened())
                states = {
                    state: stack.enter_context(array.part(start // state.per_numel, (state.numel(*shape),)).opened())
                    for state, array in self.states.items()
                }
                yield start, param, self.grad.part(start, shape).peek(), states


class DiskHomes:
    def __init__(self, placement: Placement, host: MemoryStore, input_bytes: int = 0) -> None:
        self._host = host
        self.rings = Rings(placement, host, input_bytes)
        self._places: dict[int, ChunkPlace] = {}
        self._arrays: dict[tuple[int, ChunkKind], Array] = {}  # on disk; all states of a chunk as so many bytes
        self._homes: dict[int, Array] = {}  # of parameters, wherever they are
        self.strays: dict[int, Array] = {}  # gradients without a home that have left the GPU off the plan

    def take(self, place: ChunkPlace, home: Array, arrays: Mapping[ChunkKind, Array]) -> None:
        """A chunk, some of whose arrays are on disk: these, and where its parameters are."""
        index = place.chunk.index
        self._places[index], self._homes[index] = place, home
        self._arrays.update({(index, kind): array for kind, array in arrays.items()})

    def __contains__(self, chunk: int) -> bool:
        """Whether its states are on disk."""
        return chunk in self._places and self._places[chunk].has_states_on_disk

    # -- in buffers -----------------------------------------------------------------------------------------------

    def arriving(self, content: BufferContent) -> Array:
        """A parameter or a gradient on its way to the GPU, in its buffer."""
        home = self._arrays[content.chunk, content.kind]
        return self.rings.up.array(content.buffer, home.dtype, home.shape[0])

    def leaving(self, content: BufferContent) -> Array:
        """A gradient on its way to the disk, or to its update, in its buffer."""
        place = self._places[content.chunk]
        dtype = getattr(torch, place.grad_dtype)
        return self.rings.down.array(content.buffer, dtype, place.shard.trainable_numel)

    def _parts(self, content: BufferContent) -> dict[ChunkKind, Array]:
        """All that an update has from the disk, in its buffer."""
        offsets, index, ring = self._places[content.chunk].update_offsets, content.chunk, self.rings.state
        homes = {kind: self._arrays[index, kind] for kind in offsets}
        return {
            kind: ring.array(content.buffer, home.dtype, home.shape[0], offsets[kind]) for kind, home in homes.items()
        }

    def at_hand(self, content: BufferContent, gradient: Array | None) -> UpdateArrays:
        """What an update works on. `gradient`: where it is, if it does not come from the disk."""
        parts, spec = self._parts(content), self._places[content.chunk].shard
        grad = parts.get(ChunkKind.GRAD, gradient)
        assert grad is not None, f"chunk {content.chunk} has no gradient to be updated with"
        base = self._places[content.chunk].update_offsets.get(ChunkKind.STATE, 0)
        states = {
            state: self.rings.state.array(
                content.buffer, getattr(torch, state.dtype), state.numel(spec.optimised_numel), base + offset_bytes
            )
            for state, offset_bytes in (spec.state_offsets if spec.state_bytes else {}).items()
        }
        return UpdateArrays(parts.get(ChunkKind.PARAM, self._homes[content.chunk]), grad, states)

    # -- on the disk's lanes --------------------------------------------------------------------------------------

    def read(self, content: BufferContent) -> int:
        """From disk into its buffer. Returns the bytes moved."""
        content.is_good = False
        targets = self._parts(content) if content.kind is ChunkKind.STATE else {content.kind: self.arriving(content)}
        _wait([self._arrays[content.chunk, kind].read(target.view) for kind, target in targets.items()])
        content.is_good = True
        return sum(target.nbytes for target in targets.values())

    def write_gradient(self, content: BufferContent) -> int:
        home = self._arrays[content.chunk, ChunkKind.GRAD]
        _wait([home.write(self.leaving(content).view)])
        return home.nbytes

    def write_updated(self, content: BufferContent) -> int:
        """Parameters and states; the gradient was only read."""
        sources = {kind: part for kind, part in self._parts(content).items() if kind is not ChunkKind.GRAD}
        _wait([self._arrays[content.chunk, kind].write(source.view) for kind, source in sources.items()])
        return sum(source.nbytes for source in sources.values())

    # -- off the plan ---------------------------------------------------------------------------------------------

    def open_stray(self, chunk: int) -> None:
        """A place for a gradient that has no home, from which its update reads it."""
        if chunk not in self.strays:
            place = self._places[chunk]
            region = self._host.allocate(place.grad_bytes, "gradients off the plan")
            dtype = getattr(torch, place.grad_dtype)
            self.strays[chunk] = Array(self._host, region, dtype, (place.shard.trainable_numel,))

    def close_stray(self, chunk: int) -> None:
        stray = self.strays.pop(chunk, None)
        if stray is not None:
            self._host.free(stray.region)

    def forget_views(self) -> None:
        self.rings.forget_views()
        for stray in self.strays.values():
            stray.forget_view()


def mapped(place: Array, folder: str) -> Tensor:
    """Its values in the pages of a file without a name: the system can take them out of memory, so that a model that
    is larger than the host can be written from there, tensor by tensor. It goes with the tensor."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(place.nbytes)
        memory = mmap.mmap(file.fileno(), place.nbytes)
    values = torch.frombuffer(memory, dtype=place.dtype).view(place.shape)
    place.read(values).wait()
    return values


def _wait(tickets: list[Ticket]) -> None:
    """All of them, also if one fails: nobody else may use the buffer meanwhile."""
    errors = []
    for ticket in tickets:
        try:
            ticket.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
