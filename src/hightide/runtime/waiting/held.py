"""Tensors that one call of a block has computed and holds for its backward, and its inputs that stay on the GPU.

[Note: kept graphs and slots] A graph that is kept saves views of the slot that its weights were in, and the slot holds
another block's weights by the time backward comes: wrong numbers, with no version error. So a saved tensor that lies
in a slot is packed as (chunk, offset, shape, stride) and unpacked from whatever slot holds the chunk in backward.
Hooks switch off autograd's own version check; ours replaces it.

[Note: what leaves] A tensor that is held leaves with its bytes as they lie in memory, so that views, strides and types
are as they were, and two views of one storage leave once. What belongs to somebody else stays where it is: parameters,
buffers, and inputs, which go their own way. In backward, a tensor's memory is free when its last reader is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hightide.ir.refusal import Refused
from hightide.runtime.chunks.chunks import Chunks

if TYPE_CHECKING:
    from hightide.runtime.waiting.activations import StashedTensor

MOST_VIEWS = 4096  # of slots: parts of weights whose sizes follow from data could be any number
MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a block's input "
    "or saved tensor of shape {shape} changed after the block's forward"
)


class _Form(NamedTuple):
    """How a tensor reads memory. Bits that say that it reads it conjugated, or negated, are in no byte."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())

    def on(self, memory: Tensor, offset_bytes: int) -> Tensor:
        """`offset_bytes`: from the first byte of `memory`."""
        start_bytes = int(memory.storage_offset()) * memory.element_size() + offset_bytes
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        tensor = empty.set_(memory.untyped_storage(), start_bytes // self.dtype.itemsize, self.shape, self.stride)
        tensor = tensor.conj() if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor


class _InSlot(NamedTuple):
    place: tuple[int, int]  # a chunk, and the offset in it, in bytes
    form: _Form


class _InInput(NamedTuple):
    number: int  # of the inputs that wait on host
    offset_bytes: int  # from the input's first byte
    form: _Form


def range_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte that it reads of its storage, and the one behind the last."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return first, first
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (1 + reach) * tensor.element_size()


def address_of(tensor: Tensor) -> int | None:
    """Of its storage. None: it has none of its own (sparse tensors, and those that wrap others)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


class Held:
    """One tensor that backward will read, perhaps more than once. On the GPU, unless it has left. It lives as long as
    the graph needs it."""

    __slots__ = ("__weakref__", "_aliases", "_away", "_is_changed", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        """Of a graph the tensor must not be part: an output that its own node holds would never die."""
        self.tensor: Tensor | None = tensor
        self._version = tensor._version
        self._is_changed = False
        self._aliases: list[tuple[Tensor, int]] = []  # with their versions
        self._away: tuple[StashedTensor, _Form, int] | None = None  # where it is found, and its place there, in bytes

    def leave(self, entry: StashedTensor, offset_bytes: int) -> None:
        assert self.tensor is not None
        self._away = entry, _Form.of(self.tensor), offset_bytes

    def forget(self) -> None:
        """What has left is gone from here."""
        self._note_change()
        self.tensor = None
        self._aliases.clear()

    def watch(self, alias: Tensor) -> None:
        """The same memory under a version of its own: who writes to one does not change the other's."""
        self._aliases.append((alias, alias._version))

    def spoil(self) -> None:
        """Somebody writes to it in a way that no version tells."""
        self._is_changed = True

    @property
    def is_leaving(self) -> bool:
        """Or has left."""
        return self._away is not None

    @property
    def is_changed(self) -> bool:
        """Somebody has written to it."""
        self._note_change()
        return self._is_changed

    @property
    def shape(self) -> tuple[int, ...]:
        if self._away is not None:
            return tuple(self._away[1].shape)
        assert self.tensor is not None
        return tuple(self.tensor.shape)

    def get(self) -> Tensor | None:
        """None: somebody has written to it since."""
        tensor = self.tensor
        is_plain = tensor is not None and self._away is None and not self._aliases and not self._is_changed
        if is_plain and tensor._version == self._version:  # type: ignore[union-attr]
            return tensor
        if self.is_changed:
            return None
        if self._away is not None:
            entry, form, offset_bytes = self._away
            self._away = None
            memory = entry.read()
            if self.tensor is None:
                self.tensor = form.on(memory, offset_bytes)
                self._version = self.tensor._version
        return self.tensor

    def _note_change(self) -> None:
        self._is_changed |= self.tensor is not None and self.tensor._version != self._version
        if self._aliases:
            self._is_changed |= any(alias._version != version for alias, version in self._aliases)


class Holding:
    """Takes what one call holds. `staying`: tensors whose storages stay where they are."""

    def __init__(self, device: torch.device | None = None, staying: Iterable[Tensor] = ()) -> None:
        """`device`: where that is which may leave; None: nothing leaves."""
        self._device = device
        self._staying = {address_of(tensor) for tensor in staying}
        self._held: list[weakref.ref[Held]] = []  # a graph that dies takes what it holds with it
        self._leaving: list[weakref.ref[Held]] = []

    def __call__(self, tensor: Tensor) -> Held:
        held = Held(tensor)
        one = weakref.ref(held)
        self._held.append(one)
        if self._device is not None and _may_leave(tensor, self._device, self._staying):
            self._leaving.append(one)
        return held

    def others(self, device: torch.device, staying: Container[int | None]) -> list[Held]:
        """What could leave all the same. `staying`: addresses of storages."""
        found = (one() for one in self._held)
        there = [held for held in found if held is not None and not held.is_leaving and not held.is_changed]
        return [held for held in there if held.tensor is not None and _may_leave(held.tensor, device, staying)]

    def forget_staying(self) -> None:
        """All have left that are to leave by the plan."""
        self._device, self._staying = None, set()
        self._leaving.clear()

    def leaving(self) -> list[Held]:
        """What graphs still need, and nobody has written to."""
        found = (one() for one in self._leaving)
        return [held for held in found if held is not None and not held.is_changed]


def _may_leave(tensor: Tensor, device: torch.device, staying: Container[int | None]) -> bool:
    if tensor.device != device or type(tensor) is not Tensor or tensor.numel() <= 1:
        return False
    address = address_of(tensor)
    return address is not None and address not in staying


class GraphOwner(Protocol):
    """The call to which a graph belongs."""

    is_running: bool  # its forward, or its backward

    def away_now(self) -> Sequence[Tensor]:
        """Of its inputs, those that wait on host."""


def outlive_slots(
    chunks: Chunks,
    hold: Callable[[Tensor], Held],
    away: Sequence[Tensor],
    owner: weakref.ref[GraphOwner],
    taken_out: Callable[[], Exception],
) -> saved_tensors_hooks:
    """Saved-tensor hooks for a graph that outlives the slots it was made in, and those of its inputs that wait on host
    (`away`, without gaps in memory). `taken_out`: what is raised where backward is not that of the call, its `owner`.
    What a graph saves most of slots are parameters: how these are packed, and what is unpacked, is made once."""
    places = [(address_of(tensor), *range_of(tensor)) for tensor in away]
    slot_offset, first_slot, (begin, end) = chunks.slot_offset, chunks.param_slots.first, chunks.around_slots
    packed_parameters, unpacked = chunks.packed_parameters, chunks.unpacked

    def pack(tensor: Tensor) -> _InSlot | _InInput | Held:
        try:
            address = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # it has none of its own
            return hold(tensor.detach())
        if begin <= address < end and (place := slot_offset(tensor)) is not None:
            return (
                pack_parameter(tensor, place) if id(tensor) in packed_parameters else _InSlot(place, _Form.of(tensor))
            )
        return pack_input(tensor, address) if places else hold(tensor.detach())

    def pack_parameter(param: Tensor, place: tuple[int, int]) -> _InSlot:
        packed: _InSlot | None = packed_parameters[id(param)]
        if packed is None or packed.place != place or packed.form[1:3] != (param.shape, param.stride()):
            packed = packed_parameters[id(param)] = _InSlot(place, _Form.of(param))
        return packed

    def pack_input(tensor: Tensor, address: int) -> _InInput | Held:
        for index, (storage, begin, end) in enumerate(places):
            if address == storage:
                first, last = range_of(tensor)
                if begin <= first and last <= end:
                    return _InInput(index, first - begin, _Form.of(tensor))
        return hold(tensor.detach())

    def unpack(packed: _InSlot | _InInput | Held) -> Tensor:
        call = owner()
        if call is None or not call.is_running:
            raise taken_out()
        if isinstance(packed, Held):
            tensor = packed.get()
            if tensor is None:
                raise Refused(MODIFIED.format(shape=packed.shape))
            return tensor
        if isinstance(packed, _InInput):
            return packed.form.on(call.away_now()[packed.number].detach(), packed.offset_bytes)
        key = (first_slot(packed.place[0]), packed)
        view = unpacked.get(key)
        return make_view(key) if view is None else view

    def make_view(key: tuple[int | None, _InSlot]) -> Tensor:
        chunk, offset_bytes = key[1].place
        if len(unpacked) >= MOST_VIEWS:
            unpacked.clear()
        with torch.inference_mode(False):  # it outlives it
            view = unpacked[key] = key[1].form.on(chunks.param_on_gpu(chunk), offset_bytes)
        return view

    return saved_tensors_hooks(pack, unpack)


class InputsOnGpu:
    """Inputs of a call that wait for its backward on the GPU. In the place of autograd, which would not let go of one
    before its backward."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._versions = [tensor._version for tensor in tensors]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self | None:
        """None: autograd has to save them. Somebody has a say in that, or it refuses them."""
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        return None if has_hooks or any(tensor.is_inference() for tensor in tensors) else cls(tensors)

    def keep_only(self, which: Sequence[bool]) -> None:
        self.tensors = [tensor for tensor, stays in zip(self.tensors, which, strict=True) if stays]
        self._versions = [version for version, stays in zip(self._versions, which, strict=True) if stays]

    def checked(self) -> list[Tensor]:
        for tensor, version in zip(self.tensors, self._versions, strict=True):
            if tensor._version != version:
                raise Refused(MODIFIED.format(shape=tuple(tensor.shape)))
        return self.tensors
