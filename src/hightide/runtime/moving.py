"""A run's values on their way from one plan to another.

[Note: moving] The GPU has no room for two plans, and the host may have none for two models. So what lies on the GPU is
copied to host memory, where it waits; then the GPU's memory is given back, and that of the new plan is taken. All that
may fail has been done by then, and no value has moved: on a failure the copies go back. Then every value goes to its
new place, tile by tile, and the pages that it leaves are given back: host memory never holds more than it did with
what waits, or than the new plan takes, but for parts of huge pages: the kernel takes them back when memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hightide.ir.plan import Plan
from hightide.ir.tier import ChunkKind, Tier
from hightide.planner.placement import Placement
from hightide.runtime.chunks import Chunks
from hightide.runtime.gradients import Gradients
from hightide.stores.arena import ArenaStore
from hightide.stores.base import ALIGN_BYTES
from hightide.stores.host import HostArena

TILE_BYTES = 2**22  # as much exists twice


def waiting_bytes(plan: Plan) -> int:
    """What will wait in host memory, at most."""
    places = Placement(plan).chunks
    params = sum(place.chunk.param_bytes for place in places if place.home is Tier.GPU)
    states = (place.chunk for place in places if place.states is Tier.GPU)
    return params + sum(chunk.state_bytes + chunk.grad_bytes for chunk in states)


class Luggage:
    def __init__(self, plan: Plan, chunks: Chunks, gradients: Gradients) -> None:
        """Copies what lies on the GPU, out of chunks that nobody uses. Raises MemoryError if the host has no room."""
        self._chunks, self._gradients = chunks, gradients
        gradients.any_valid()  # what the user did to `p.grad` since
        self._left: list[tuple[Tensor, Tensor]] = []  # where it lay on the GPU, and where it waits
        self._of_use = {spec.index: gradients.of_use(spec.index) for spec in chunks.specs}
        flats = {(spec.index, ChunkKind.PARAM): [chunks.home(spec.index)] for spec in chunks.specs}
        flats |= {(spec.index, ChunkKind.STATE): chunks.states(spec.index) for spec in chunks.specs}
        flats |= {(index, ChunkKind.GRAD): [gradients.flat(index)] for index, keys in self._of_use.items() if keys}
        num_flats = sum(len(arrays) for arrays in flats.values())
        capacity_bytes = waiting_bytes(plan) + num_flats * ALIGN_BYTES
        self._waiting = HostArena(capacity_bytes, huge_bytes=capacity_bytes)
        self._flats = {
            (chunk, kind): arrays if self._is_on_host(chunk, kind) else [self._taken(flat) for flat in arrays]
            for (chunk, kind), arrays in flats.items()
        }

    def _is_on_host(self, chunk: int, kind: ChunkKind) -> bool:
        return self._chunks.placed[chunk].tier_of(kind) is Tier.HOST

    def _taken(self, flat: Tensor) -> Tensor:
        region = self._waiting.allocate(flat.nbytes, "waiting")
        copy = self._waiting.view(region, flat.dtype).copy_(flat)
        self._left.append((flat, copy))
        return copy

    def put_back(self) -> None:
        """Everything is as it was, if the GPU's memory can be had again; else raises OutOfMemory."""
        self._chunks.gpu.reoccupy()
        for flat, copy in self._left:
            flat.copy_(copy)
        for spec in self._chunks.specs:
            self._chunks.refresh(spec.index)
        self._chunks.take_hold()
        self._waiting.vacate()  # whoever keeps the error keeps its frames, and this with them

    def origins(self) -> dict[str, _Value]:
        """Of the new chunks' values."""
        return {key: _Value(self, key) for key in self._chunks.parameters}

    def hand_over(self, key: str, kind: ChunkKind, targets: Sequence[Tensor]) -> None:
        """What there is of a parameter, to its new place: once."""
        chunk, entry = self._chunks.places[key]
        store: ArenaStore = self._chunks.host if self._is_on_host(chunk, kind) else self._waiting
        states = self._chunks.specs[chunk].states
        per_numels = [state.per_numel for state in states] if kind is ChunkKind.STATE else [1]
        for flat, per_numel, target in zip(self._flats[chunk, kind], per_numels, targets, strict=True):
            source = flat[entry.within(per_numel)]
            tile_numel = TILE_BYTES // source.element_size()
            for old, new in zip(source.split(tile_numel), target.view(-1).split(tile_numel), strict=True):
                new.copy_(old)
                store.give_back(old)

    def unpack(self, chunks: Chunks, gradients: Gradients) -> None:
        """States and gradients, once the values are in their places and the gradients know of them."""
        for spec in self._chunks.specs:
            for entry in spec.params:
                if entry.offset_numel < spec.optimised_numel:
                    self.hand_over(entry.param, ChunkKind.STATE, chunks.states_of(entry.param))
            for key in self._of_use[spec.index]:
                self.hand_over(key, ChunkKind.GRAD, [gradients.place_of(key)])
                gradients.is_in_place(key)


@dataclass(frozen=True)
class _Value:
    """An Origin."""

    luggage: Luggage
    key: str

    def fill(self, target: Tensor) -> None:
        self.luggage.hand_over(self.key, ChunkKind.PARAM, [target])
