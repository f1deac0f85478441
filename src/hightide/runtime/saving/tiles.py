"""The arrays of chunks, cut into tiles: what is copied at once, and handed out in parts of the tensors of a save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch

from hightide.ir.chunk import ALIGN_NUMEL, ParamRange
from hightide.ir.state_spec import MASTER, REMAINDER, StateSpec
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.disk_homes import UpdateArrays
from hightide.stores.array import Array

PARAM = "param"


@dataclass(frozen=True)
class SavedTensor:
    """A whole logical tensor: a parameter, or one of the arrays that its updates keep."""

    key: str  # of the parameter
    kind: str  # PARAM, or the name of a state
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SaveCost:
    """To training, so far."""

    waited_s: float = 0.0  # in which updates, or others who change values, have waited for the reader
    copied_bytes: int = 0  # that went aside first, because they were about to change or to be read from elsewhere


Wanted = Callable[[str, str], bool]  # of a parameter's key, and PARAM or the name of a state


class TensorPart(NamedTuple):
    """Elements of one tensor, inside of a tile."""

    tensor: SavedTensor
    start: int
    numel: int
    first: int  # the number of its first element, in the tensor


@dataclass(eq=False, slots=True)
class Tile:
    """A range of elements of one of a chunk's arrays."""

    chunk: int
    state: StateSpec | None  # None: the parameters
    array: Array  # at home
    start: int
    numel: int = 0
    parts: list[TensorPart] = field(default_factory=list)

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
    updated; a master or its remainder is there from the beginning. Of several ranks, what this one hands out."""
    for chunk, state in _arrays(chunks, order):
        array = chunks.home(chunk) if state is None else chunks.states(chunk)[state]
        is_whole = chunks.has_whole_home(chunk) if state is None else not chunks.is_cut(chunk)
        entries = chunks.saved_entries(chunk, is_whole)
        found = _ranges(chunks, chunk, entries, state, has_states, wanted)
        yield from _cut(chunk, state, array, found, max(1, tile_bytes // array.dtype.itemsize))


def saved_tensors(
    chunks: Chunks, order: Iterable[int], has_states: Callable[[str], bool], wanted: Wanted
) -> list[SavedTensor]:
    """All, in the order of the tiles: the same on all ranks."""
    found = []
    for chunk, state in _arrays(chunks, order):
        entries = chunks.specs[chunk].params
        found += [tensor for tensor, _, _ in _ranges(chunks, chunk, entries, state, has_states, wanted)]
    return found


def _arrays(chunks: Chunks, order: Iterable[int]) -> Iterator[tuple[int, StateSpec | None]]:
    for chunk in order:
        spec = chunks.specs[chunk]
        for state in (None, *(spec.states if spec.state_bytes else ())):
            yield chunk, state


def _ranges(
    chunks: Chunks,
    chunk: int,
    entries: Iterable[ParamRange],
    state: StateSpec | None,
    has_states: Callable[[str], bool],
    wanted: Wanted,
) -> Iterator[tuple[SavedTensor, slice, int]]:
    """Each with its place in the array, and the number of its first element there."""
    for entry in entries:
        key = entry.param
        if state is None:
            tensor = SavedTensor(key, PARAM, chunks.home(chunk).dtype, tuple(chunks.shapes[key]))
            per_numel = 1
        elif chunks.has_room(key) and (state in (MASTER, REMAINDER) or has_states(key)):
            place = chunks.state_of(key, state)
            tensor, per_numel = SavedTensor(key, state.name, place.dtype, place.shape), state.per_numel
        else:
            continue
        if wanted(key, tensor.kind):
            yield tensor, entry.within(per_numel), entry.start_numel // per_numel


def _cut(
    chunk: int,
    state: StateSpec | None,
    array: Array,
    found: Iterable[tuple[SavedTensor, slice, int]],
    tile_numel: int,
) -> Iterator[Tile]:
    """Neighbours share a tile: between them are only the few elements that their alignment leaves."""
    tile: Tile | None = None
    for tensor, place, first in found:
        begin = place.start
        while True:
            if tile is None or begin - (tile.start + tile.numel) >= ALIGN_NUMEL or begin - tile.start >= tile_numel:
                if tile is not None:
                    yield tile
                tile = Tile(chunk, state, array, begin)
            start = begin - tile.start
            numel = min(place.stop - begin, tile_numel - start)
            tile.parts.append(TensorPart(tensor, start, numel, first + begin - place.start))
            tile.numel = start + numel
            begin += numel
            if begin >= place.stop:
                break
    if tile is not None:
        yield tile
