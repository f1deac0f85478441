"""The values of a wrapped model: read, written and lent, one by one or all of them, and as they were after a step."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hightide.ir.limits import DiskLimit
from hightide.ir.refusal import Refused
from hightide.ir.save_sizes import NUM_STAGED, SMALL_TILE_BYTES, TILE_BYTES
from hightide.ir.tier import Tier
from hightide.process.forks import Birthplace
from hightide.process.interrupts import deferred, safe_point, uninterrupted
from hightide.runtime.chunks.between_ranks import BetweenRanks
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.disk_homes import mapped
from hightide.runtime.lanes.lanes import Lanes
from hightide.runtime.plan_stores import PlanStores
from hightide.runtime.same_acts import Acts
from hightide.runtime.saving.copy_on_update import CopyOnUpdate
from hightide.runtime.saving.snapshot import Snapshot
from hightide.runtime.saving.tiles import Wanted, saved_tensors, tiles_of
from hightide.runtime.schedule.executor import Executor
from hightide.runtime.schedule.in_flight import InFlight
from hightide.runtime.schedule.performer import Performer

HALF_LOADED = (
    "a checkpoint was being loaded when that failed, and some values are of before it, some of the checkpoint; load a "
    "whole one (hightide.load) to go on"
)


class RunValues:
    """What `Run` does with them; it has these parts."""

    birthplace: Birthplace
    stores: PlanStores
    chunks: Chunks
    lanes: Lanes
    flight: InFlight
    performer: Performer
    executor: Executor
    between: BetweenRanks | None  # several ranks
    disks: Sequence[DiskLimit]
    acts: Acts | None  # several ranks

    def __init__(self) -> None:
        self.lends = False  # see borrowed()
        self.loaded_masters: dict[str, Tensor] = {}  # since the last step: their parameters may be loaded after them
        self._lost = ""  # why; see check_values()

    def check_values(self) -> None:
        """Raises if they are lost, or are not of this process: what lies there must not become somebody's
        checkpoint."""
        self.birthplace.check()
        if self._lost:
            raise RuntimeError(self._lost)

    def lose_values(self, why: str, error: BaseException) -> None:
        self._lost = why
        self.lanes.fail(error)

    def value_of(self, key: str, borrow: bool = False) -> Tensor:
        """A copy of a parameter's present value. With `borrow` it is the very memory where it lies in RAM, to be read
        at once; it looks as if it had a storage of its own, or writers of files would take all parameters for one. From
        disk it comes in pages of a file, which need not stay in memory."""
        self.check_values()
        safe_point()
        self.executor.wait_for_update(self.chunks.places[key][0])
        if self.between is not None:
            return self.between.whole_value(key)
        place = self.chunks.value(key)
        if borrow and not place.is_memory and place.nbytes > 0:
            return mapped(place, self.disks[0].path)
        lies_in_ram = place.is_memory and place.view.device.type == "cpu" and place.nbytes > 0
        return with_own_storage(place.view) if borrow and lies_in_ram else place.get()

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Inside, state dicts have the memory of the chunks itself. Nothing may train meanwhile."""
        before, self.lends = self.lends, True
        try:
            yield
        finally:
            self.lends = before

    def store(self, key: str, value: Tensor) -> None:
        """New values for a parameter, from a state dict."""
        self.birthplace.check()
        chunk = self.chunks.places[key][0]
        self.executor.open_home(chunk)
        self.secure(key)
        if self.acts is not None:
            self.acts.loads(f"what was loaded into {key}", value)
        self.chunks.store(key, value)
        if (master := self.loaded_masters.get(key)) is not None and not self.misfits({key: master}):
            self.chunks.restore_master(key, master)

    def misfits(self, masters: Mapping[str, Tensor]) -> set[str]:
        """Which of these master copies are not of their parameters' present values, on this or another rank."""
        found = {key for key, master in masters.items() if not self.chunks.fits_master(key, master)}
        return found if self.between is None else self.between.any_of("obsolete masters", list(masters), found)

    def master_of(self, key: str) -> Tensor | None:
        """As a whole, of all ranks; None where the parameter is its own."""
        return self.chunks.master_of(key) if self.between is None else self.between.whole_master(key)

    @contextmanager
    def rewriting(self) -> Iterator[Chunks]:
        """Inside, the caller writes the values of all parameters, and their states, straight to their places. If that
        does not come to its end, the model neither trains nor is saved until another one has."""
        self.birthplace.check()
        self.lanes.check()
        if self._lost != HALF_LOADED:
            self.check_values()
        self._finish_saving()
        for chunk in range(len(self.chunks.specs)):
            self.executor.open_home(chunk)
        self._lost = HALF_LOADED
        yield self.chunks
        with uninterrupted:
            self.chunks.show_new_values()
            self.loaded_masters.clear()
            self._lost = ""

    def await_states(self, key: str, changes: bool = True) -> None:
        """Until nothing is under way with a parameter's states; `changes`: whoever asks writes to them."""
        self.executor.await_home(self.chunks.places[key][0])
        if changes:
            self.secure(key)

    # -- values for a checkpoint ----------------------------------------------------------------------------------

    def snapshot(self, wanted: Wanted | None = None) -> Snapshot:
        """The values after the latest step(), to be read beside training, of all parameters and their states or of
        those that are `wanted`. Updates that are still under way belong to it. One at a time."""
        self.check_values()
        self.lanes.check()
        self.chunks.binding.check(range(len(self.chunks.specs)))
        if self.performer.updating.saving is not None:
            raise Refused("a checkpoint of this model is still being read; wait for it, or close it, before the next")
        with uninterrupted:
            updates, flight = self.performer.updating.updates, self.flight
            has_states = (lambda key: False) if updates is None else updates.begin_saving()
            tile_bytes = TILE_BYTES if self.stores.host.spare_bytes >= NUM_STAGED * TILE_BYTES else SMALL_TILE_BYTES
            order = self.executor.update_order()
            wanted = wanted or (lambda key, kind: True)
            tiles = list(tiles_of(self.chunks, order, has_states, wanted, tile_bytes))
            tensors = saved_tensors(self.chunks, order, has_states, wanted)
            owed = {chunk: flight.changes(chunk) for chunk in order}
            on_gpu = [place.is_updated_on_gpu and place.chunk.optimised_numel > 0 for place in self.chunks.placed]
            written = WrittenSince(self.chunks)
            kept = CopyOnUpdate(tiles, owed, self.lanes, self.stores.host, flight.moment(), on_gpu.__getitem__, written)
            self.performer.updating.saving = kept
            return Snapshot(tensors, tiles, kept, self.lanes)

    def secure(self, key: str | None = None) -> None:
        """Before somebody changes the values of a parameter, or of all: those that a snapshot still needs are copied,
        or it is waited for."""
        saving = self.performer.updating.saving
        if saving is not None:
            saving.secure_now(None if key is None else self.chunks.places[key][0])

    def _finish_saving(self) -> None:
        """Before values leave their places."""
        saving = self.performer.updating.saving
        if saving is not None:
            with deferred:
                saving.wait()
                saving.close()


def with_own_storage(value: Tensor) -> Tensor:
    """The same memory under a storage that begins and ends with this tensor. Nothing keeps the memory alive."""
    assert value.is_contiguous()
    memory = (ctypes.c_uint8 * value.nbytes).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=value.dtype).view(value.shape)


class WrittenSince:
    def __init__(self, chunks: Chunks) -> None:
        """Looks for writes to parameters on the GPU that no update and nothing of hightide's tells, since now."""
        self._chunks = chunks
        self._keys = {
            spec.index: [entry.param for entry in spec.params]
            for spec in chunks.specs
            if chunks.home(spec.index).store.tier is Tier.GPU
        }
        self._before = {chunk: chunks.writes(keys) for chunk, keys in self._keys.items()}

    def __call__(self, chunk: int) -> str | None:
        """A parameter of this chunk that was."""
        now, before = self._chunks.writes(self._keys.get(chunk, ())), self._before.get(chunk, {})
        return next((key for key, number in now.items() if before.get(key, number) != number), None)
