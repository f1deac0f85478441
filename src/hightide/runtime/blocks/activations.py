"""Waiting between a block's forward and its backward: inputs, and what the block has computed and holds, tensor by
tensor, on the GPU or on host.

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
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hightide.ir.refusal import Refused
from hightide.runtime.chunks.chunks import Chunks
from hightide.stores.store import Accelerator, Region, Store
from hightide.stores.ticket import Ticket

HELD_ALIGN_BYTES = 64  # what is held begins at a multiple of this, so that it can be read as any type

MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a block's input "
    "or saved tensor of shape {shape} changed after the block's forward"
)
FREED = (
    "Trying to backward through a block a second time: its saved inputs have been freed. "
    "hightide runs one backward per forward."
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
    chunk: int
    offset_bytes: int
    form: _Form


class _InInput(NamedTuple):
    number: int  # of the inputs that wait on host
    offset_bytes: int  # from the input's first byte
    form: _Form


def _range(tensor: Tensor) -> tuple[int, int]:
    """The first byte that it reads of its storage, and the one behind the last."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return first, first
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (1 + reach) * tensor.element_size()


def _address(tensor: Tensor) -> int | None:
    """Of its storage. None: it has none of its own (sparse tensors, and those that wrap others)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


class Held:
    """One tensor that backward will read, perhaps more than once. On the GPU, unless it has left. It lives as long as
    the graph needs it."""

    __slots__ = ("__weakref__", "_away", "_is_changed", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        """Of a graph the tensor must not be part: an output that its own node holds would never die."""
        self.tensor: Tensor | None = tensor
        self._version = tensor._version
        self._is_changed = False
        self._away: tuple[_Entry, _Form, int] | None = None  # where it is found, and its place there, in bytes

    def leave(self, entry: _Entry, offset_bytes: int) -> None:
        assert self.tensor is not None
        self._away = entry, _Form.of(self.tensor), offset_bytes

    def forget(self) -> None:
        """What has left is gone from here."""
        self._note_change()
        self.tensor = None

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


class Holding:
    """Takes what one call holds. `staying`: tensors whose storages stay where they are."""

    def __init__(self, device: torch.device | None = None, staying: Iterable[Tensor] = ()) -> None:
        """`device`: where that is which may leave; None: nothing leaves."""
        self._device = device
        self._staying = {_address(tensor) for tensor in staying}
        self._leaving: list[weakref.ref[Held]] = []  # a graph that dies takes what it holds with it

    def __call__(self, tensor: Tensor) -> Held:
        held = Held(tensor)
        if self._may_leave(tensor):
            self._leaving.append(weakref.ref(held))
        return held

    def leaving(self) -> list[Held]:
        """What graphs still need, and nobody has written to."""
        found = (one() for one in self._leaving)
        return [held for held in found if held is not None and not held.is_changed]

    def _may_leave(self, tensor: Tensor) -> bool:
        if tensor.device != self._device or type(tensor) is not Tensor or tensor.numel() <= 1:
            return False
        address = _address(tensor)
        return address is not None and address not in self._staying


def outlive_slots(
    chunks: Chunks,
    hold: Callable[[Tensor], Held],
    away: Sequence[Tensor] = (),
    back: Callable[[], Callable[[], Sequence[Tensor]]] = lambda: tuple,
) -> saved_tensors_hooks:
    """Saved-tensor hooks for a graph that outlives the slots it was made in, and those of its inputs that wait on host
    (`away`, without gaps in memory). `back` gives what gives these again, in backward, and raises where backward is not
    the graph's own."""
    places = [(_address(tensor), *_range(tensor)) for tensor in away]

    def pack(tensor: Tensor) -> _InSlot | _InInput | Held:
        if (address := _address(tensor)) is None:
            return hold(tensor.detach())
        place = chunks.slot_offset(tensor)
        if place is not None:
            return _InSlot(*place, _Form.of(tensor))
        for index, (storage, begin, end) in enumerate(places):
            if address == storage:
                first, last = _range(tensor)
                if begin <= first and last <= end:
                    return _InInput(index, first - begin, _Form.of(tensor))
        return hold(tensor.detach())

    def unpack(packed: _InSlot | _InInput | Held) -> Tensor:
        inputs = back()
        if isinstance(packed, _InSlot):
            return packed.form.on(chunks.param_on_gpu(packed.chunk), packed.offset_bytes)
        if isinstance(packed, _InInput):
            return packed.form.on(inputs()[packed.number].detach(), packed.offset_bytes)
        tensor = packed.get()
        if tensor is None:
            raise Refused(MODIFIED.format(shape=packed.shape))
        return tensor

    return saved_tensors_hooks(pack, unpack)


