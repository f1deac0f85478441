"""A run's values on their way from one plan to another.

[Note: moving] The GPU has no room for two plans, and the host may have none for two models. So what lies on the GPU is
copied to host memory, where it waits; then the GPU's memory is given back, and that of the new plan is taken. All that
may fail has been done by then, and no value has moved: on a failure the copies go back. Then every value goes to its
new place, tile by tile, and the pages that it leaves are given back: host memory never holds more than it did with
what waits, or than the new plan takes, but for parts of huge pages: the kernel takes them back when memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from hightide.ir.plan import Plan
from hightide.ir.tier import ChunkKind, Tier
from hightide.planner.placement import Placement
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.gradients.gradients import Gradients
from hightide.stores.array import Array
from hightide.stores.host_arena import HostArena
from hightide.stores.store import ALIGN_BYTES

TILE_BYTES = 2**22  # as much exists twice


def waiting_bytes(plan: Plan) -> int:
    """What will wait in host memory, at most."""
    places = Placement(plan).chunks
    params = sum(place.chunk.param_bytes for place in places if place.home is Tier.GPU)
    states = (place.chunk for place in places if place.states is Tier.GPU)
    sums = sum(place.chunk.grad_bytes for place in places if place.stays)
    return params + sum(chunk.state_bytes + chunk.grad_bytes for chunk in states) + sums


class StatesOnTheMove:
    def __init__(self, plan: Plan, chunks: Chunks, gradients: Gradients) -> None:
        """Copies what lies on the GPU, out of chunks that nobody uses. Raises MemoryError if the host has no room."""
        self._chunks, self._gradients = chunks, gradients
        gradients.any_valid()  # what the user did to `p.grad` since
        self._left: list[tuple[Array, Array]] = []  # where it lay on the GPU, and where it waits
        self._of_use = {spec.index: gradients.of_use(spec.index) for spec in chunks.specs}
        found = {(spec.index, ChunkKind.PARAM): [chunks.home(spec.index)] for spec in chunks.specs}
        found |= {(spec.index, ChunkKind.STATE): [*chunks.states(spec.index).values()] for spec in chunks.specs}
        found |= {(index, ChunkKind.GRAD): [chunks.latest_grad(index)] for index, keys in self._of_use.items() if keys}
        num_arrays = sum(len(arrays) for arrays in found.values())
        capacity_bytes = waiting_bytes(plan) + num_arrays * ALIGN_BYTES
        self._waiting = HostArena(capacity_bytes, huge_bytes=capacity_bytes)
        self._arrays = {place: [self._taken(array) for array in arrays] for place, arrays in found.items()}

    def _taken(self, array: Array) -> Array:
        """What lies somewhere else than on the GPU stays there for now."""
        if array.store is not self._chunks.gpu:
            return array
        region = self._waiting.allocate(array.nbytes, "waiting")
        copy = Array(self._waiting, region, array.dtype, array.shape)
        copy.put(array.view)
        self._left.append((array, copy))
        return copy

    def put_back(self) -> None:
        """Everything is as it was, if the GPU's memory can be had again; else raises OutOfMemory."""
        self._chunks.gpu.reoccupy()
        for array, copy in self._left:
            array.put(copy.view)
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
        states = self._chunks.specs[chunk].states
        per_numels = [state.per_numel for state in states] if kind is ChunkKind.STATE else [1]
        for array, per_numel, target in zip(self._arrays[chunk, kind], per_numels, targets, strict=True):
            start, tile_numel = entry.within(per_numel).start, TILE_BYTES // array.dtype.itemsize
            for new in target.view(-1).split(tile_numel):
                old = array.part(start, new.shape)
                new.copy_(old.peek())
                old.store.give_back(old.region, old.offset_bytes, old.nbytes)
                start += new.numel()

    def unpack(self, chunks: Chunks, gradients: Gradients) -> None:
        """States and gradients, once the values are in their places and the gradients know of them."""
        for spec in self._chunks.specs:
            for entry in spec.params:
                if entry.offset_numel < spec.optimised_numel:
                    self._unpack(entry.param, ChunkKind.STATE, chunks.states_of(entry.param))
            for key in self._of_use[spec.index]:
                chunks.let_stay(chunks.places[key][0])
                self._unpack(key, ChunkKind.GRAD, [gradients.place_of(key)])
                gradients.is_in_place(key)

    def _unpack(self, key: str, kind: ChunkKind, places: Sequence[Array]) -> None:
        with ExitStack() as stack:
            self.hand_over(key, kind, [stack.enter_context(place.opened(is_new=True)) for place in places])


@dataclass(frozen=True)
class _Value:
    """An Origin."""

    carried: StatesOnTheMove
    key: str

    def fill(self, target: Tensor) -> None:
        self.carried.hand_over(self.key, ChunkKind.PARAM, [target])
