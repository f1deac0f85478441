"""A run goes over to another plan.

[Note: moving] The GPU has no room for two plans, and the host may have none for two models. So what lies on the GPU is
copied to host memory, where it waits; then the GPU's memory is given back, and that of the new plan is taken. All that
may fail has been done by then, and no value has moved: on a failure the copies go back. Then every value goes to its
new place, tile by tile, and the pages that it leaves are given back: host memory never holds more than it did with
what waits, or than the new plan takes, but for parts of huge pages: the kernel takes them back when memory is short.

Graphs and lazy logits of before a move raise when they are used. What a user has taken out of a parameter that stays on
the GPU (`p.data`) is gone with its memory. Ctrl-C waits for the end of a move.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hightide.ir.tier import ChunkKind, Tier
from hightide.ir.units import exactly
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.solution import Solution
from hightide.process.system import free_host_bytes
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.gradients.gradients import Gradients
from hightide.runtime.gradients.ranked_gradients import RankedGradients
from hightide.runtime.plan_stores import PlanStores
from hightide.stores.array import Array
from hightide.stores.host_arena import HostArena
from hightide.stores.store import ALIGN_BYTES, OutOfMemory

if TYPE_CHECKING:
    from hightide.runtime.run import Run

TILE_BYTES = 2**22  # as much exists twice
LOST = (
    "the model was being moved to another plan when that failed, and its values are lost; the run ends here, go on "
    "from its last checkpoint"
)


def waiting_bytes(places: Sequence[ChunkPlace]) -> int:
    """What will wait in host memory, at most, of chunks that live there."""
    params = sum(place.copies[ChunkKind.PARAM, Tier.GPU] for place in places if place.is_home_on_gpu)
    states = (place.shard for place in places if place.is_updated_on_gpu)
    sums = sum(place.chunk.grad_bytes for place in places if place.stays)
    return params + sum(chunk.state_bytes + chunk.grad_bytes for chunk in states) + sums


def check_room(run: Run) -> None:
    """Before it leaves its plan. Raises InfeasiblePlan."""
    waiting, free = waiting_bytes(run.chunks.placed), free_host_bytes()
    if waiting > free:
        raise InfeasiblePlan(
            f"moving the model to another plan takes {exactly(waiting)} of host memory for a "
            f"while, and {exactly(free)} are free; wrap it again with a smaller Limits(gpu=...)"
        )


def go_over(run: Run, solution: Solution) -> None:
    """Nothing is under way. Raises what Run.move_to raises."""
    if run.gpu.device.type == "cuda":
        torch.cuda.synchronize(run.gpu.device)  # what was enqueued reads and writes what moves now
    carried = run.on_the_move()
    run.chunks.binding.let_go()
    run.gpu.vacate()
    try:
        stores, chunks = _allocated(run, solution)
    except BaseException as error:
        _stay(run, carried, error)
        raise
    try:
        _carry_over(run, carried, solution, stores, chunks)
    except BaseException as error:  # nothing that is known
        run.lose_values(LOST, error)
        raise RuntimeError(LOST) from error


def _allocated(run: Run, solution: Solution) -> tuple[PlanStores, Chunks]:
    """All memory that another plan needs, on all ranks, or none."""
    stores: PlanStores | None = None
    error: BaseException | None = None
    try:
        own_shard = run.divide(solution.plan.replicas)
        stores = PlanStores(solution, run.gpu.device, run.disks)
        for buffer in run.buffers:
            stores.gpu.adopt(buffer, "buffers")
        chunks = Chunks(solution.profile, solution.placement, stores.by_tier, run.parameters, own_shard)
    except BaseException as raised:
        error = raised
    if run.any_rank("no memory for another plan", error is not None) and error is None:
        error = MemoryError("another rank has no memory for this plan")
    if error is not None:
        if stores is not None:
            stores.close()
        raise error
    assert stores is not None
    return stores, chunks


def _stay(run: Run, carried: StatesOnTheMove, error: BaseException) -> None:
    """Under the old plan."""
    run.divide(run.plan.replicas)
    try:
        carried.put_back()
    except OutOfMemory as lost:
        run.lose_values(LOST, lost)
        raise RuntimeError(
            f"the model was moved to another plan, for which there was not enough memory ({error}), and meanwhile "
            "another process took GPU memory that the old plan had; the run ends here, go on from its last checkpoint"
        ) from lost


def _carry_over(run: Run, carried: StatesOnTheMove, solution: Solution, stores: PlanStores, chunks: Chunks) -> None:
    old_stores, old_chunks, performer, executor = run.stores, run.chunks, run.performer, run.executor
    run.profile, run.plan = solution.profile, solution.plan
    run.stores, run.chunks = stores, chunks
    for param in run.parameters.values():
        increment_version(param)  # what graphs of plain autograd have saved of it is gone: their backward raises
    old_stores.host.unpin()
    chunks.binding.ignored_versions = old_chunks.binding.ignored_versions
    run.meet()
    chunks.load(carried.origins(), begins=False)
    run.flight.forget()
    run.gradients.move_to(chunks)
    if run.between is not None:
        assert isinstance(run.gradients, RankedGradients)
        run.gradients.between = run.between
    carried.unpack(chunks, run.gradients)
    old_chunks.close()
    old_stores.host.vacate()
    old_stores.close()
    if performer.updating.updates is not None:
        performer.updating.updates.move_to(chunks)
    run.make_executor(solution)
    run.performer.go_on(performer)
    run.executor.go_on(executor)
    run.runners = {module: run.make_runner(runner.index, runner.original) for module, runner in run.runners.items()}


class StatesOnTheMove:
    def __init__(self, chunks: Chunks, gradients: Gradients) -> None:
        """Copies what lies on the GPU, out of chunks that nobody uses. Raises MemoryError if the host has no room."""
        self._chunks, self._gradients = chunks, gradients
        gradients.any_valid()  # what the user did to `p.grad` since
        self._left: list[tuple[Array, Array]] = []  # where it lay on the GPU, and where it waits
        self._of_use = {spec.index: gradients.of_use(spec.index) for spec in chunks.specs}
        found = {(spec.index, ChunkKind.PARAM): [chunks.home(spec.index)] for spec in chunks.specs}
        found |= {(spec.index, ChunkKind.STATE): [*chunks.states(spec.index).values()] for spec in chunks.specs}
        found |= {(index, ChunkKind.GRAD): [chunks.latest_grad(index)] for index, keys in self._of_use.items() if keys}
        num_arrays = sum(len(arrays) for arrays in found.values())
        capacity_bytes = waiting_bytes(chunks.placed) + num_arrays * ALIGN_BYTES
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
