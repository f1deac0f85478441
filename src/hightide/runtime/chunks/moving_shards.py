"""Values in shards go over to another plan.

[Note: moving shards] Another plan packs chunks differently, so a rank's shard of the new ones is not what it has. All
ranks know both layouts. Of a parameter that is cut alike in both, or whole here, each rank takes its elements from
itself; any other is exchanged tile by tile, and each keeps its new elements. All do so in the same order. Gradients do
not move: a run of several ranks goes over when there are none.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hightide.ir.chunk import ChunkSpec, ParamRange
from hightide.ir.tier import ChunkKind
from hightide.runtime.chunks.between_ranks import BetweenRanks
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.moving import TILE_BYTES, StatesOnTheMove
from hightide.runtime.gradients.gradients import Gradients
from hightide.stores.array import Array


class _Piece(NamedTuple):
    """Elements of a parameter, or of one of its states, that this rank has, or will have."""

    place: Array | None  # in one dimension
    start: int  # of them all
    stop: int


class ShardsOnTheMove(StatesOnTheMove):
    def __init__(self, chunks: Chunks, gradients: Gradients, between: BetweenRanks) -> None:
        super().__init__(chunks, gradients)
        assert not any(self._of_use.values()), "gradients in shards do not move"
        self._between = between

    def origins(self) -> dict[str, ValueInShards]:  # type: ignore[override]
        return {key: ValueInShards(self, key) for key in self._chunks.parameters}

    def unpack(self, chunks: Chunks, gradients: Gradients) -> None:
        for spec in self._chunks.specs:
            for entry in spec.params:
                for index in range(len(spec.states)) if entry.offset_numel < spec.optimised_numel else ():
                    self.hand_over_own(entry.param, ChunkKind.STATE, chunks, index)

    def hand_over_own(self, key: str, kind: ChunkKind, chunks: Chunks, index: int = 0) -> None:
        """What this rank has of a parameter under the new plan, to its place there. `index`: of the state."""
        chunk, entry = self._chunks.places[key]
        states = self._chunks.specs[chunk].states
        per_numel = states[index].per_numel if kind is ChunkKind.STATE else 1
        old = _piece(self._chunks, key, kind, self._arrays[chunk, kind][index], per_numel)
        new_chunk = chunks.places[key][0]
        into = chunks.home(new_chunk) if kind is ChunkKind.PARAM else chunks.states(new_chunk)[states[index]]
        new = _piece(chunks, key, kind, into, per_numel)
        with ExitStack() as stack:
            target = None if new.place is None else stack.enter_context(new.place.opened(is_new=True))
            if _is_whole(self._chunks, chunk, kind) or _cuts(self._chunks, key) == _cuts(chunks, key):
                self._copy(old, new, target)
            else:
                num_tile = TILE_BYTES // into.dtype.itemsize
                for start in range(0, -(-entry.numel // per_numel), num_tile):
                    self._exchange(f"{kind} {index} of {key} from {start} on", old, new, target, start, num_tile)
        if old.place is not None:
            old.place.store.give_back(old.place.region, old.place.offset_bytes, old.place.nbytes)

    def _copy(self, old: _Piece, new: _Piece, target: Tensor | None) -> None:
        if target is not None and target.numel():
            assert old.place is not None and old.start <= new.start and new.stop <= old.stop
            target.copy_(old.place.part(new.start - old.start, (new.stop - new.start,)).peek())

    def _exchange(self, name: str, old: _Piece, new: _Piece, target: Tensor | None, start: int, num_tile: int) -> None:
        first, last = max(start, old.start), min(start + num_tile, old.stop)
        part = None
        if old.place is not None and first < last:
            part = old.place.part(first - old.start, (last - first,)).peek()
        tile = self._between.whole(name, part, self._dtype_of(old, new))
        first, last = max(start, new.start), min(start + num_tile, new.stop)
        if target is not None and first < last:
            target[first - new.start : last - new.start].copy_(tile[first - start : last - start])

    def _dtype_of(self, old: _Piece, new: _Piece) -> torch.dtype:
        """A rank that had nothing and gets nothing throws the bytes away."""
        place = old.place or new.place
        return torch.uint8 if place is None else place.dtype


@dataclass(frozen=True)
class ValueInShards:
    """A SharedOrigin."""

    carried: ShardsOnTheMove
    key: str

    def fill(self, target: Tensor) -> None:
        raise AssertionError(f"{self.key!r} is in shards")

    def fill_home(self, chunks: Chunks) -> None:
        self.carried.hand_over_own(self.key, ChunkKind.PARAM, chunks)


def _is_whole(chunks: Chunks, chunk: int, kind: ChunkKind) -> bool:
    return chunks.has_whole_home(chunk) if kind is ChunkKind.PARAM else not chunks.is_cut(chunk)


def _piece(chunks: Chunks, key: str, kind: ChunkKind, array: Array, per_numel: int) -> _Piece:
    """Of an array that holds one element for so many of the chunk."""
    chunk, entry = chunks.places[key]
    found: ParamRange | None = entry if _is_whole(chunks, chunk, kind) else chunks.own_entry(key)
    if found is None:
        return _Piece(None, 0, 0)
    at = found.within(per_numel)
    start = found.start_numel // per_numel
    return _Piece(array.part(at.start, (at.stop - at.start,)), start, start + at.stop - at.start)


def _cuts(chunks: Chunks, key: str) -> list[tuple[int, int]]:
    """Which elements of a parameter each rank of a group has."""
    chunk, entry = chunks.places[key]
    spec: ChunkSpec = chunks.specs[chunk]
    num_shards = chunks.num_shards if chunks.is_cut(chunk) else 1
    owned = [own for shard in range(num_shards) for own in spec.own_ranges(shard, num_shards)]
    first, last = entry.offset_numel, entry.offset_numel + entry.numel
    return [(max(own.start, first) - first, min(own.stop, last) - first) for own in owned if own]
