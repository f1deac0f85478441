"""The bytes of all chunks: their homes, the slots of the accelerator that they pass through, and the way between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hightide.ir.block import ModelProfile
from hightide.ir.chunk import ChunkSpec, ParamRange
from hightide.ir.state_spec import MASTER
from hightide.ir.tier import ChunkKind, Tier
from hightide.planner.chunk_place import STAGING, Buffer
from hightide.planner.lookup import buffer_bytes
from hightide.planner.placement import Placement
from hightide.planner.predict.moving_in import RETURN_BYTES
from hightide.process.progress import tell
from hightide.process.system import return_freed_memory
from hightide.runtime.chunks.binding import Binding
from hightide.runtime.chunks.disk_homes import UpdateArrays
from hightide.runtime.chunks.homes import DTYPES, GRAD_DTYPE, Homes, write_zeros
from hightide.runtime.chunks.origin import Origin, PartedOrigin, SharedOrigin
from hightide.runtime.chunks.residency import Copy, Residency
from hightide.runtime.chunks.slot_table import SlotTable
from hightide.runtime.chunks.staging import Staging
from hightide.runtime.tables.host_table import HostTable
from hightide.stores.array import Array
from hightide.stores.store import Accelerator, Region, Store


class Chunks(Homes):
    def __init__(
        self,
        profile: ModelProfile,
        placement: Placement,
        stores: Mapping[Tier, Store],
        parameters: Mapping[str, nn.Parameter],
        own_shard: int = 0,
    ):
        """Takes all the memory; `load` moves values in. `own_shard`: of several ranks, the one that this one has."""
        plan, gpu = placement.plan, stores[Tier.GPU]
        assert isinstance(gpu, Accelerator)
        self.gpu, self.parameters = gpu, parameters
        self.by_block = [tuple(place.chunk.index for place in places) for places in placement.by_block]
        self._params_of_block = [frozenset(block.params) for block in profile.blocks]

        self.param_slots = SlotTable(plan.num_slots, [place.num_slots for place in placement.chunks])
        self.grad_slots = SlotTable(plan.num_grad_slots, [place.num_grad_slots for place in placement.chunks])
        self.slot_bytes = placement.buffer_bytes[Buffer.SLOT]
        self.grad_slot_bytes = placement.buffer_bytes[Buffer.GRAD_SLOT]
        pool_bytes, grad_pool_bytes = plan.num_slots * self.slot_bytes, plan.num_grad_slots * self.grad_slot_bytes
        self._slots = gpu.allocate(pool_bytes, "slots") if pool_bytes else None
        self._slots_address = 0
        self.around_slots = (0, 0)  # addresses between which the memory begins of all that lies in parameter slots
        self._grad_slots = gpu.allocate(grad_pool_bytes, "gradient slots") if grad_pool_bytes else None
        self._leaving, self._arriving, self._rounding = (
            Staging(gpu, gpu.allocate(num_bytes, "gradient staging")) if num_bytes else None
            for num_bytes in (placement.buffer_bytes[buffer] for buffer in STAGING)
        )

        super().__init__(profile, placement, stores, own_shard)
        self.tables: dict[int, HostTable] = {}  # chunks that are looked up on the host
        for place in self.placed:
            if place.is_looked_up:
                sizes = buffer_bytes(profile, plan, place.chunk.block)
                self.tables[place.chunk.index] = self._table(place.chunk, stores, sizes)
        self.at_hand: dict[int, UpdateArrays] = {}  # of the chunk that is updated now, if it is not at home
        self.param_copies = [Copy(f"param {spec.index} on gpu") for spec in self.specs]
        self.grad_copies = [Copy(f"gradient {spec.index} on gpu") for spec in self.specs]
        self.home_copies = [Copy(f"param {spec.index} at home", Residency.CLEAN) for spec in self.specs]
        self.stale = [False] * len(self.specs)  # persistent on the GPU, but updated on host since
        self.taken: list[str] = []  # parameters whose values have moved in
        self._made_grads: dict[tuple[int, int | None], dict[str, Tensor]] = {}
        self._in_slots: dict[tuple[int, ChunkKind, int], Array] = {}
        self._own_parts: dict[tuple[int, ChunkKind, int], Array] = {}
        # For graphs that outlive slots: how each parameter is packed, and views of slots by the first slot and by what
        # was packed. See waiting/held.py.
        self.packed_parameters: dict[int, Any] = dict.fromkeys(map(id, parameters.values()))
        self.unpacked: dict[Any, Tensor] = {}
        # Of several ranks: by all of them.
        self.whole_value: Callable[[str], Tensor] = lambda key: self.value(key).get()
        self.binding = Binding(self, {block.index for block in profile.blocks if block.loose})

    # -- places ---------------------------------------------------------------------------------------------------

    def grad(self, chunk: int) -> Array:
        """The chunk's gradient where the update reads it."""
        home = self.grad_home(chunk)
        return self._grad_in_slot(chunk) if home is None else home

    def update_arrays(self, chunk: int) -> UpdateArrays:
        """What an update reads and writes: where it has been brought for it, or at home."""
        at_hand = self.at_hand.get(chunk)
        if at_hand is not None:
            return at_hand
        home, grad = self._homes[chunk], self.grad(chunk)
        if self.is_cut(chunk):
            if home is self._persistent[chunk]:
                home = self._own_part(chunk, ChunkKind.PARAM, home)
            if grad is not self.grad_home(chunk) or grad is self._sums[chunk]:
                grad = self._own_part(chunk, ChunkKind.GRAD, grad)
        return UpdateArrays(home, grad, self._states[chunk])

    def _own_part(self, chunk: int, kind: ChunkKind, whole: Array) -> Array:
        """The elements of a whole chunk that this rank updates. Made once."""
        key = (chunk, kind, whole.offset_bytes)
        if key not in self._own_parts:
            optimised, *_ = self.own[chunk]
            self._own_parts[key] = whole.part(optimised.start, (len(optimised),))
        return self._own_parts[key]

    def param_on_gpu(self, chunk: int) -> Tensor:
        persistent = self._persistent[chunk]
        if persistent is not None:
            return persistent.view
        spec, slots = self.specs[chunk], self._slots
        first = self.param_slots.first(chunk)
        assert first is not None and slots is not None, f"chunk {chunk} is not on the GPU"
        start, dtype = first * self.slot_bytes, DTYPES[spec.dtype]
        return self._in_slot(chunk, ChunkKind.PARAM, slots, start, dtype, spec.numel).view

    def grad_on_gpu(self, chunk: int) -> Tensor:
        own = self._sums[chunk]
        if own is not None:
            return own.view
        return (self._grad_in_slot(chunk) if self.placed[chunk].in_grad_slot else self.grad(chunk)).view

    def latest_grad(self, chunk: int) -> Array:
        """The chunk's gradient where it is between passes: at home, or where it stays until the last one of a step."""
        own = self._sums[chunk]
        return own if own is not None and self.grad_copies[chunk].state is Residency.DIRTY else self.grad(chunk)

    def let_stay(self, chunk: int) -> None:
        """Its gradient is, or will be before it is used, where it stays on the GPU."""
        copy = self.grad_copies[chunk]
        if self._sums[chunk] is not None and copy.state is Residency.ABSENT:
            for state in (Residency.CLEAN, Residency.HELD, Residency.DIRTY):
                copy.move(state)

    def _grad_in_slot(self, chunk: int) -> Array:
        first = self.grad_slots.first(chunk)
        assert first is not None and self._grad_slots is not None, f"the gradient of chunk {chunk} is not on the GPU"
        start, numel = first * self.grad_slot_bytes, self.specs[chunk].trainable_numel
        return self._in_slot(chunk, ChunkKind.GRAD, self._grad_slots, start, GRAD_DTYPE, numel)

    def _in_slot(
        self, chunk: int, kind: ChunkKind, slots: Region, offset_bytes: int, dtype: torch.dtype, numel: int
    ) -> Array:
        """Slots are few and never move: made once."""
        array = self._in_slots.get((chunk, kind, offset_bytes))
        if array is None:
            array = self._in_slots[chunk, kind, offset_bytes] = Array(self.gpu, slots, dtype, (numel,), offset_bytes)
        return array

    def grad_views(self, chunk: int) -> dict[str, Tensor]:
        """The gradients of a chunk's parameters where it is on the GPU now. There are few such places: made once. By
        `.data`, each has a version of its own."""
        place = (chunk, self.grad_slots.first(chunk))
        if place not in self._made_grads:
            flat, spec = self.grad_on_gpu(chunk), self.specs[chunk]
            with torch.inference_mode(False):  # they outlive it
                self._made_grads[place] = {
                    entry.param: self.view_of(flat, entry).data
                    for entry in spec.params
                    if entry.offset_numel < spec.trainable_numel
                }
        return self._made_grads[place]

    # -- on their way ---------------------------------------------------------------------------------------------

    def bring_param(self, chunk: int, buffer: Array | None = None) -> int:
        """From home, or the buffer in which it waits, to where compute finds it, on the h2d lane. Returns the bytes
        moved."""
        home, target = self._homes[chunk] if buffer is None else buffer, self.param_on_gpu(chunk)
        if not self.is_cut(chunk):
            home.read(target).wait()
        else:
            for start, own in self.own_pieces(chunk):
                home.read(target[own], start).wait()
        return home.nbytes

    def send_gradient(self, chunk: int, buffer: Array | None = None) -> int:
        """From its slot, or where it has stayed, home or into a buffer, on the d2h lane. Returns the bytes moved."""
        home, source = self.grad(chunk) if buffer is None else buffer, self.grad_on_gpu(chunk)
        if self.placed[chunk].is_rounded_home:
            home.view.copy_(source)
            return home.nbytes
        leaving = self._leaving if self.placed[chunk].is_narrow else None
        for start, own in self.own_pieces(chunk, 2) if self.is_cut(chunk) else [(0, slice(None))]:
            if leaving is not None:
                leaving.send(source[own], home, start)
            else:
                home.write(source[own], start).wait()
        return home.nbytes

    def bring_gradient(self, chunk: int, buffer: Array | None = None) -> int:
        """From home, or a buffer, into its slot, on the h2d lane. Returns the bytes moved. See [Note: reducing
        gradients] in planner/lower/move_gradients.py: a shard of a mean is put there so that it is in the next one."""
        home, target = self.grad(chunk) if buffer is None else buffer, self.grad_on_gpu(chunk)
        if self.placed[chunk].is_rounded_home:
            target.copy_(home.view)
            return home.nbytes
        arriving = self._arriving if self.placed[chunk].is_narrow else None
        is_cut = self.is_cut(chunk)
        if is_cut:
            target.zero_()
        for start, own in self.own_pieces(chunk, 2) if is_cut else [(0, slice(None))]:
            if arriving is not None:
                arriving.bring(target[own], home, start)
            else:
                home.read(target[own], start).wait()
            if is_cut:
                target[own].mul_(self.num_shards)
        return home.nbytes

    def spread_gradient(self, chunk: int) -> None:
        """As `bring_gradient` leaves it, of a sum that has stayed where it was averaged: pieces of others are what this
        rank alone had of them."""
        flat, end = self.grad_on_gpu(chunk), 0
        for _, own in sorted(self.own_pieces(chunk, 2), key=lambda piece: piece[1].start):
            flat[end : own.start].zero_()
            flat[own].mul_(self.num_shards)
            end = own.stop
        flat[end:].zero_()

    def round_gradient(self, chunk: int) -> None:
        """Where it is on the GPU, on the stream that computes; of several ranks, on the one that reduces."""
        if self._rounding is not None and (dtype := self.rounding_dtype(chunk)) is not None:
            for part in self.averaged(chunk):
                self._rounding.round(part, dtype)

    def averaged(self, chunk: int) -> list[Tensor]:
        """Its gradient on the GPU: this rank's pieces, once it was reduced, or all of it."""
        if self.placed[chunk].is_reduced_home:
            return [self.grad(chunk).view]
        flat = self.grad_on_gpu(chunk)
        return [flat[own] for _, own in self.own_pieces(chunk, 2)] if self.is_cut(chunk) else [flat]

    def rounding_dtype(self, chunk: int) -> torch.dtype | None:
        """To which a finished gradient is rounded, if it is."""
        name = self.placed[chunk].rounds_to
        return None if name is None else DTYPES[name]

    def slot_offset(self, tensor: Tensor) -> tuple[int, int] | None:
        """(chunk, byte offset in it) of a tensor that lies in a parameter slot; None for any other tensor."""
        if self._slots is None:
            return None
        distance = tensor.data_ptr() - self._slots_address
        if not 0 <= distance < self._slots.num_bytes:
            return None
        chunk = self.param_slots.occupant(distance // self.slot_bytes)
        first = None if chunk is None else self.param_slots.first(chunk)
        if chunk is None or first is None:
            return None
        offset = distance - first * self.slot_bytes
        return (chunk, offset) if offset < self.specs[chunk].param_bytes else None

    # -- parameters -----------------------------------------------------------------------------------------------

    def placements(self, chunk: int, block: int | None = None) -> list[ParamRange]:
        """The parameters of a chunk; with `block`, only those that this block uses."""
        entries = self.specs[chunk].params
        return [entry for entry in entries if block is None or entry.param in self._params_of_block[block]]

    def view_of(self, flat: Tensor, entry: ParamRange) -> Tensor:
        return flat[entry.within()].view(self.shapes[entry.param])

    def writes(self, keys: Iterable[str]) -> dict[str, int]:
        """A number of each parameter that grows when somebody writes to it in place, which is right where its only copy
        is on the GPU."""
        return {key: self.parameters[key]._version for key in keys if key not in self.binding.ignored_versions}

    def store(self, key: str, value: Tensor) -> None:
        """New values for a parameter, wherever copies of it are; nothing may be under way with its chunk."""
        self.put_value(key, value)
        self._show_new_value(key)

    def show_new_values(self) -> None:
        """Somebody has written those of all parameters to their homes; nothing is under way."""
        for key in self.places:
            self._show_new_value(key)

    def _show_new_value(self, key: str) -> None:
        chunk, _ = self.places[key]
        self.stale[chunk] = self.placed[chunk].is_refreshed
        self.binding.show_new_value(key)

    def refresh(self, chunk: int) -> None:
        """Persistent parameters get the values of their home; nothing may be under way. Where that has a shard of them
        only, others have the rest: it happens when they are used."""
        persistent = self._persistent[chunk]
        if persistent is not None and self.lives_elsewhere(chunk):
            if self.is_cut(chunk):
                self.stale[chunk] = True
                return
            persistent.put(self._homes[chunk].peek())
            self.stale[chunk] = False

    def take_hold(self) -> None:
        """Of the parameters, once the values are in their places. The GPU's memory may be another one than before."""
        if self._slots is not None:
            view = self.gpu.view(self._slots, torch.uint8)
            self._slots_address = view.data_ptr()
            self.around_slots = view.untyped_storage().data_ptr(), self._slots_address + self._slots.num_bytes
        self.binding.take_hold()

    def close(self) -> None:
        self.binding.forget_views()
        self._made_grads.clear()
        self._in_slots.clear()
        self.unpacked.clear()
        self._own_parts.clear()
        for table in self.tables.values():
            table.forget_views()
        super().close()

    # -- set-up ---------------------------------------------------------------------------------------------------

    def _table(self, spec: ChunkSpec, stores: Mapping[Tier, Store], sizes: tuple[int, int]) -> HostTable:
        (entry,), home, grad = spec.params, self._homes[spec.index], self._grads[spec.index]
        gradient = None if grad is None else self.part(grad, entry)
        return HostTable(entry.param, self.part(home, entry), gradient, self.gpu, stores[Tier.HOST], sizes)

    def load(self, origins: Mapping[str, Origin], begins: bool = True) -> None:
        """Moves the model's values into the chunks, one parameter at a time: the originals are freed on the way, as
        planner/predict/moving_in.py tells. Values that are somewhere else are read straight into their places, and
        those that do not exist yet are zero. Unless training `begins` with them, somebody else fills the states."""
        freed_bytes = 0
        for number, spec in enumerate(self.specs):
            tell("moving values to their places", f"chunk {number + 1} of {len(self.specs)}")
            home = self._homes[spec.index]
            write_zeros(home)
            for entry in spec.params:
                param, origin = self.parameters[entry.param], origins.get(entry.param)
                if isinstance(origin, SharedOrigin):
                    origin.fill_home(self)
                elif not self.has_whole_home(spec.index):
                    self._take_own(entry.param, origin)
                elif origin is not None:
                    with self.part(home, entry).opened(is_new=True) as target:
                        origin.fill(target)
                elif not param.is_meta:
                    self.part(home, entry).put(param.data)
                freed_bytes += 0 if param.is_meta else param.nbytes
                self.binding.make_absent(entry.param)
                self.taken.append(entry.param)
                if freed_bytes >= RETURN_BYTES:
                    return_freed_memory()
                    freed_bytes = 0
            states = self._states[spec.index]  # they begin as zero, and a master as the parameter: no remainder
            for state in states.values():
                write_zeros(state)
            if begins and MASTER in states:
                whole = home is self._persistent[spec.index]
                first = self.own[spec.index][0].start if whole and self.is_cut(spec.index) else 0
                states[MASTER].put(home.part(first, states[MASTER].shape).peek())
            self.refresh(spec.index)
            if not self.placed[spec.index].is_streamed:
                self.param_copies[spec.index].move(Residency.CLEAN)
        return_freed_memory()
        self.take_hold()

    def _take_own(self, key: str, origin: Origin | None) -> None:
        """Of a parameter's first values, those that have their home here; of a file no others are read."""
        param, place = self.parameters[key], self.own_value(key)
        if place is None:
            return
        if isinstance(origin, PartedOrigin):
            with place.opened(is_new=True) as target:
                origin.fill_part(target, self._own_entries[key].start_numel)
            return
        if origin is not None:
            values = torch.empty(self.shapes[key], dtype=param.dtype)
            origin.fill(values)
            place.put(self.own_elements(key, values))
        elif not param.is_meta:
            place.put(self.own_elements(key, param.data))
