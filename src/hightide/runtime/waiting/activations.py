"""Waiting on the host between a block's forward and its backward: inputs, and what the block holds (`held.py`).

[Note: memory of what is swapped] STASH and UNSTASH copy on the d2h and h2d lanes. Memory of the host comes out of the
arena, which is pinned as a whole, so a steady loop allocates none. Memory of the GPU is taken and given back in the
user's thread only: it is let go when compute has waited for the copy, so torch's allocator never hands out what a lane
still reads, and `record_stream` is not needed. A graph that dies with copies under way leaves its memory to the next
pass (`_Orphan`). What comes back has new memory that nobody else reads: Inductor may write over it. Of the last two
calls nothing goes away: their backward is near when the copy is done. Nor does what calls hold that no plan foresaw.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hightide.ir.refusal import Refused
from hightide.runtime.waiting.held import MODIFIED, Held, address_of, range_of
from hightide.runtime.waiting.inputs_on_disk import InputsOnDisk, Parcel
from hightide.stores.store import Accelerator, Region, Store
from hightide.stores.ticket import Ticket

HELD_ALIGN_BYTES = 64  # what is held begins at a multiple of this, so that it can be read as any type
FREED = (
    "Trying to backward through a block a second time: its saved inputs have been freed. hightide runs one backward "
    "per forward, also with retain_graph=True. Add up losses before one backward(), (loss1 + loss2).backward(); for a "
    "gradient beside that of backward(), such as torch.autograd.grad(loss, inputs), call the model once more; inputs "
    "that require gradients have theirs in .grad after backward()"
)


class _Orphan(NamedTuple):
    """What a graph that died with copies under way has left."""

    tensor: Tensor
    leaving: Tensor | None
    on_the_way: list[Ticket]


class StashedTensor:
    """One stashed tensor, shared by all calls that received it; or the bytes of tensors that one call holds. On the GPU
    until let go, and again once it is back."""

    def __init__(self, tensor: Tensor, host: Store, orphans: deque[_Orphan], held: Sequence[Held] = ()) -> None:
        """`held`: what is made of the bytes of `tensor`. They own this, and not the other way round."""
        # Without its graph, in which the call is that owns this: Python finds no circle that runs through autograd.
        self.tensor: Tensor | None = tensor.detach()
        self._of = weakref.ref(tensor)
        self.version = tensor._version
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.region: Region | None = None  # on the host
        self.is_in_parcel = False  # or among the inputs of its call that go to disk
        self.num_users = 0
        self.is_held, self._num_unread = bool(held), len(held)
        self._held = [weakref.ref(one) for one in held]
        self.is_wanted = False  # it must not go any more: backward is near. A lane may be writing it
        self.on_the_way: list[Ticket] = []  # lanes' copies, asked for by any call that shares the tensor
        self.leaving: Tensor | None = None  # what the lane reads: the tensor, or a contiguous copy of it
        self._host, self._orphans = host, orphans

    def is_of(self, tensor: Tensor) -> bool:
        return self.tensor is not None and self._of() is tensor

    @property
    def is_away(self) -> bool:
        return self.region is not None or self.is_in_parcel

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
    """What of one call waits for backward on host, or on disk. Belongs to the call's autograd context."""

    def __init__(self, entries: list[StashedTensor], parcel: Parcel | None = None) -> None:
        self.entries = entries
        self.parcel = parcel  # None: it waits on the host
        self.consumed = False


