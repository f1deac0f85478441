"""Block inputs on their way to the disk and back. Which call's inputs pass through which buffer is in the schedule: see
[Note: inputs on disk] in planner/disk_inputs.py.

[Note: whose inputs are where] A buffer, and the place of a call on disk, are for one graph at a time. Where those of an
older graph are still needed there (a forward after a forward whose backward is to come), the newer ones wait on the
host, off the plan, as do inputs that are larger than any that were planned. As in [Note: what is in a buffer], the
user's thread notes what each buffer is for when it issues the action that fills it; what no lane has brought back comes
straight from where it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hightide.ir.block import ModelProfile
from hightide.ir.chunk import on_disk_bytes
from hightide.ir.plan import Plan
from hightide.planner.disk_inputs import buffer_bytes, stored_bytes
from hightide.runtime.chunks.rings import Ring
from hightide.stores.array import Array
from hightide.stores.store import Store

Copy = Callable[[], int]  # a lane's work, which returns the bytes that it has moved


class Parcel:
    """The inputs of one call of one graph, side by side. Belongs to the call's autograd context."""

    def __init__(self, call: int) -> None:
        self.call = call
        self.offsets: list[int] = []  # of its tensors, in bytes
        self.num_bytes = self.end = 0
        self.buffer: int | None = None  # in which it is, or will be when the lane has come to it
        self.is_stored = False  # it is on disk, or will be
        self.is_needed = True  # a backward is to come

    def lay_out(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.offsets.append(self.end)
            self.num_bytes += tensor.nbytes
            self.end += on_disk_bytes(tensor.nbytes)


class InputsOnDisk:
    def __init__(self, ring: Ring, most_bytes: int, num_buffers: int, places: Mapping[int, Array]) -> None:
        """`most_bytes`: of a buffer; `places`: on disk, by call."""
        self._ring, self._most_bytes, self._places = ring, most_bytes, places
        self._inside: list[Callable[[], Parcel | None]] = [lambda: None] * num_buffers
        self._stored: dict[int, weakref.ref[Parcel]] = {}

    @classmethod
    def of(cls, profile: ModelProfile, plan: Plan, ring: Ring, disk: Store | None) -> InputsOnDisk:
        places = {}
        for call, num_bytes in stored_bytes(profile, plan).items():
            assert disk is not None
            label = f"inputs of {profile.blocks[profile.calls[call].block].name} (call {call})"
            places[call] = Array(disk, disk.allocate(num_bytes, label), torch.uint8, (num_bytes,))
        return cls(ring, buffer_bytes(profile, plan), plan.num_input_buffers, places)

    # -- in the user's thread, when an action is issued -----------------------------------------------------------

    def leave(self, parcel: Parcel, buffer: int, tensors: Sequence[Tensor]) -> Copy | None:
        """From the GPU into a buffer. None: it cannot be for these."""
        parcel.lay_out(tensors)
        if parcel.end > self._most_bytes or not self._is_free(buffer) or self._is_taken(parcel.call):
            return None
        self._fill(buffer, parcel)
        places = [self._part(buffer, tensor, offset) for tensor, offset in zip(tensors, parcel.offsets, strict=True)]

        def copy() -> int:
            for place, tensor in zip(places, tensors, strict=True):
                place.write(tensor).wait()
            return parcel.num_bytes

        return copy

    def store(self, parcel: Parcel) -> Copy | None:
        """From its buffer to disk. None: it is in none, or has no place there."""
        if parcel.buffer is None or parcel.call not in self._places:
            return None
        parcel.is_stored = True
        self._stored[parcel.call] = weakref.ref(parcel)
        place, buffer = self._places[parcel.call], parcel.buffer

        def copy() -> int:
            place.write(self._bytes(buffer, parcel.end)).wait()
            return parcel.num_bytes

        return copy

    def read_ahead(self, parcel: Parcel, buffer: int) -> Copy | None:
        """From disk into a buffer. None: it is somewhere else, or that buffer is for others."""
        if not (parcel.is_stored and parcel.is_needed) or not self._is_free(buffer):
            return None
        self._fill(buffer, parcel)
        place = self._places[parcel.call]

        def copy() -> int:
            place.read(self._bytes(buffer, parcel.end)).wait()
            return parcel.num_bytes

        return copy

    def come_back(self, parcel: Parcel, tensors: Mapping[int, Tensor]) -> Copy:
        """To the GPU, from where it is; `tensors`: by number, those of its parts that are not there."""
        buffer, offsets = parcel.buffer, parcel.offsets
        assert not tensors or buffer is not None or parcel.is_stored, "the inputs of a block are nowhere"
        if buffer is not None:  # it is on its way: from now on the buffer is for nobody
            self._inside[buffer], parcel.buffer = lambda: None, None

        def copy() -> int:
            for at, tensor in tensors.items():
                if buffer is not None:
                    self._part(buffer, tensor, offsets[at]).read(tensor).wait()
                else:
                    self._places[parcel.call].read(tensor, offsets[at]).wait()
            return sum(tensor.nbytes for tensor in tensors.values())

        return copy

    # -- what is where --------------------------------------------------------------------------------------------

    def _fill(self, buffer: int, parcel: Parcel) -> None:
        if (former := self._inside[buffer]()) is not None:
            former.buffer = None
        self._inside[buffer], parcel.buffer = weakref.ref(parcel), buffer

    def _is_free(self, buffer: int) -> bool:
        """Nobody needs what is in it, or it is on disk too."""
        inside = self._inside[buffer]()
        return inside is None or not inside.is_needed or inside.is_stored

    def _is_taken(self, call: int) -> bool:
        """On disk, by a graph whose backward is to come."""
        stored = self._stored.get(call)
        parcel = None if stored is None else stored()
        return parcel is not None and parcel.is_needed

    def _part(self, buffer: int, tensor: Tensor, offset_bytes: int) -> Array:
        return self._ring.fresh(buffer, tensor.dtype, tensor.numel(), offset_bytes)

    def _bytes(self, buffer: int, num_bytes: int) -> Tensor:
        return self._ring.fresh(buffer, torch.uint8, num_bytes).view
