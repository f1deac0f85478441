"""The bytes of all chunks: homes on host, persistent places and slots on the GPU, and the parameters that are bound
to them.

[Note: absent parameters] A parameter that is not in use is a NaN scalar expanded to its shape: shapes stay true, and
reads and writes raise, see [Note: reading absent parameters]. (What goes round that reads NaN, and writes raise: one
to a single element, which torch lets pass, when its block is next used.) While its block is held, `param.data` is a
view of the slot. Persistent parameters that are updated on host raise too: they may be older than their last update.
Nothing is stored on the parameter itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hightide.ir.block import ModelProfile
from hightide.ir.chunk import ChunkSpec, ParamRange
from hightide.ir.plan import Plan
from hightide.ir.refusal import Refused
from hightide.ir.state_spec import MASTER, REMAINDER, STATE_DTYPE_BYTES, StateSpec
from hightide.ir.tier import ChunkKind, Tier
from hightide.machine import return_freed_memory
from hightide.planner.placement import STAGING, Buffer, ChunkPlace, Placement
from hightide.progress import tell
from hightide.runtime.absent import absent_class
from hightide.runtime.origin import Origin
from hightide.runtime.remainder import join, split
from hightide.runtime.residency import Copy, Residency
from hightide.runtime.slots import SlotTable
from hightide.runtime.staging import Staging
from hightide.stores.base import Accelerator, Region, Store
from hightide.stores.host import HostArena

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STATE_DTYPE_BYTES}
GRAD_DTYPE = torch.float32
_LABELS = {ChunkKind.PARAM: "parameters", ChunkKind.GRAD: "gradients", ChunkKind.STATE: "optimizer states"}
RETURN_BYTES = 2**27  # of originals, while a model is loaded: as much of it may exist twice
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


class Chunks:
    """Where every chunk's bytes are, on every tier."""

    def __init__(
        self,
        profile: ModelProfile,
        plan: Plan,
        gpu: Accelerator,
        host: HostArena,
        parameters: Mapping[str, nn.Parameter],
    ):
        """Takes all the memory; `load` moves values in."""
        placement = Placement(plan)
        self.placed: tuple[ChunkPlace, ...] = placement.chunks  # by the number of the chunk
        self.specs: tuple[ChunkSpec, ...] = plan.layout.chunks
        self.gpu, self.host = gpu, host
        self._stores: Mapping[Tier, Store] = {Tier.GPU: gpu, Tier.HOST: host}
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

        self._regions: dict[tuple[int, ChunkKind, Tier], Region] = {}
        for spec in self.specs:
            self._allocate(spec)
        self.param_copies = [Copy(f"param {spec.index} on gpu") for spec in self.specs]
        self.grad_copies = [Copy(f"gradient {spec.index} on gpu") for spec in self.specs]
        self.homes = [Copy(f"param {spec.index} at home", Residency.CLEAN) for spec in self.specs]
        self.stale = [False] * len(self.specs)  # persistent on the GPU, but updated on host since
        self._scalars = {
            name: torch.full((), math.nan, dtype=param.dtype, device=gpu.device) for name, param in parameters.items()
        }
        self._absent = {name: self._scalars[name].expand(param.shape) for name, param in parameters.items()}
        self.taken: list[str] = []  # parameters whose values have moved in
        self._versions: dict[str, int] = {}  # of parameters when they were last seen
        self._version_means_nothing: set[str] = set()
        self._placed: dict[tuple[int, int | None], list[ParamRange]] = {}
        self._made: dict[tuple[int, int | None, int | None], list[tuple[str, Tensor, set[int]]]] = {}
        self._made_grads: dict[tuple[int, int | None], dict[str, Tensor]] = {}
        self._flats: dict[tuple[Tier, int, torch.dtype, int, int], Tensor] = {}
        self._classes: dict[str, type] = {name: type(param) for name, param in parameters.items()}
        loose = {block.index for block in profile.blocks if block.loose}
        self._loose = [spec.index for spec in self.specs if spec.block in loose]
        self._hidden = self._hiding_classes(loose)

    # -- places ---------------------------------------------------------------------------------------------------

    def home(self, chunk: int) -> Tensor:
        """The chunk's parameters where the update writes them."""
        return self.flat(chunk, ChunkKind.PARAM, self.placed[chunk].home)

    def flat(self, chunk: int, kind: ChunkKind, tier: Tier) -> Tensor:
        """A chunk's parameters or gradient, flat, at their fixed place on a tier."""
        spec = self.specs[chunk]
        store, region = self._stores[tier], self._regions[chunk, kind, tier]
        if kind is ChunkKind.PARAM:
            return self._at(store, region, DTYPES[spec.dtype], 0, spec.numel)
        assert kind is ChunkKind.GRAD, "states are several arrays"
        dtype = GRAD_DTYPE if tier is Tier.GPU else self.grad_dtype(chunk)
        return self._at(store, region, dtype, 0, spec.trainable_numel)

    def state(self, chunk: int, state: StateSpec) -> Tensor:
        """One array of what updates keep of a chunk, flat."""
        spec, tier = self.specs[chunk], self.placed[chunk].states
        region, offset = self._regions[chunk, ChunkKind.STATE, tier], spec.state_offsets[state]
        return self._at(self._stores[tier], region, DTYPES[state.dtype], offset, state.numel(spec.optimised_numel))

    def _at(self, store: Store, region: Region, dtype: torch.dtype, offset_bytes: int, numel: int) -> Tensor:
        """A view of a place that never moves: made once."""
        place = (store.tier, region.offset, dtype, offset_bytes, numel)
        view = self._flats.get(place)
        if view is None:
            with torch.inference_mode(False):  # it outlives it
                view = self._flats[place] = store.view(region, dtype, offset_bytes, numel)
        return view

    def region(self, chunk: int, kind: ChunkKind, tier: Tier) -> Region:
        return self._regions[chunk, kind, tier]

    def param_on_gpu(self, chunk: int) -> Tensor:
        spec = self.specs[chunk]
        if not self.placed[chunk].is_streamed:
            return self.flat(chunk, ChunkKind.PARAM, Tier.GPU)
        first = self.param_slots.first(chunk)
        assert first is not None and self._slots is not None, f"chunk {chunk} is not on the GPU"
        return self._at(self.gpu, self._slots, DTYPES[spec.dtype], first * self.slot_bytes, spec.numel)

    def grad_on_gpu(self, chunk: int) -> Tensor:
        spec = self.specs[chunk]
        if not self.placed[chunk].in_grad_slot:
            return self.flat(chunk, ChunkKind.GRAD, Tier.GPU)
        first = self.grad_slots.first(chunk)
        assert first is not None and self._grad_slots is not None, f"the gradient of chunk {chunk} is not on the GPU"
        return self._at(self.gpu, self._grad_slots, GRAD_DTYPE, first * self.grad_slot_bytes, spec.trainable_numel)

    def grad_views(self, chunk: int) -> dict[str, Tensor]:
        """The gradients of a chunk's parameters where it is on the GPU now. There are few such places: made once."""
        place = (chunk, self.grad_slots.first(chunk))
        if place not in self._made_grads:
            flat, spec = self.grad_on_gpu(chunk), self.specs[chunk]
            with torch.inference_mode(False):  # they outlive it
                self._made_grads[place] = {
                    entry.param: self.view_of(flat, entry)
                    for entry in spec.params
                    if entry.offset_numel < spec.trainable_numel
                }
        return self._made_grads[place]

    # -- gradients on their way -----------------------------------------------------------------------------------

    def grad_dtype(self, chunk: int) -> torch.dtype:
        """Of a finished gradient. Its sum on the GPU is fp32."""
        return DTYPES[self.placed[chunk].grad_dtype]

    def send_gradient(self, chunk: int) -> int:
        """From its slot home, on the d2h lane. Returns the bytes moved."""
        region, source = self.region(chunk, ChunkKind.GRAD, Tier.HOST), self.grad_on_gpu(chunk)
        if self._leaving is not None and self.placed[chunk].rounds:
            self._leaving.send(source, self.grad_dtype(chunk), self.host, region)
        else:
            self.host.write(region, source).wait()
        return self.placed[chunk].grad_bytes

    def bring_gradient(self, chunk: int) -> int:
        """From home into its slot, on the h2d lane. Returns the bytes moved."""
        region, target = self.region(chunk, ChunkKind.GRAD, Tier.HOST), self.grad_on_gpu(chunk)
        if self._arriving is not None and self.placed[chunk].rounds:
            self._arriving.bring(target, self.grad_dtype(chunk), self.host, region)
        else:
            self.host.read(region, target).wait()
        return self.placed[chunk].grad_bytes

    def round_gradient(self, chunk: int) -> None:
        """Where it is on the GPU, on the stream that computes."""
        if self._rounding is not None and self.placed[chunk].rounds:
            self._rounding.round(self.grad_on_gpu(chunk), self.grad_dtype(chunk))

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
        if (chunk, block) not in self._placed:
            self._placed[chunk, block] = [
                entry
                for entry in self.specs[chunk].params
                if block is None or entry.param in self._params_of_block[block]
            ]
        return self._placed[chunk, block]

    def view_of(self, flat: Tensor, entry: ParamRange) -> Tensor:
        return flat[entry.within()].view(self.shapes[entry.param])

    def state_of(self, key: str, state: StateSpec) -> Tensor:
        """One array of what updates keep of a parameter that is optimised, in its shape in a state dict."""
        chunk, entry = self.places[key]
        flat = self.state(chunk, state)[entry.within(state.per_numel)]
        return flat.view(state.shape(self.shapes[key], entry.numel))

    def bind(self, chunk: int, block: int | None = None) -> None:
        on_cpu = self.gpu.device.type == "cpu"
        for key, view, addresses in self._views(chunk, block):
            if on_cpu and not math.isnan(self._scalars[key].item()):  # no sync on a GPU
                self._scalars[key].fill_(math.nan)
                raise Refused(WRITTEN_WHILE_ABSENT.format(name=key))
            self.show(key)
            self._check_unwritten(chunk, key)
            if self.parameters[key].data_ptr() not in addresses:
                self._refuse_other_data(key, view)
            self.parameters[key].data = view

    def _refuse_other_data(self, key: str, view: Tensor) -> None:
        """Somebody gave the parameter other memory (`p.data = ...`), unless it is still in another slot of ours."""
        if self.slot_offset(self.parameters[key].data) is None:
            self.parameters[key].data = view
            raise Refused(OTHER_DATA.format(name=key))

    def check_loose(self) -> None:
        """Parameters that nobody binds, because they are always there."""
        for chunk in self._loose:
            for key, view, addresses in self._views(chunk, None):
                if self.parameters[key].data_ptr() not in addresses:
                    self._refuse_other_data(key, view)

    def _views(self, chunk: int, block: int | None) -> list[tuple[str, Tensor, set[int]]]:
        """The parameters of a chunk where it is now. A slot is always at the same place, so they are made once."""
        place = (chunk, block, self.param_slots.first(chunk) if self.placed[chunk].is_streamed else None)
        if place not in self._made:
            entries = self.placements(chunk, block)
            with torch.inference_mode(False):  # they outlive it
                flat = self.param_on_gpu(chunk)
                views = [(entry.param, self.view_of(flat, entry)) for entry in entries]
            self._made[place] = [(key, view, {view.data_ptr(), self._absent[key].data_ptr()}) for key, view in views]
        return self._made[place]

    def _check_unwritten(self, chunk: int, key: str) -> None:
        """Persistent parameters can be written in place, which is right only where nobody keeps another copy."""
        if key in self._version_means_nothing:
            return
        version = self.parameters[key]._version
        elsewhere = self.specs[chunk].has_master or self.placed[chunk].home is not Tier.GPU
        if self._versions.setdefault(key, version) != version and elsewhere:
            self._versions[key] = version
            raise Refused(WRITTEN_WHILE_ABSENT.format(name=key))

    def ignore_version(self, key: str) -> None:
        """The code of its block makes the parameter's version grow without a write, which is not to be refused."""
        self._version_means_nothing.add(key)

    def go_on(self, before: Chunks) -> None:
        """With what is known of the parameters under the plan before."""
        self._version_means_nothing = before._version_means_nothing

    def store(self, key: str, value: Tensor) -> None:
        """New values for a parameter, wherever copies of it are; nothing may be under way with its chunk. A master copy
        that rounds to these very values stays: it knows more than they do."""
        chunk, entry = self.places[key]
        master = self.master_of(key)
        self.view_of(self.home(chunk), entry).copy_(value)
        if master is not None and not rounds_to(master, value):
            self._set_master(key, value)
        place = self.placed[chunk]
        self.stale[chunk] = place.is_refreshed
        self.show(key)
        param = self.parameters[key]
        param.data = self._absent[key] if place.is_streamed else self.view_of(self.param_on_gpu(chunk), entry)
        self._versions[key] = param._version
        self._hide(key)

    def unbind(self, chunk: int, block: int | None = None) -> None:
        streamed = self.placed[chunk].is_streamed
        for entry in self.placements(chunk, block):
            if streamed:
                self.show(entry.param)  # after an exception in `bind` it may not have been bound at all
                self.parameters[entry.param].data = self._absent[entry.param]
            self._hide(entry.param)

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
        places = (place for place in self.placed if place.home is not Tier.GPU)
        hidden = [place.chunk for place in places if place.chunk.block not in loose]
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
        for spec in self.specs:
            if not self.placed[spec.index].is_streamed:
                self.bind(spec.index)
        for key in self.parameters:
            self._hide(key)

    def refresh(self, chunk: int) -> None:
        """Persistent parameters whose home is on host get its values; nothing may be under way."""
        if self.placed[chunk].is_refreshed:
            self.flat(chunk, ChunkKind.PARAM, Tier.GPU).copy_(self.home(chunk))
            self.stale[chunk] = False

    def close(self) -> None:
        """Lets go of the stores' memory, which an optimizer that is still around would otherwise hold through here."""
        self._made.clear()
        self._made_grads.clear()
        self._flats.clear()

    # -- set-up ---------------------------------------------------------------------------------------------------

    def _allocate(self, spec: ChunkSpec) -> None:
        for (kind, tier), num_bytes in self.placed[spec.index].copies.items():
            label = "persistent chunks" if (kind, tier) == (ChunkKind.PARAM, Tier.GPU) else _LABELS[kind]
            self._regions[spec.index, kind, tier] = self._stores[tier].allocate(num_bytes, label)

    def load(self, origins: Mapping[str, Origin], begins: bool = True) -> None:
        """Moves the model's values into the chunks, one chunk at a time: the originals are freed on the way. Values
        that are somewhere else are read straight into their places, and those that do not exist yet are zero. Unless
        training `begins` with them, somebody else fills the states."""
        freed_bytes = 0
        for number, spec in enumerate(self.specs):
            tell("moving values to their places", f"chunk {number + 1} of {len(self.specs)}")
            home = self.home(spec.index)
            _zero(self._stores[self.placed[spec.index].home], home)
            for entry in spec.params:
                if entry.param in origins:
                    origins[entry.param].fill(self.view_of(home, entry))
                elif not self.parameters[entry.param].is_meta:
                    self.view_of(home, entry).copy_(self.parameters[entry.param].data)
            for entry in spec.params:
                self._make_absent(entry.param)
                self.taken.append(entry.param)
            self._clear_states(spec)  # moments are zero, and a master begins as the parameter: without a remainder
            if begins and MASTER in spec.states and spec.optimised_numel:
                self.state(spec.index, MASTER).copy_(home[: spec.optimised_numel])
            self.refresh(spec.index)
            if not self.placed[spec.index].is_streamed:
                self.param_copies[spec.index].move(Residency.CLEAN)
            freed_bytes += spec.param_bytes
            if freed_bytes >= RETURN_BYTES or spec is self.specs[-1]:
                return_freed_memory()
                freed_bytes = 0
        self.take_hold()

    def _clear_states(self, spec: ChunkSpec) -> None:
        tier = self.placed[spec.index].states
        if (region := self._regions.get((spec.index, ChunkKind.STATE, tier))) is not None:
            store = self._stores[tier]
            _zero(store, store.view(region, torch.uint8))

    def _make_absent(self, key: str) -> None:
        """A meta parameter refuses other data. Its contents are swapped, so that it stays the object that the optimizer
        knows."""
        param = self.parameters[key]
        if param.is_meta:
            torch.utils.swap_tensors(param, nn.Parameter(self._absent[key], requires_grad=param.requires_grad))
        else:
            param.data = self._absent[key]

    def states(self, chunk: int) -> list[Tensor]:
        """All that updates keep of a chunk, as flat arrays."""
        spec = self.specs[chunk]
        return [self.state(chunk, state) for state in spec.states] if spec.optimised_numel else []

    def states_of(self, key: str) -> list[Tensor]:
        """Of one parameter that is optimised."""
        return [self.state_of(key, state) for state in self.specs[self.places[key][0]].states]

    def remainder(self, chunk: int) -> Tensor | None:
        """What the parameters lack of their masters, if they are bf16; see [Note: masters in two parts]."""
        return self.state(chunk, REMAINDER) if self.specs[chunk].has_remainder else None

    def master(self, chunk: int) -> Tensor | None:
        """What the update works on, fp32: the home itself, or the master copy. None: it is in two parts."""
        spec = self.specs[chunk]
        if spec.has_remainder:
            return None
        if not spec.has_master:
            return self.home(chunk)[: spec.optimised_numel]
        return self.state(chunk, MASTER)

    def master_of(self, key: str) -> Tensor | None:
        """The fp32 master copy of one parameter, in its shape and to be read; None where the parameter is its own. One
        in two parts is put together on the host: the GPU has no room for it."""
        if not self._has_own_master(key):
            return None
        chunk, entry = self.places[key]
        if self.specs[chunk].has_remainder:
            return join(self.view_of(self.home(chunk), entry).cpu(), self.state_of(key, REMAINDER).cpu())
        return self.state_of(key, MASTER)

    def _has_own_master(self, key: str) -> bool:
        chunk, entry = self.places[key]
        spec = self.specs[chunk]
        return spec.has_master and entry.offset_numel < spec.optimised_numel

    def _set_master(self, key: str, value: Tensor) -> None:
        chunk, entry = self.places[key]
        if (remainder := self.remainder(chunk)) is not None:
            whole = value.to("cpu", torch.float32).contiguous()
            parts = torch.empty_like(whole, dtype=torch.bfloat16), torch.empty_like(whole, dtype=torch.int16)
            split(whole, *parts)
            for part, place in zip(parts, (self.home(chunk), remainder), strict=True):
                self.view_of(place, entry).copy_(part)
        else:
            self.state_of(key, MASTER).copy_(value)

    def restore_master(self, key: str, saved: Tensor) -> bool:
        """Takes a saved master copy, if it is one of the parameter's present values."""
        chunk, entry = self.places[key]
        value = self.view_of(self.home(chunk), entry)
        if not self._has_own_master(key) or saved.shape != value.shape or not rounds_to(saved, value):
            return False
        self._set_master(key, saved)
        return True


def rounds_to(master: Tensor, value: Tensor) -> bool:
    """Whether these are the values of which `master` is the exact original."""
    return torch.equal(master.to(value.dtype), value.to(master.device))  # on the master's: the GPU may have no room


def _zero(store: Store, fresh: Tensor) -> None:
    """Zeros written over zeros would make memory real before it is needed."""
    if not store.starts_zeroed:
        fresh.zero_()
