"""The arrays of chunks, cut into tiles: what is copied at once, and handed out in parts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hightide.ir.chunk import ALIGN_NUMEL, ChunkSpec
from hightide.ir.state_spec import MASTER, REMAINDER, StateSpec
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.disk_homes import UpdateArrays
from hightide.runtime.saving.saved_tensor import PARAM, SavedTensor
from hightide.stores.array import Array

TILE_BYTES = 2**24  # as much is copied, and waited for, at once
SMALL_TILE_BYTES = 2**20  # where the plan leaves no memory free: then buffers are beside its limit
Wanted = Callable[[str, str], bool]  # of a parameter's key, and PARAM or the name of a state


class Part(NamedTuple):
    """Elements of one tensor, inside of a tile."""

    tensor: SavedTensor
    start: int
    numel: int


@dataclass(eq=False, slots=True)
class Tile:
    """A range of elements of one of a chunk's arrays."""

    chunk: int
    state: StateSpec | None  # None: the parameters
    array: Array  # at home
    start: int
    numel: int = 0
    parts: list[Part] = field(default_factory=list)

    @property
    def source(self) -> Array:
        return self.array.part(self.start, (self.numel,))

    def source_in(self, arrays: UpdateArrays) -> Array:
        """Where an update is about to change it."""
        array = arrays.param if self.state is None else arrays.states[self.state]
        return array.part(self.start, (self.numel,))

    @property
    def num_bytes(self) -> int:
        return self.numel * self.array.dtype.itemsize


def tiles_of(
    chunks: Chunks, order: Iterable[int], has_states: Callable[[str], bool], wanted: Wanted, tile_bytes: int
) -> Iterator[Tile]:
    """In this order of chunks; of each its parameters, then state by state. `has_states`: whether a parameter has been
    updated; a master or its remainder is there from the beginning."""
    for chunk in order:
        spec = chunks.specs[chunk]
        for state in (None, *(spec.states if spec.state_bytes else ())):
            array = chunks.home(chunk) if state is None else chunks.states(chunk)[state]
            found = _ranges(chunks, spec, state, has_states, wanted)
            yield from _cut(chunk, state, array, found, max(1, tile_bytes // array.dtype.itemsize))


def _ranges(
    chunks: Chunks, spec: ChunkSpec, state: StateSpec | None, has_states: Callable[[str], bool], wanted: Wanted
) -> Iterator[tuple[SavedTensor, slice]]:
    for entry in spec.params:
        key = entry.param
        if state is None:
            tensor = SavedTensor(key, PARAM, chunks.home(spec.index).dtype, tuple(chunks.shapes[key]))
            per_numel = 1
        elif entry.offset_numel < spec.optimised_numel and (state in (MASTER, REMAINDER) or has_states(key)):
            place = chunks.state_of(key, state)
            tensor, per_numel = SavedTensor(key, state.name, place.dtype, place.shape), state.per_numel
        else:
            continue
        if wanted(key, tensor.kind):
            yield tensor, entry.within(per_numel)


def _cut(
    chunk: int, state: StateSpec | None, array: Array, found: Iterable[tuple[SavedTensor, slice]], tile_numel: int
) -> Iterator[Tile]:
    """Neighbours share a tile: between them are only the few elements that their alignment leaves."""
    tile: Tile | None = None
    for tensor, place in found:
        begin = place.start
        while True:
            if tile is None or begin - (tile.start + tile.numel) >= ALIGN_NUMEL or begin - tile.start >= tile_numel:
                if tile is not None:
                    yield tile
                tile = Tile(chunk, state, array, begin)
            start = begin - tile.start
            numel = min(place.stop - begin, tile_numel - start)
            tile.parts.append(Part(tensor, start, numel))
            tile.numel = start + numel
            begin += numel
            if begin >= place.stop:
                break
    if tile is not None:
        yield tile
