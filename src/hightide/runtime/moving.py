"""A run's values on their way from one plan to another.

[Note: moving] The GPU has no room for two plans, and the host may have none for two models. So what lay on the GPU
waits in plain host memory until the new chunks are there; what lay on the host goes straight to its new place, and its
old pages are given back chunk by chunk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from hightide.ir.plan import Plan, Update
from hightide.ir.tier import ChunkKind, Tier
from hightide.planner.place import has_host_params
from hightide.runtime.chunks import Chunks
from hightide.runtime.gradients import Gradients


def waiting_bytes(plan: Plan) -> int:
    """What will wait in plain host memory, at most."""
    chunks = plan.layout.chunks
    params = sum(chunk.param_bytes for chunk in chunks if not has_host_params(plan, chunk))
    states = (chunk for chunk in chunks if plan.blocks[chunk.block].states is Tier.GPU)
    return params + sum(chunk.state_bytes + chunk.grad_bytes for chunk in states)


class Luggage:
    def __init__(self, plan: Plan, chunks: Chunks, gradients: Gradients) -> None:
        """Takes the values out of chunks that nobody uses, and off the parameters."""
        self._chunks, self._gradients = chunks, gradients
        gradients.any_valid()  # what the user did to `p.grad` since
        self._with_gradients = plan.update is Update.DEFERRED  # else an update has used them up
        self._to_fill = Counter({spec.index: len(spec.params) for spec in chunks.specs})
        self._values = [self._taken(chunks.home(spec.index), ChunkKind.PARAM, spec.index) for spec in chunks.specs]
        self._states = [
            [self._taken(state, ChunkKind.STATE, spec.index) for state in chunks.states(spec.index)]
            for spec in chunks.specs
        ]
        self._sums = {
            spec.index: self._taken(gradients.flat(spec.index), ChunkKind.GRAD, spec.index)
            for spec in chunks.specs
            if self._with_gradients and gradients.has_gradient(spec.index)
        }
        self._loose = gradients.take_loose()
        chunks.let_go()

    def _taken(self, flat: Tensor, kind: ChunkKind, chunk: int) -> Tensor:
        return flat if self._chunks.is_on_host(chunk, kind) else flat.to("cpu", copy=True)

    def origins(self) -> dict[str, _Value]:
        """Of the new chunks' values."""
        return {key: _Value(self, key) for key in self._chunks.parameters}

    def fill(self, key: str, target: Tensor) -> None:
        chunk, entry = self._chunks.places[key]
        target.copy_(self._chunks.view_of(self._values[chunk], entry))
        self._to_fill[chunk] -= 1
        if not self._to_fill[chunk]:
            self._done(chunk, ChunkKind.PARAM, self._values[chunk])

    def unpack(self, chunks: Chunks, gradients: Gradients) -> None:
        """States and gradients, once the values are in their places."""
        old = self._chunks
        for spec in old.specs:
            for entry in spec.params:
                if entry.offset_numel < spec.optimised_numel:
                    for state, target in zip(self._states[spec.index], chunks.states_of(entry.param), strict=True):
                        target.copy_(old.view_of(state, entry))
            self._done(spec.index, ChunkKind.STATE, *self._states[spec.index])
        for index, total in self._sums.items():
            for entry in old.specs[index].params:
                if self._gradients.is_valid(entry.param):
                    chunk, place = chunks.places[entry.param]
                    chunks.view_of(gradients.flat(chunk), place).copy_(old.view_of(total, entry))
            self._done(index, ChunkKind.GRAD, total)
        gradients.succeed(self._gradients, self._loose)

    def _done(self, chunk: int, kind: ChunkKind, *flats: Tensor) -> None:
        """Nobody will read it again."""
        if self._chunks.is_on_host(chunk, kind):
            self._chunks.give_back(chunk, kind)
        for flat in flats:
            if not self._chunks.is_on_host(chunk, kind):
                flat.untyped_storage().resize_(0)


@dataclass(frozen=True)
class _Value:
    """An Origin."""

    luggage: Luggage
    key: str

    def fill(self, target: Tensor) -> None:
        self.luggage.fill(self.key, target)
