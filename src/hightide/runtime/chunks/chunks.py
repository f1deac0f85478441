"""The bytes of all chunks: their homes in the stores of all tiers, persistent places and slots on the accelerator, and
the parameters that are bound to them.

[Note: absent parameters] A parameter that is not in use is a NaN scalar expanded to its shape: shapes stay true, and
reads and writes raise, see [Note: reading absent parameters]. (What goes round that reads NaN, and writes raise: one
to a single element, which torch lets pass, when its block is next used.) While its block is held, `param.data` is a
view of the slot. Persistent parameters that are updated on host raise too: they may be older than their last update.
Nothing is stored on the parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hightide.ir.block import ModelProfile
from hightide.ir.chunk import ChunkSpec, ParamRange
from hightide.ir.refusal import Refused
from hightide.ir.state_spec import MASTER, REMAINDER, STATE_DTYPE_BYTES, StateSpec
from hightide.ir.tier import ChunkKind, Tier
from hightide.planner.lookup import buffer_bytes
from hightide.planner.placement import STAGING, Buffer, ChunkPlace, Placement
from hightide.planner.predict.moving_in import RETURN_BYTES
from hightide.process.progress import tell
from hightide.process.system import return_freed_memory
from hightide.runtime.chunks.absent import Nans, absent_class
from hightide.runtime.chunks.disk_homes import DiskHomes, UpdateArrays
from hightide.runtime.chunks.host_table import HostTable
from hightide.runtime.chunks.origin import Origin
from hightide.runtime.chunks.remainder import join, split
from hightide.runtime.chunks.residency import Copy, Residency
from hightide.runtime.chunks.slot_table import SlotTable
from hightide.runtime.chunks.staging import Staging
from hightide.stores.array import Array
from hightide.stores.host_arena import HostArena
from hightide.stores.store import Accelerator, Region, Store

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STATE_DTYPE_BYTES}
GRAD_DTYPE = torch.float32
WRITTEN_WHILE_ABSENT = (
    "the parameter {name!r} was written to while its values were elsewhere; the write is lost. Use "
    "model.load_state_dict(), "
    "or change values before hightide.wrap or after hightide.unwrap"
)
OTHER_DATA = (
    "the parameter {name!r} was given other memory (`p.data = ...`, vector_to_parameters, swap_tensors), which "
    "hightide would not follow: its values live in chunks. Write values with model.load_state_dict(), or call "
    "hightide.unwrap(model) first"
)


class _Bound(NamedTuple):
    """A parameter at one of the places where its block finds it."""

    key: str
    param: nn.Parameter
    shown: type
    view: Tensor
    addresses: set[int]  # where its data may be before it is bound: there, or absent


class _Views(NamedTuple):
    """The parameters of a chunk, at one of its places."""

    bound: list[_Bound]
    # Those that are something else afterwards: with their class, what takes the place of their values (None: they
    # stay), and the class that refuses to be used (None: it may be, outside of its block).
    leaving: list[tuple[nn.Parameter, type, Tensor | None, type | None]]


class Chunks:
    """Where every chunk's bytes are. What is not at hand on the accelerator is an Array, of whatever store the plan
    says."""

    def __init__(
        self,
        profile: ModelProfile,
        placement: Placement,
        stores: Mapping[Tier, Store],
        parameters: Mapping[str, nn.Parameter],
    ):
        """Takes all the memory; `load` moves values in."""
        plan = placement.plan
        self.placed: tuple[ChunkPlace, ...] = placement.chunks  # by the number of the chunk
        self.specs: tuple[ChunkSpec, ...] = plan.layout.chunks
        gpu = stores[Tier.GPU]
        assert isinstance(gpu, Accelerator)
        self.gpu = gpu
        self.parameters = parameters

        self.shapes = {spec.name: spec.shape for spec in profile.params}
        self.by_block = [tuple(place.chunk.index for place in places) for places in placement.by_block]
        self._params_of_block = [frozenset(block.params) for block in profile.blocks]

        self.places = {entry.param: (spec.index, entry) for spec in self.specs for entry in spec.params}

        self.param_slots = SlotTable(plan.num_slots, [place.num_slots for place in self.placed])
        self.grad_slots = SlotTable(plan.num_grad_slots, [place.num_grad_slots for place in self.placed])
        self.slot_bytes = placement.buffer_bytes[Buffer.SLOT]
        self.grad_slot_bytes = placement.buffer_bytes[Buffer.GRAD_SLOT]
        pool_bytes, grad_pool_bytes = plan.num_slots * self.slot_bytes, plan.num_grad_slots * self.grad_slot_bytes
        self._slots = gpu.allocate(pool_bytes, "slots") if pool_bytes else None
        self._slots_address = 0
        self._grad_slots = gpu.allocate(grad_pool_bytes, "gradient slots") if grad_pool_bytes else None

        self._leaving, self._arriving, self._rounding = (
            Staging(gpu, gpu.allocate(num_bytes, "gradient staging")) if num_bytes else None
            for num_bytes in (placement.buffer_bytes[buffer] for buffer in STAGING)
        )

        host = stores[Tier.HOST]
        assert isinstance(host, HostArena)
        has_rings = placement.uses_disk or any(place.passes_ring for place in self.placed)
        self.disk = DiskHomes(placement, host) if has_rings else None  # before all others on the host
        self._host = host
        self._persistent: list[Array | None] = []  # parameters that stay on the accelerator
        self._homes: list[Array] = []
        self._grads: list[Array | None] = []
        self._parked: dict[int, Array] = {}  # gradients that wait for their update at no place of their own
        self._sums: list[Array | None] = []  # gradients that stay on the accelerator from pass to pass
        self._states: list[dict[StateSpec, Array]] = []
        self.at_hand: dict[int, UpdateArrays] = {}  # of the chunk that is updated now, if it is not at home
        for place in self.placed:
            self._allocate(place, stores)
        self.tables: dict[int, HostTable] = {}  # chunks that are looked up on the host
        for place in self.placed:
            if place.is_looked_up:
                sizes = buffer_bytes(profile, plan, place.chunk.block)
                self.tables[place.chunk.index] = self._table(place.chunk, stores, sizes)
        self.param_copies = [Copy(f"param {spec.index} on gpu") for spec in self.specs]
        self.grad_copies = [Copy(f"gradient {spec.index} on gpu") for spec in self.specs]
        self.home_copies = [Copy(f"param {spec.index} at home", Residency.CLEAN) for spec in self.specs]
        self.stale = [False] * len(self.specs)  # persistent on the GPU, but updated on host since
        dtypes = [{entry.param: parameters[entry.param].dtype for entry in spec.params} for spec in self.specs]
        self._nans = Nans(dtypes, gpu.device)
        self._absent = {name: nan.expand(parameters[name].shape) for name, nan in self._nans.everyone().items()}
        self._has_other_copy = [spec.has_master or self._lives_elsewhere(spec.index) for spec in self.specs]
        self.taken: list[str] = []  # parameters whose values have moved in
        self._versions: dict[str, int] = {}  # of parameters when they were last seen
        self._version_means_nothing: set[str] = set()
        self._ranges: dict[tuple[int, int | None], list[ParamRange]] = {}
        self._made: dict[tuple[int, int | None, int | None], _Views] = {}
        self._made_grads: dict[tuple[int, int | None], dict[str, Tensor]] = {}
        self._in_slots: dict[tuple[int, ChunkKind, int], Array] = {}
        self._classes: dict[str, type] = {name: type(param) for name, param in parameters.items()}
        loose = {block.index for block in profile.blocks if block.loose}
        self._loose = [spec.index for spec in self.specs if spec.block in loose]
        self._hidden = self._hiding_classes(loose)

    # -- places ---------------------------------------------------------------------------------------------------

    def home(self, chunk: int) -> Array:
        """The chunk's parameters where the update writes them."""
        return self._homes[chunk]

    def value(self, key: str) -> Array:
        """One parameter, at home."""
        chunk, entry = self.places[key]
        return self.part(self._homes[chunk], entry)

    def grad(self, chunk: int) -> Array:
        """The chunk's gradient where the update reads it."""
        home = self._grads[chunk] or self._parked.get(chunk)
        if home is None and self.disk is not None:
            home = self.disk.strays.get(chunk)
        return self._grad_in_slot(chunk) if home is None else home

    def park(self, chunk: int) -> None:
        """Takes the place at which the chunk's gradient waits for its update: not at the end of the host's memory where
        block inputs are, so that each is a stack and neither leaves holes that the other cannot use."""
        place = self.placed[chunk]
        if chunk not in self._parked:
            region = self._host.allocate_last(place.grad_bytes, "parked gradients")
            self._parked[chunk] = Array(self._host, region, DTYPES[place.grad_dtype], (place.chunk.trainable_numel,))

    def unpark(self, chunk: int) -> None:
        """Its gradient is used up, or for nobody: the place that it had, on the plan or off it, is free."""
        parked = self._parked.pop(chunk, None)
        if parked is not None:
            self._host.free(parked.region)
        if self.disk is not None:
            self.disk.close_stray(chunk)

    @property
    def parked(self) -> set[int]:
        """Chunks whose gradients have such a place now."""
        return {*self._parked} | ({*self.disk.strays} if self.disk is not None else set())

    def update_arrays(self, chunk: int) -> UpdateArrays:
        """What an update reads and writes: where it has been brought for it, or at home."""
        at_hand = self.at_hand.get(chunk)
        return UpdateArrays(self._homes[chunk], self.grad(chunk), self._states[chunk]) if at_hand is None else at_hand

    def states(self, chunk: int) -> dict[StateSpec, Array]:
        """All that updates keep of a chunk."""
        return self._states[chunk]

    def state_of(self, key: str, state: StateSpec) -> Array:
        """One array of what updates keep of a parameter that is optimised, in its shape in a state dict."""
        chunk, entry = self.places[key]
        start = entry.within(state.per_numel).start
        return self._states[chunk][state].part(start, state.shape(self.shapes[key], entry.numel))

    def states_of(self, key: str) -> list[Array]:
        return [self.state_of(key, state) for state in self.specs[self.places[key][0]].states]

    def part(self, array: Array, entry: ParamRange) -> Array:
        """One parameter's elements of a chunk's array."""
        return array.part(entry.offset_numel, self.shapes[entry.param])

    def _lives_elsewhere(self, chunk: int) -> bool:
        """Compute finds its parameters in a copy, which an update makes obsolete."""
        return self._homes[chunk] is not self._persistent[chunk]

    def param_on_gpu(self, chunk: int) -> Tensor:
        persistent = self._persistent[chunk]
        if persistent is not None:
            return persistent.view
        spec, slots = self.specs[chunk], self._slots
        first = self.param_slots.first(chunk)
        assert first is not None and slots is not None, f"chunk {chunk} is not on the GPU"
        return self._in_slot(
            chunk, ChunkKind.PARAM, slots, first * self.slot_bytes, DTYPES[spec.dtype], spec.numel
        ).view

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
        home.read(target).wait()
        return home.nbytes

    def grad_dtype(self, chunk: int) -> torch.dtype:
        """Of a gradient at home. Its sum on the GPU is fp32."""
        return DTYPES[self.placed[chunk].grad_dtype]

    def send_gradient(self, chunk: int, buffer: Array | None = None) -> int:
        """From its slot, or where it has stayed, home or into a buffer, on the d2h lane. Returns the bytes moved."""
        home, source = self.grad(chunk) if buffer is None else buffer, self.grad_on_gpu(chunk)
        if self._leaving is not None and self.placed[chunk].is_narrow:
            self._leaving.send(source, home)
        else:
            home.write(source).wait()
        return home.nbytes

    def bring_gradient(self, chunk: int, buffer: Array | None = None) -> int:
        """From home, or a buffer, into its slot, on the h2d lane. Returns the bytes moved."""
        home, target = self.grad(chunk) if buffer is None else buffer, self.grad_on_gpu(chunk)
        if self._arriving is not None and self.placed[chunk].is_narrow:
            self._arriving.bring(target, home)
        else:
            home.read(target).wait()
        return home.nbytes

    def round_gradient(self, chunk: int) -> None:
        """Where it is on the GPU, on the stream that computes."""
        if self._rounding is not None and (dtype := self.rounding_dtype(chunk)) is not None:
            self._rounding.round(self.grad_on_gpu(chunk), dtype)

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
        for chunk in self.param_slots.everyone():
            first = self.param_slots.first(chunk)
            assert first is not None
            offset = distance - first * self.slot_bytes
            if 0 <= offset < self.specs[chunk].param_bytes:
                return chunk, offset
        return None

    # -- parameters -----------------------------------------------------------------------------------------------

    def placements(self, chunk: int, block: int | None = None) -> list[ParamRange]:
        """The parameters of a chunk; with `block`, only those that this block uses."""
        if (chunk, block) not in self._ranges:
            self._ranges[chunk, block] = [
                entry
                for entry in self.specs[chunk].params
                if block is None or entry.param in self._params_of_block[block]
            ]
        return self._ranges[chunk, block]

    def view_of(self, flat: Tensor, entry: ParamRange) -> Tensor:
        return flat[entry.within()].view(self.shapes[entry.param])

    def bind(self, chunk: int, block: int | None = None) -> None:
        if (written := self._nans.written(chunk)) is not None:
            raise Refused(WRITTEN_WHILE_ABSENT.format(name=written))
        elsewhere, versions = self._has_other_copy[chunk], self._versions
        for key, param, shown, view, addresses in self._views(chunk, block).bound:
            param.__class__ = shown
            # Persistent parameters can be written in place, which is right only where nobody keeps another copy.
            version = param._version
            if versions.setdefault(key, version) != version and elsewhere and key not in self._version_means_nothing:
                versions[key] = version
                raise Refused(WRITTEN_WHILE_ABSENT.format(name=key))
            if param.data_ptr() not in addresses:
                self._refuse_other_data(key, view)
            param.data = view

    def _refuse_other_data(self, key: str, view: Tensor) -> None:
        """Somebody gave the parameter other memory (`p.data = ...`), unless it is still in another slot of ours."""
        if self.slot_offset(self.parameters[key].data) is None:
            self.parameters[key].data = view
            raise Refused(OTHER_DATA.format(name=key))

    def check_loose(self) -> None:
        """Parameters that nobody binds, because they are always there."""
        for chunk in self._loose:
            for bound in self._views(chunk, None).bound:
                if bound.param.data_ptr() not in bound.addresses:
                    self._refuse_other_data(bound.key, bound.view)

    def loose_params(self) -> list[Tensor]:
        """Of chunks that nobody binds."""
        return [self.param_on_gpu(chunk) for chunk in self._loose]

    def _views(self, chunk: int, block: int | None) -> _Views:
        """The parameters of a chunk where it is now. A slot is always at the same place, so they are made once."""
        place = (chunk, block, self.param_slots.first(chunk))
        made = self._made.get(place)
        if made is None:
            with torch.inference_mode(False):  # they outlive it
                made = self._made[place] = self._make_views(chunk, self.placements(chunk, block))
        return made

    def _make_views(self, chunk: int, entries: Sequence[ParamRange]) -> _Views:
        flat, made = self.param_on_gpu(chunk), _Views([], [])
        for entry in entries:
            key, param, view, absent = entry.param, self.parameters[entry.param], self.view_of(flat, entry), None
            addresses = {view.data_ptr(), self._absent[key].data_ptr()}
            made.bound.append(_Bound(key, param, self._classes[key], view, addresses))
            if self.placed[chunk].is_streamed:
                absent = self._absent[key]
            if absent is not None or key in self._hidden:
                made.leaving.append((param, self._classes[key], absent, self._hidden.get(key)))
        return made

    def ignore_version(self, key: str) -> None:
        """The code of its block makes the parameter's version grow without a write, which is not to be refused."""
        self._version_means_nothing.add(key)

    def writes(self, keys: Iterable[str]) -> dict[str, int]:
        """A number of each parameter that grows when somebody writes to it in place, which is right where its only copy
        is on the GPU."""
        return {key: self.parameters[key]._version for key in keys if key not in self._version_means_nothing}

    def go_on(self, before: Chunks) -> None:
        """With what is known of the parameters under the plan before."""
        self._version_means_nothing = before._version_means_nothing

    def store(self, key: str, value: Tensor) -> None:
        """New values for a parameter, wherever copies of it are; nothing may be under way with its chunk. A master copy
        that rounds to these very values stays: it knows more than they do."""
        master = self.master_of(key)
        self.value(key).put(value)
        if master is not None and not rounds_to(master, value):
            self._set_master(key, value)
        self._show_new_value(key)

    def show_new_values(self) -> None:
        """Somebody has written those of all parameters to their homes; nothing is under way."""
        for key in self.places:
            self._show_new_value(key)

    def _show_new_value(self, key: str) -> None:
        chunk, entry = self.places[key]
        self.stale[chunk] = self.placed[chunk].is_refreshed
        self.show(key)
        param = self.parameters[key]
        param.data = (
            self._absent[key] if self.placed[chunk].is_streamed else self.view_of(self.param_on_gpu(chunk), entry)
        )
        self._versions[key] = param._version
        self._hide(key)

    def unbind(self, chunk: int, block: int | None = None) -> None:
        for param, shown, absent, hidden in self._views(chunk, block).leaving:
            if absent is not None:
                param.__class__ = shown  # after an exception in `bind` it may not have been bound at all
                param.data = absent
            if hidden is not None:
                param.__class__ = hidden

    def show(self, key: str) -> None:
        """From now on the parameter is what it was before wrapping: somebody has bound it, or will."""
        self.parameters[key].__class__ = self._classes[key]

    def _hide(self, key: str) -> None:
        if key in self._hidden:
            self.parameters[key].__class__ = self._hidden[key]

    def is_hidden(self, key: str) -> bool:
        """Whether the parameter refuses to be used outside of its block."""
        return key in self._hidden

    def _hiding_classes(self, loose: set[int]) -> dict[str, type]:
        """For parameters whose values are not always on the GPU, or not always the newest there. Loose ones are."""
        names = {id(param): name for name, param in self.parameters.items()}
        kinds = {kind: absent_class(kind, names) for kind in set(self._classes.values())}
        hidden = [spec for spec in self.specs if self._lives_elsewhere(spec.index) and spec.block not in loose]
        return {entry.param: kinds[self._classes[entry.param]] for spec in hidden for entry in spec.params}

    def let_go(self) -> None:
        """Of the parameters: from now on somebody else binds them."""
        for key in self.parameters:
            self.show(key)
            self._make_absent(key)

    def take_hold(self) -> None:
        """Of the parameters, once the values are in their places. The GPU's memory may be another one than before."""
        if self._slots is not None:
            self._slots_address = self.gpu.view(self._slots, torch.uint8).data_ptr()
        self._made.clear()  # its addresses may be others now
        for spec in self.specs:
            if not self.placed[spec.index].is_streamed:
                self.bind(spec.index)
        for key in self.parameters:
            self._hide(key)

    def refresh(self, chunk: int) -> None:
        """Persistent parameters get the values of their home; nothing may be under way."""
        persistent = self._persistent[chunk]
        if persistent is not None and self._lives_elsewhere(chunk):
            persistent.put(self._homes[chunk].peek())
            self.stale[chunk] = False

    def close(self) -> None:
        """Lets go of the stores' memory, which an optimizer that is still around would otherwise hold through here."""
        self._made.clear()
        self._made_grads.clear()
        self._in_slots.clear()
        for table in self.tables.values():
            table.forget_views()
        if self.disk is not None:
            self.disk.forget_views()
        for array in (
            *self._persistent,
            *self._homes,
            *self._grads,
            *self._parked.values(),
            *self._sums,
            *chain.from_iterable(kept.values() for kept in self._states),
        ):
            if array is not None:
                array.forget_view()

    # -- set-up ---------------------------------------------------------------------------------------------------

    def _allocate(self, place: ChunkPlace, stores: Mapping[Tier, Store]) -> None:
        spec = place.chunk
        regions = {
            (kind, tier): stores[tier].allocate(num_bytes, _label(kind, tier))
            for (kind, tier), num_bytes in place.copies.items()
        }

        def array(kind: ChunkKind, tier: Tier, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> Array:
            return Array(stores[tier], regions[kind, tier], dtype, (numel,), offset_bytes)

        home = array(ChunkKind.PARAM, place.home, DTYPES[spec.dtype], spec.numel)
        self._homes.append(home)
        if place.is_streamed or place.params is place.home:
            self._persistent.append(None if place.is_streamed else home)
        else:
            self._persistent.append(array(ChunkKind.PARAM, place.params, DTYPES[spec.dtype], spec.numel))
        grad = None
        if place.grad is not None and not place.parks:
            dtype = DTYPES[place.grad_dtype] if place.leaves or place.is_looked_up else GRAD_DTYPE
            grad = array(ChunkKind.GRAD, place.grad, dtype, spec.trainable_numel)
        self._grads.append(grad)
        own = array(ChunkKind.GRAD, Tier.GPU, GRAD_DTYPE, spec.trainable_numel) if place.stays else None
        self._sums.append(own)
        offsets, numel = spec.state_offsets if spec.state_bytes else {}, spec.optimised_numel
        states = {
            state: array(ChunkKind.STATE, place.states, DTYPES[state.dtype], state.numel(numel), offset_bytes)
            for state, offset_bytes in offsets.items()
        }
        self._states.append(states)
        if self.disk is not None and (Tier.DISK in (place.home, place.states) or place.passes_ring):
            found = {ChunkKind.PARAM: home, ChunkKind.GRAD: grad}
            if states:
                found[ChunkKind.STATE] = array(ChunkKind.STATE, place.states, torch.uint8, spec.state_bytes)
            on_disk = {kind: one for kind, one in found.items() if one is not None and one.store.tier is Tier.DISK}
            self.disk.take(place, home, on_disk)

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
            _zero(home)
            for entry in spec.params:
                param, place = self.parameters[entry.param], self.part(home, entry)
                if entry.param in origins:
                    with place.opened(is_new=True) as target:
                        origins[entry.param].fill(target)
                elif not param.is_meta:
                    place.put(param.data)
                    freed_bytes += param.nbytes
                self._make_absent(entry.param)
                self.taken.append(entry.param)
                if freed_bytes >= RETURN_BYTES:
                    return_freed_memory()
                    freed_bytes = 0
            states = self._states[spec.index]  # they begin as zero, and a master as the parameter: no remainder
            for state in states.values():
                _zero(state)
            if begins and MASTER in states:
                states[MASTER].put(home.part(0, states[MASTER].shape).peek())
            self.refresh(spec.index)
            if not self.placed[spec.index].is_streamed:
                self.param_copies[spec.index].move(Residency.CLEAN)
        return_freed_memory()
        self.take_hold()

    def _make_absent(self, key: str) -> None:
        """A meta parameter refuses other data. Its contents are swapped, so that it stays the object that the optimizer
        knows."""
        param = self.parameters[key]
        if param.is_meta:
            torch.utils.swap_tensors(param, nn.Parameter(self._absent[key], requires_grad=param.requires_grad))
        else:
            param.data = self._absent[key]

    def master_of(self, key: str) -> Tensor | None:
        """The fp32 master copy of one parameter, in its shape and to be read; None where the parameter is its own. One
        in two parts is put together on the host: the GPU has no room for it."""
        if not self.has_own_master(key):
            return None
        if self.specs[self.places[key][0]].has_remainder:
            return join(self.value(key).peek().cpu(), self.state_of(key, REMAINDER).peek().cpu())
        return self.state_of(key, MASTER).peek()

    def has_own_master(self, key: str) -> bool:
        return self.specs[self.places[key][0]].has_master and self.has_room(key)

    def has_room(self, key: str) -> bool:
        """For states: it was optimised when the model was wrapped."""
        chunk, entry = self.places[key]
        return entry.offset_numel < self.specs[chunk].optimised_numel

    def _set_master(self, key: str, value: Tensor) -> None:
        if self.specs[self.places[key][0]].has_remainder:
            whole = value.to("cpu", torch.float32).contiguous()
            parts = torch.empty_like(whole, dtype=torch.bfloat16), torch.empty_like(whole, dtype=torch.int16)
            split(whole, *parts)
            self.value(key).put(parts[0])
            self.state_of(key, REMAINDER).put(parts[1])
        else:
            self.state_of(key, MASTER).put(value)

    def restore_master(self, key: str, saved: Tensor) -> bool:
        """Takes a saved master copy, if it is one of the parameter's present values."""
        value = self.value(key).peek()
        if not self.has_own_master(key) or saved.shape != value.shape or not rounds_to(saved, value):
            return False
        self._set_master(key, saved)
        return True


def rounds_to(master: Tensor, value: Tensor) -> bool:
    """Whether these are the values of which `master` is the exact original."""
    return torch.equal(master.to(value.dtype), value.to(master.device))  # on the master's: the GPU may have no room


def _label(kind: ChunkKind, tier: Tier) -> str:
    labels = {ChunkKind.PARAM: "parameters", ChunkKind.GRAD: "gradients", ChunkKind.STATE: "optimizer states"}
    return "persistent chunks" if (kind, tier) == (ChunkKind.PARAM, Tier.GPU) else labels[kind]


def _zero(fresh: Array) -> None:
    """Zeros written over zeros would make memory real before it is needed."""
    if not fresh.store.starts_zeroed:
        with fresh.opened(is_new=True) as values:
            values.zero_()