class Stashes:
    """What waits on host. Memory on the GPU is taken and given back in the user's thread, where everything is
    allocated; the lanes only copy. A tensor is let go when compute has waited for its copy to host, so that nothing
    overwrites it."""

    def __init__(self, gpu: Accelerator, host: Store, disk: InputsOnDisk | None = None) -> None:
        self._gpu = gpu
        self._host, self._disk = host, disk
        self._by_call: dict[int, Stash] = {}
        # Weak: after the last backward that needs it, the host memory of an entry is free. Not a weak dict: the code
        # that it runs when an entry dies could swallow a Ctrl-C.
        self._shared: dict[tuple[int, int, torch.Size, int], weakref.ref[StashedTensor]] = {}
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

    def register(self, call: int, tensors: list[Tensor], held: Sequence[Held] = (), on_disk: bool = False) -> Stash:
        """`tensors`: inputs of the call; `held`: what it has computed, as it lies in memory. `on_disk`: where
        each call has its own copy of what it shares with others."""
        self._bury_orphans()  # those that the pass before has left when it was given up
        if on_disk:
            stash = self._by_call[call] = Stash([self._own(tensor) for tensor in tensors], Parcel(call))
            return stash
        entries = self._ranges(held)
        for tensor in tensors:
            key = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.shape, tensor._version)
            known = self._shared.get(key)
            entry = None if known is None else known()
            if entry is None or not entry.is_of(tensor):
                entry = StashedTensor(tensor, self._host, self._orphans)
                self._shared[key] = weakref.ref(entry)
            entry.num_users += 1
            entries.append(entry)
        stash = self._by_call[call] = Stash(entries)
        return stash

    def _own(self, tensor: Tensor) -> StashedTensor:
        entry = StashedTensor(tensor, self._host, self._orphans)
        entry.num_users = 1
        return entry

    def _ranges(self, held: Sequence[Held]) -> list[StashedTensor]:
        """One for each storage, from the first byte that is held to the last. See [Note: what leaves]."""
        by_storage: dict[int | None, list[tuple[int, int, Held, Tensor]]] = defaultdict(list)
        for one in held:
            assert one.tensor is not None
            by_storage[address_of(one.tensor)].append((*range_of(one.tensor), one, one.tensor))
        entries = []
        for parts in by_storage.values():
            first = min(part[0] for part in parts) // HELD_ALIGN_BYTES * HELD_ALIGN_BYTES
            last = max(part[1] for part in parts)
            tensor = parts[0][3]
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            flat.set_(tensor.untyped_storage(), first, (last - first,), (1,))
            entry = StashedTensor(flat, self._host, self._orphans, [one for _, _, one, _ in parts])
            entry.num_users = 1
            for begin, _, one, _ in parts:
                one.leave(entry, begin - first)
            entries.append(entry)
        return entries

    def of(self, call: int) -> Stash | None:
        return self._by_call.get(call)

    def prepare_store(self, stash: Stash, buffer: int | None = None) -> Callable[[], int]:
        """Away from the GPU. Returns the lane's work, which returns the bytes that it moved. `buffer`: through which it
        goes on to the disk."""
        if stash.parcel is not None and buffer is not None and self._disk is not None:
            tensors = [entry.tensor.detach().contiguous() for entry in stash.entries if entry.tensor is not None]
            assert len(tensors) == len(stash.entries)
            if (copy := self._disk.leave(stash.parcel, buffer, tensors)) is not None:
                for entry, tensor in zip(stash.entries, tensors, strict=True):
                    entry.leaving, entry.is_in_parcel = tensor, True
                return copy
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

    def put_away(self, stash: Stash) -> None:
        """All of it now, in the user's thread, off the plan. What the host has no room for stays: OutOfMemory."""
        for entry in stash.entries:
            for ticket in entry.on_the_way:
                ticket.join()
            entry.is_wanted = False  # it had come back ahead of a backward that is later now
            if entry.tensor is not None and not entry.is_away:
                leaving = entry.checked().contiguous()
                region = self._host.allocate(leaving.numel() * leaving.element_size(), entry.label)
                self._host.write(region, leaving).wait()
                entry.region = region
            if entry.tensor is not None:
                entry.let_go()

    def prepare_write(self, stash: Stash) -> Callable[[], int] | None:
        """From its buffer to the disk. None: there is nothing to be done."""
        return None if self._disk is None or stash.parcel is None else self._disk.store(stash.parcel)

    def prepare_read(self, stash: Stash, buffer: int) -> Callable[[], int] | None:
        """The other way round, ahead of backward."""
        return None if self._disk is None or stash.parcel is None else self._disk.read_ahead(stash.parcel, buffer)

    def is_moved_by(self, stash: Stash, ticket: Ticket) -> None:
        """The lane's copy, there or back. Whoever uses one of the tensors waits for it, also for another call's
        sake."""
        for entry in stash.entries:
            entry.on_the_way.append(ticket)

    def let_go(self, stash: Stash) -> None:
        """Compute has waited for the copies to host: the GPU's memory may be used again."""
        for entry in stash.entries:
            if entry.tensor is not None and entry.is_away and not entry.is_wanted:
                entry.let_go()

    def prepare_restore(self, stash: Stash) -> Callable[[], int]:
        """Back to the GPU. Returns the lane's work. What has not gone yet stays."""
        arriving, unpacked = [], {}
        for at, entry in enumerate(stash.entries):
            entry.is_wanted = True
            if entry.tensor is None:
                assert entry.is_away
                entry.tensor = self._gpu.empty(entry.shape, entry.dtype, entry.label)
                entry.version = entry.tensor._version
                if entry.region is None:
                    unpacked[at] = entry.tensor.detach().data
                else:
                    arriving.append((entry.tensor.detach(), entry.region))
        if stash.parcel is not None and self._disk is not None and not arriving:
            return self._disk.come_back(stash.parcel, unpacked)

        def restore() -> int:
            for tensor, region in arriving:
                self._host.read(region, tensor.data).wait()  # .data: what the lane writes is no change to autograd
            return sum(region.num_bytes for _, region in arriving)

        return restore

    def consume(self, stash: Stash) -> list[Tensor]:
        """The tensors of a stash, for its one backward. What no lane has brought back is brought back now."""
        if stash.consumed:
            raise Refused(FREED)
        self._bury_orphans()  # of a graph that was dropped after this one's forward had begun
        for entry in stash.entries:
            for ticket in entry.on_the_way:
                ticket.join()
            entry.on_the_way.clear()
        if self.prepare_restore(stash)() and stash.parcel is not None and self._gpu.device.type == "cuda":
            torch.cuda.current_stream(self._gpu.device).synchronize()  # the disk's lanes fill its buffer again
        stash.consumed = True
        if stash.parcel is not None:
            stash.parcel.is_needed = False
        return [entry.checked() for entry in stash.entries if not entry.is_held]

    def release(self, stash: Stash) -> None:
        """After backward the GPU copy goes; host memory is reused once no other call shares the tensor."""
        for entry in stash.entries:
            entry.num_users -= 1
            if entry.is_away or entry.num_users == 0:
                entry.tensor = entry.leaving = None
        stash.entries = []
