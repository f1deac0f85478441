"""Waiting between a block's forward and its backward: kept graphs, and inputs on the GPU or on host.

[Note: kept graphs and slots] A graph that is kept saves views of the slot that its weights were in, and the slot holds
another block's weights by the time backward comes: wrong numbers, with no version error. So a saved tensor that lies
in a slot is packed as (chunk, offset, shape, stride) and unpacked from whatever slot holds the chunk in backward.
Hooks switch off autograd's own version check; ours replaces it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hightide.ir.refusal import Refused
from hightide.runtime.chunks.chunks import DTYPES, Chunks
from hightide.stores.store import Accelerator, Region, Store
from hightide.stores.ticket import Ticket

MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a block's "
    "input or saved "
    "tensor of shape {shape} changed after the block's forward"
)
FREED = (
    "Trying to backward through a block a second time: its saved inputs have been freed. "
    "hightide runs one backward per forward."
)


@dataclass(frozen=True)
class _InSlot:
    chunk: int
    offset_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _InInput:
    index: int
    offset: int  # in elements, from the input's first
    shape: torch.Size
    stride: tuple[int, ...]


def _extent(tensor: Tensor) -> int:
    """Elements of its storage from its first to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def outlive_slots(
    chunks: Chunks, away: Sequence[Tensor] = (), back: Callable[[], Sequence[Tensor]] = tuple
) -> saved_tensors_hooks:
    """Saved-tensor hooks for a graph that outlives the slots it was made in, and those of its inputs that wait on host
    (`away`, contiguous). `back` gives these again, in backward, and raises where backward is not the graph's own."""
    places = [(tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.numel()) for tensor in away]

    def pack(tensor: Tensor) -> _InSlot | _InInput | tuple[Tensor, int]:
        place = chunks.slot_offset(tensor)
        if place is not None:
            chunk, offset_bytes = place
            return _InSlot(chunk, offset_bytes, tensor.dtype, tensor.shape, tensor.stride())
        for index, (storage, start, numel) in enumerate(places):
            offset = int(tensor.storage_offset()) - start
            if tensor.untyped_storage().data_ptr() == storage and offset >= 0 and offset + _extent(tensor) <= numel:
                return _InInput(index, offset, tensor.shape, tensor.stride())
        return tensor.detach(), tensor._version  # detached: an output that its own node holds would never die

    def unpack(packed: _InSlot | _InInput | tuple[Tensor, int]) -> Tensor:
        inputs = back()
        if isinstance(packed, _InSlot):
            flat = chunks.param_on_gpu(packed.chunk)
            assert flat.dtype == packed.dtype == DTYPES[chunks.specs[packed.chunk].dtype]
            start = flat.storage_offset() + packed.offset_bytes // flat.element_size()
            return flat.as_strided(packed.shape, packed.stride, start)
        if isinstance(packed, _InInput):
            whole = inputs[packed.index].detach()
            return whole.as_strided(packed.shape, packed.stride, whole.storage_offset() + packed.offset)
        tensor, version = packed
        if tensor._version != version:
            raise Refused(MODIFIED.format(shape=tuple(tensor.shape)))
        return tensor

    return saved_tensors_hooks(pack, unpack)


class _Orphan(NamedTuple):
    """What a graph that died with copies under way has left."""

    tensor: Tensor
    leaving: Tensor | None
    on_the_way: list[Ticket]


class _Entry:
    """One stashed tensor, shared by all calls that received it. On the GPU until let go, and again once it is back."""

    def __init__(self, tensor: Tensor, host: Store, orphans: deque[_Orphan]) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.region: Region | None = None
        self.num_users = 0
        self.ordered_back = False  # the tensor here is a new one, and a lane may be writing it
        self.on_the_way: list[Ticket] = []  # lanes' copies, asked for by any call that shares the tensor
        self.leaving: Tensor | None = None  # what the lane reads: the tensor, or a contiguous copy of it
        self._host, self._orphans = host, orphans

    def checked(self) -> Tensor:
        assert self.tensor is not None
        if self.tensor._version != self.version:
            raise Refused(MODIFIED.format(shape=tuple(self.shape)))
        return self.tensor

    def __del__(self) -> None:  # a graph that is dropped without backward gives its host memory back too
        if self.tensor is not None and self.on_the_way:  # a lane may still be reading or writing it
            self._orphans.append(_Orphan(self.tensor, self.leaving, self.on_the_way))
        if self.region is not None:
            self._host.free_later(self.region)


class Stash:
    """The inputs of one call that wait for backward on host. Belongs to the call's autograd context."""

    def __init__(self, entries: list[_Entry]) -> None:
        self.entries = entries
        self.consumed = False


class Stashes:
    """Block inputs on host. Memory on the GPU is taken and given back in the user's thread, where everything is
    allocated; the lanes only copy. A tensor is let go when compute has waited for its copy to host, so that nothing
    overwrites it."""

    def __init__(self, gpu: Accelerator, host: Store) -> None:
        self._gpu = gpu
        self._host = host
        self._by_call: dict[int, Stash] = {}
        self._shared: dict[tuple[int, int, torch.Size, int], _Entry] = {}
        self._orphans: deque[_Orphan] = deque()

    def begin_pass(self) -> None:
        """Forgets the last pass. What a live graph still needs stays reachable from its autograd context."""
        self._by_call.clear()
        self._shared.clear()
        while self._orphans:
            for ticket in self._orphans[0].on_the_way:
                ticket.join()
            self._orphans.popleft()

    def register(self, call: int, tensors: list[Tensor]) -> Stash:
        entries = []
        for tensor in tensors:
            key = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.shape, tensor._version)
            entry = self._shared.get(key)
            if entry is None or entry.tensor is not tensor:
                entry = self._shared[key] = _Entry(tensor, self._host, self._orphans)
            entry.num_users += 1
            entries.append(entry)
        stash = self._by_call[call] = Stash(entries)
        return stash

    def of(self, call: int) -> Stash | None:
        return self._by_call.get(call)

    def prepare_store(self, stash: Stash) -> Callable[[], int]:
        """Away from the GPU. Returns the lane's work, which returns the bytes that it moved."""
        leaving = []
        for entry in stash.entries:
            if entry.tensor is not None and entry.region is None:
                entry.leaving = entry.tensor.detach().contiguous()
                num_bytes = entry.leaving.numel() * entry.leaving.element_size()
                entry.region = self._host.allocate(num_bytes, "block inputs")
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
            if entry.tensor is not None and entry.region is not None and not entry.ordered_back:
                entry.checked()
                entry.tensor = entry.leaving = None

    def prepare_restore(self, stash: Stash) -> Callable[[], int]:
        """Back to the GPU. Returns the lane's work."""
        arriving = []
        for entry in stash.entries:
            if entry.tensor is None:
                assert entry.region is not None
                entry.tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self._gpu.device)
                self._gpu.adopt(entry.tensor, "block inputs")
                entry.version, entry.ordered_back = entry.tensor._version, True
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
        return [entry.checked() for entry in stash.entries]

    def release(self, stash: Stash) -> None:
        """After backward the GPU copy goes; host memory is reused once no other call shares the tensor."""
        for entry in stash.entries:
            entry.num_users -= 1
            if entry.region is not None or entry.num_users == 0:
                entry.tensor = entry.leaving = None
        stash.entries = []