class _Orphan(NamedTuple):
    """What a graph that died with copies under way has left."""

    tensor: Tensor
    leaving: Tensor | None
    on_the_way: list[Ticket]


class _Entry:
    """One stashed tensor, shared by all calls that received it; or the bytes of tensors that one call holds. On the GPU
    until let go, and again once it is back."""

    def __init__(self, tensor: Tensor, host: Store, orphans: deque[_Orphan], held: Sequence[Held] = ()) -> None:
        """`held`: what is made of the bytes of `tensor`. They own this, and not the other way round."""
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.region: Region | None = None
        self.num_users = 0
        self.is_held, self._num_unread = bool(held), len(held)
        self._held = [weakref.ref(one) for one in held]
        self.is_wanted = False  # it must not go any more: backward is near. A lane may be writing it
        self.on_the_way: list[Ticket] = []  # lanes' copies, asked for by any call that shares the tensor
        self.leaving: Tensor | None = None  # what the lane reads: the tensor, or a contiguous copy of it
        self._host, self._orphans = host, orphans

    def checked(self) -> Tensor:
        assert self.tensor is not None
        if self.tensor._version != self.version:
            raise Refused(MODIFIED.format(shape=tuple(self.shape)))
        return self.tensor

    def read(self) -> Tensor:
        """By one of those that are held."""
        assert self.tensor is not None
        tensor, self._num_unread = self.tensor, self._num_unread - 1
        if not self._num_unread:
            self.tensor = self.leaving = None
        return tensor

    def let_go(self) -> None:
        self.checked()
        self.tensor = self.leaving = None
        for one in self._held:
            if (held := one()) is not None:
                held.forget()

    @property
    def label(self) -> str:
        return "activations" if self.is_held else "block inputs"

    def __del__(self) -> None:  # a graph that is dropped without backward gives its host memory back too
        if self.tensor is not None and self.on_the_way:  # a lane may still be reading or writing it
            self._orphans.append(_Orphan(self.tensor, self.leaving, self.on_the_way))
        if self.region is not None:
            self._host.free_later(self.region)


class Stash:
    """What of one call waits for backward on host. Belongs to the call's autograd context."""

    def __init__(self, entries: list[_Entry]) -> None:
        self.entries = entries
        self.consumed = False


