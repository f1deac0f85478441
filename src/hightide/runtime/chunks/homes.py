"""The places that chunks have for themselves, in the stores of all tiers: the homes of parameters, gradients and
states, and what stays on the accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from hightide.ir.block import ModelProfile
from hightide.ir.chunk import ChunkSpec, ParamRange
from hightide.ir.state_spec import MASTER, REMAINDER, STATE_DTYPE_BYTES, StateSpec
from hightide.ir.tier import ChunkKind, Tier
from hightide.planner import disk_inputs
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.placement import Placement
from hightide.runtime.chunks.disk_homes import DiskHomes
from hightide.runtime.chunks.remainder import join, split
from hightide.stores.array import Array
from hightide.stores.host_arena import HostArena
from hightide.stores.store import Store

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STATE_DTYPE_BYTES}
GRAD_DTYPE = torch.float32


class Homes:
    """Everything here is an Array, of whatever store the plan says."""

    def __init__(
        self, profile: ModelProfile, placement: Placement, stores: Mapping[Tier, Store], own_shard: int = 0
    ) -> None:
        self.placed: tuple[ChunkPlace, ...] = placement.chunks  # by the number of the chunk
        self.specs: tuple[ChunkSpec, ...] = placement.plan.layout.chunks
        self.shapes = {spec.name: spec.shape for spec in profile.params}
        self._block_names = [block.name for block in profile.blocks]
        self.places = {entry.param: (spec.index, entry) for spec in self.specs for entry in spec.params}
        self._own_shard, self.num_shards = own_shard, (num_shards := placement.plan.num_shards)
        self.answers = True  # of groups of ranks with a copy each, the first does
        # What this rank has of each chunk, see [Note: shards] in planner/chunk_places.py: often the chunk itself.
        self.shards = tuple(
            place.chunk.shard(own_shard, num_shards) if place.is_cut else place.chunk for place in self.placed
        )
        # Which elements of the chunk these are; of one that is whole on all ranks those that it answers for.
        self.own = tuple(spec.own_ranges(own_shard, num_shards) for spec in self.specs)
        self._own_entries = {entry.param: entry for shard in self.shards for entry in shard.params}
        host = stores[Tier.HOST]
        assert isinstance(host, HostArena)
        input_bytes = disk_inputs.buffer_bytes(profile, placement.plan)
        has_rings = placement.uses_disk or input_bytes > 0 or any(place.passes_ring for place in self.placed)
        self.disk = DiskHomes(placement, host, input_bytes) if has_rings else None  # before all others on the host
        self._host = host
        self._persistent: list[Array | None] = []  # parameters that stay on the accelerator
        self._homes: list[Array] = []
        self._grads: list[Array | None] = []
        self._parked: dict[int, Array] = {}  # gradients that wait for their update at no place of their own
        self._sums: list[Array | None] = []  # gradients that stay on the accelerator from pass to pass
        self._states: list[dict[StateSpec, Array]] = []
        for place in self.placed:
            self._allocate(place, stores)

    def _allocate(self, place: ChunkPlace, stores: Mapping[Tier, Store]) -> None:
        spec, shard = place.chunk, self.shards[place.chunk.index]
        regions = {
            (kind, tier): stores[tier].allocate(num_bytes, self._label(place.chunk, kind, tier))
            for (kind, tier), num_bytes in place.copies.items()
        }

        def array(kind: ChunkKind, tier: Tier, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> Array:
            return Array(stores[tier], regions[kind, tier], dtype, (numel,), offset_bytes)

        is_whole = place.params is place.home and not place.is_streamed
        home = array(ChunkKind.PARAM, place.home, DTYPES[spec.dtype], (spec if is_whole else shard).numel)
        self._homes.append(home)
        if place.is_streamed or place.params is place.home:
            self._persistent.append(None if place.is_streamed else home)
        else:
            self._persistent.append(array(ChunkKind.PARAM, place.params, DTYPES[spec.dtype], spec.numel))
        own = array(ChunkKind.GRAD, Tier.GPU, GRAD_DTYPE, spec.trainable_numel) if place.stays else None
        self._sums.append(own)
        grad = own if place.sums_wait_on_gpu else None
        if place.grad is not None and not place.parks and grad is None:
            is_narrow = place.leaves or place.is_looked_up or place.is_rounded_home
            dtype = DTYPES[place.grad_dtype] if is_narrow else GRAD_DTYPE
            grad = array(ChunkKind.GRAD, place.grad, dtype, shard.trainable_numel)
        self._grads.append(grad)
        offsets, numel = shard.state_offsets if shard.state_bytes else {}, shard.optimised_numel
        states = {
            state: array(ChunkKind.STATE, place.states, DTYPES[state.dtype], state.numel(numel), offset_bytes)
            for state, offset_bytes in offsets.items()
        }
        self._states.append(states)
        if self.disk is not None:
            found = {ChunkKind.PARAM: home, ChunkKind.GRAD: grad}
            if states:
                found[ChunkKind.STATE] = array(ChunkKind.STATE, place.states, torch.uint8, shard.state_bytes)
            on_disk = {kind: one for kind, one in found.items() if one is not None and not one.is_memory}
            if on_disk or place.has_states_on_disk or place.passes_ring:
                self.disk.take(place, home, on_disk)

    def _label(self, chunk: ChunkSpec, kind: ChunkKind, tier: Tier) -> str:
        """Errors of a disk say by it which values are lost. What is in memory is added up by it."""
        labels = {ChunkKind.PARAM: "parameters", ChunkKind.GRAD: "gradients", ChunkKind.STATE: "optimizer states"}
        if tier is Tier.DISK:
            return f"{labels[kind]} of {self._block_names[chunk.block]} (chunk {chunk.index})"
        return "persistent chunks" if (kind, tier) == (ChunkKind.PARAM, Tier.GPU) else labels[kind]

    def home(self, chunk: int) -> Array:
        """The chunk's parameters where the update writes them."""
        return self._homes[chunk]

    def value(self, key: str) -> Array:
        """One parameter, at home, which is not in shards."""
        chunk, entry = self.places[key]
        assert self.has_whole_home(chunk), f"{key!r} lies in shards"
        return self.part(self._homes[chunk], entry)

    def is_cut(self, chunk: int) -> bool:
        """Of several ranks each updates a shard of it."""
        return self.placed[chunk].is_cut

    def has_whole_home(self, chunk: int) -> bool:
        """All its parameters are at home here."""
        return self._homes[chunk] is self._persistent[chunk] or not self.is_cut(chunk)

    def own_entry(self, key: str) -> ParamRange | None:
        """Of a parameter, what lies in this rank's shard of its chunk, and where; None: nothing."""
        return self._own_entries.get(key)

    def own_value(self, key: str) -> Array | None:
        """The elements of a parameter that this rank has at home, in one dimension."""
        chunk, entry = self.places[key]
        own: ParamRange | None = entry
        if not self.has_whole_home(chunk):
            own = self.own_entry(key)
        return None if own is None else self._homes[chunk].part(own.offset_numel, (own.numel,))

    def home_range(self, key: str) -> range:
        """Which elements of a parameter this rank has at home: all, or those of its shard."""
        return self._range(key, self.has_whole_home(self.places[key][0]))

    def updated_range(self, key: str) -> range:
        """Of which it has the states."""
        return self._range(key, not self.is_cut(self.places[key][0]))

    def _range(self, key: str, is_whole: bool) -> range:
        own = self.places[key][1] if is_whole else self.own_entry(key)
        return range(0) if own is None else range(own.start_numel, own.start_numel + own.numel)

    def saved_entries(self, chunk: int, is_whole: bool) -> Sequence[ParamRange]:
        """The elements of a chunk that this rank hands to a checkpoint, where they lie in an array of the whole chunk
        or of its shard. Each element is handed out by one rank, also if several have it."""
        spec = self.specs[chunk]
        if not self.answers:
            return ()
        if self.num_shards == 1:
            return spec.params
        entries = spec.shard(self._own_shard, self.num_shards).params
        if not is_whole:
            return entries
        return [replace(one, offset_numel=self.places[one.param][1].offset_numel + one.start_numel) for one in entries]

    def own_pieces(self, chunk: int, num_sections: int = 3) -> list[tuple[int, slice]]:
        """Where each piece of its shard begins there, and where it lies in the chunk."""
        pieces, start = [], 0
        for own in self.own[chunk][:num_sections]:
            if own:
                pieces.append((start, slice(own.start, own.stop)))
            start += len(own)
        return pieces

    def park(self, chunk: int) -> None:
        """Takes the place at which the chunk's gradient waits for its update: not at the end of the host's memory where
        block inputs are, so that each is a stack and neither leaves holes that the other cannot use."""
        place = self.placed[chunk]
        if chunk not in self._parked:
            region = self._host.allocate_last(place.grad_bytes, "parked gradients")
            self._parked[chunk] = Array(self._host, region, DTYPES[place.grad_dtype], (place.shard.trainable_numel,))

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

    def states(self, chunk: int) -> dict[StateSpec, Array]:
        """All that updates keep of a chunk."""
        return self._states[chunk]

    def state_of(self, key: str, state: StateSpec) -> Array:
        """One array of what updates keep of a parameter that is optimised, in its shape in a state dict."""
        chunk, entry = self.places[key]
        start = entry.within(state.per_numel).start
        return self._states[chunk][state].part(start, state.shape(self.shapes[key], entry.numel))

    def own_state(self, key: str, state: StateSpec) -> Array | None:
        """Of the elements that this rank updates, in one dimension."""
        chunk, _ = self.places[key]
        own = self.own_entry(key)
        if own is None:
            return None
        at = own.within(state.per_numel)
        return self._states[chunk][state].part(at.start, (at.stop - at.start,))

    def put_state(self, key: str, state: StateSpec, value: Tensor) -> None:
        """Of one array of what updates keep of a parameter, what has its home here."""
        chunk, _ = self.places[key]
        if not self.is_cut(chunk):
            self.state_of(key, state).put(value)
        elif (own := self.own_entry(key)) is not None:
            place = self._state_of_own(key, state)
            start = own.start_numel // state.per_numel
            place.put(value.reshape(-1)[start : start + place.shape[0]])

    def states_of(self, key: str) -> list[Array]:
        return [self.state_of(key, state) for state in self.specs[self.places[key][0]].states]

    def part(self, array: Array, entry: ParamRange) -> Array:
        """One parameter's elements of a chunk's array."""
        return array.part(entry.offset_numel, self.shapes[entry.param])

    def grad_home(self, chunk: int) -> Array | None:
        """The chunk's gradient where the update reads it. None: in its slot."""
        home = self._grads[chunk] or self._parked.get(chunk)
        return self.disk.strays.get(chunk) if home is None and self.disk is not None else home

    def lives_elsewhere(self, chunk: int) -> bool:
        """Compute finds its parameters in a copy, which an update makes obsolete."""
        return self._homes[chunk] is not self._persistent[chunk]

    def close(self) -> None:
        """Lets go of the stores' memory, which an optimizer that is still around would otherwise hold through here."""
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

    # -- master copies --------------------------------------------------------------------------------------------

    def master_of(self, key: str) -> Tensor | None:
        """The fp32 master copy of one parameter, in its shape and to be read; None where the parameter is its own. One
        in two parts is put together on the host: the GPU has no room for it."""
        assert not self.is_cut(self.places[key][0]), f"the master of {key!r} lies in shards"
        return self.own_master(key)

    def own_master(self, key: str) -> Tensor | None:
        """Of the elements that this rank updates: all, or so many in one dimension."""
        if not self.has_own_master(key) or (value := self._updated_value(key)) is None:
            return None
        if self.specs[self.places[key][0]].has_remainder:
            return join(value.peek().cpu(), self._state_of_own(key, REMAINDER).peek().cpu())
        return self._state_of_own(key, MASTER).peek()

    def _updated_value(self, key: str) -> Array | None:
        """Its elements at home that this rank updates: all, or, in one dimension, its part of them."""
        chunk, entry = self.places[key]
        if not self.is_cut(chunk):
            return self.value(key)
        own = self.own_entry(key)
        if own is None:
            return None
        if not self.has_whole_home(chunk):
            return self.own_value(key)
        return self._homes[chunk].part(entry.offset_numel + own.start_numel, (own.numel,))

    def _state_of_own(self, key: str, state: StateSpec) -> Array:
        """Their states."""
        found = self.own_state(key, state) if self.is_cut(self.places[key][0]) else self.state_of(key, state)
        assert found is not None
        return found

    def own_elements(self, key: str, value: Tensor) -> Tensor:
        """Of a whole parameter, those that this rank updates."""
        if not self.is_cut(self.places[key][0]):
            return value
        own = self._own_entries[key]
        return value.reshape(-1)[own.start_numel : own.start_numel + own.numel]

    def has_own_master(self, key: str) -> bool:
        return self.specs[self.places[key][0]].has_master and self.has_room(key)

    def has_room(self, key: str) -> bool:
        """For states: it was optimised when the model was wrapped."""
        chunk, entry = self.places[key]
        return entry.offset_numel < self.specs[chunk].optimised_numel

    def put_value(self, key: str, value: Tensor) -> None:
        """Of a whole parameter what has its home here. A master copy that rounds to these very values stays: it knows
        more than they do."""
        chunk, _ = self.places[key]
        master = self.own_master(key)
        if self.has_whole_home(chunk):
            self.value(key).put(value)
        elif (place := self.own_value(key)) is not None:
            place.put(self.own_elements(key, value))
        if master is not None and not rounds_to(master, own := self.own_elements(key, value)):
            self._set_own_master(key, own)

    def _set_own_master(self, key: str, value: Tensor) -> None:
        if self.specs[self.places[key][0]].has_remainder:
            whole = value.to("cpu", torch.float32).contiguous()
            parts = torch.empty_like(whole, dtype=torch.bfloat16), torch.empty_like(whole, dtype=torch.int16)
            split(whole, *parts)
            place = self._updated_value(key)
            assert place is not None
            place.put(parts[0])
            self._state_of_own(key, REMAINDER).put(parts[1])
        else:
            self._state_of_own(key, MASTER).put(value)

    def fits_master(self, key: str, saved: Tensor) -> bool:
        """Whether a saved master copy is one of the parameter's present values: of those that this rank updates."""
        if not self.has_own_master(key) or tuple(saved.shape) != tuple(self.shapes[key]):
            return False
        value = self._updated_value(key)
        return value is None or rounds_to(self.own_elements(key, saved), value.peek())

    def restore_master(self, key: str, saved: Tensor | None = None) -> None:
        """One that fits; None: the parameter itself becomes its master."""
        value = self._updated_value(key) if self.has_own_master(key) else None
        if value is not None:
            self._set_own_master(key, value.get().float() if saved is None else self.own_elements(key, saved))


def rounds_to(master: Tensor, value: Tensor) -> bool:
    """Whether these are the values of which `master` is the exact original."""
    return torch.equal(master.to(value.dtype), value.to(master.device))  # on the master's: the GPU may have no room


def write_zeros(fresh: Array) -> None:
    """Zeros written over zeros would make memory real before it is needed."""
    if not fresh.store.starts_zeroed:
        with fresh.opened(is_new=True) as values:
            values.zero_()