class Stashes:
    """What waits on host. Memory on the GPU is taken and given back in the user's thread, where everything is
    allocated; the lanes only copy. A tensor is let go when compute has waited for its copy to host, so that nothing
    overwrites it."""

    def __init__(self, gpu: Accelerator, host: Store) -> None:
        self._gpu = gpu
        self._host = host
        self._by_call: dict[int, Stash] = {}
        # Weak: after the last backward that needs it, the host memory of an entry is free. Not a weak dict: the code
        # that it runs when an entry dies could swallow a Ctrl-C.
        self._shared: dict[tuple[int, int, torch.Size, int], weakref.ref[_Entry]] = {}
        self._orphans: deque[_Orphan] = deque()

    def begin_pass(self) -> None:
        """Forgets the last pass. What a live graph still needs stays reachable from its autograd context."""
        self._by_call.clear()
        self._shared.clear()
        self._bury_orphans()

    def _bury_orphans(self) -> None:
        while self._orphans:
            for ticket in self._orphans[0].on_the_way:
                ticket.join()
            self._orphans.popleft()

    def register(self, call: int, tensors: list[Tensor], held: Sequence[Held] = ()) -> Stash:
        """`tensors`: inputs of the call; `held`: what it has computed, as it lies in memory."""
        self._bury_orphans()  # those that the pass before has left when it was given up
        entries = self._ranges(held)
        for tensor in tensors:
            key = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.shape, tensor._version)
            known = self._shared.get(key)
            entry = None if known is None else known()
            if entry is None or entry.tensor is not tensor:
                entry = _Entry(tensor, self._host, self._orphans)
                self._shared[key] = weakref.ref(entry)
            entry.num_users += 1
            entries.append(entry)
        stash = self._by_call[call] = Stash(entries)
        return stash

    def _ranges(self, held: Sequence[Held]) -> list[_Entry]:
        """One for each storage, from the first byte that is held to the last. See [Note: what leaves]."""
        by_storage: dict[int | None, list[tuple[int, int, Held, Tensor]]] = defaultdict(list)
        for one in held:
            assert one.tensor is not None
            by_storage[_address(one.tensor)].append((*_range(one.tensor), one, one.tensor))
        entries = []
        for parts in by_storage.values():
            first = min(part[0] for part in parts) // HELD_ALIGN_BYTES * HELD_ALIGN_BYTES
            last = max(part[1] for part in parts)
            tensor = parts[0][3]
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            flat.set_(tensor.untyped_storage(), first, (last - first,), (1,))
            entry = _Entry(flat, self._host, self._orphans, [one for _, _, one, _ in parts])
            entry.num_users = 1
            for begin, _, one, _ in parts:
                one.leave(entry, begin - first)
            entries.append(entry)
        return entries

    def of(self, call: int) -> Stash | None:
        return self._by_call.get(call)

    def prepare_store(self, stash: Stash) -> Callable[[], int]:
        """Away from the GPU. Returns the lane's work, which returns the bytes that it moved."""
        leaving = []
        for entry in stash.entries:
            if entry.tensor is not None and entry.region is None:
                entry.leaving = entry.tensor.detach().contiguous()
                num_bytes = entry.leaving.numel() * entry.leaving.element_size()
                entry.region = self._host.allocate(num_bytes, entry.label)
                leaving.append((entry.leaving, entry.region))

        def store() -> int:
            for tensor, region in leaving:
                self._host.write(region, tensor).wait()
            return sum(region.num_bytes for _, region in leaving)

        return store

    def is_moved_by(self, stash: Stash, ticket: Ticket) -> None:
        """The lane's copy, there or back. Whoever uses one of the tensors waits for it, also for another call's
        sake."""
        for entry in stash.entries:
            entry.on_the_way.append(ticket)

    def let_go(self, stash: Stash) -> None:
        """Compute has waited for the copies to host: the GPU's memory may be used again."""
        for entry in stash.entries:
            if entry.tensor is not None and entry.region is not None and not entry.is_wanted:
                entry.let_go()

    def prepare_restore(self, stash: Stash) -> Callable[[], int]:
        """Back to the GPU. Returns the lane's work. What has not gone yet stays."""
        arriving = []
        for entry in stash.entries:
            entry.is_wanted = True
            if entry.tensor is None:
                assert entry.region is not None
                entry.tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self._gpu.device)
                self._gpu.adopt(entry.tensor, entry.label)
                entry.version = entry.tensor._version
                arriving.append((entry.tensor.detach(), entry.region))

        def restore() -> int:
            for tensor, region in arriving:
                self._host.read(region, tensor.data).wait()  # .data: what the lane writes is no change to autograd
            return sum(region.num_bytes for _, region in arriving)

        return restore

    def consume(self, stash: Stash) -> list[Tensor]:
        """The tensors of a stash, for its one backward. What no lane has brought back is brought back now."""
        if stash.consumed:
            raise Refused(FREED)
        for entry in stash.entries:
            for ticket in entry.on_the_way:
                ticket.join()
            entry.on_the_way.clear()
        self.prepare_restore(stash)()
        stash.consumed = True
        return [entry.checked() for entry in stash.entries if not entry.is_held]

    def release(self, stash: Stash) -> None:
        """After backward the GPU copy goes; host memory is reused once no other call shares the tensor."""
        for entry in stash.entries:
            entry.num_users -= 1
            if entry.region is not None or entry.num_users == 0:
                entry.tensor = entry.leaving = None
        stash.entries = []
