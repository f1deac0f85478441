"""A store: the bytes of one tier behind one small interface."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from hightide.ir.chunk import REGION_BYTES
from hightide.ir.tier import Tier
from hightide.ir.units import format_bytes
from hightide.stores.freelist import FreeList, FreeLists
from hightide.stores.ticket import Ticket

ALIGN_BYTES = REGION_BYTES  # what CUDA's allocator uses, and a sector of a disk

_REMEDIES = {
    Tier.GPU: "Give more with Limits(gpu=...), or pin a smaller micro_batch",
    Tier.HOST: "Give more with Limits(host=...), or train a smaller model or batch",
    Tier.DISK: "Give more with Limits(disk=...)",
}
_NAMED_LABELS = 8  # as many labels are named in a message; the rest is summed up


@dataclass(frozen=True)
class Region:
    """Bytes of a store that somebody owns."""

    offset: int
    num_bytes: int
    label: str


class OutOfMemory(torch.OutOfMemoryError):
    """A tier's limit would be exceeded. Carries the numbers; the message says what to do. Loops that catch torch's own
    error catch it too."""

    def __init__(
        self,
        tier: Tier,
        label: str,
        requested_bytes: int,
        used_bytes: int,
        capacity_bytes: int,
        breakdown: dict[str, int],
        largest_free_bytes: int | None = None,
    ) -> None:
        self.tier = tier
        self.label = label
        self.requested_bytes = requested_bytes
        self.used_bytes = used_bytes
        self.capacity_bytes = capacity_bytes
        self.breakdown = breakdown
        self.largest_free_bytes = largest_free_bytes
        super().__init__(self._message())

    def _message(self) -> str:
        rows = sorted(self.breakdown.items(), key=lambda row: -row[1])
        named = [f"{label} {format_bytes(num_bytes)}" for label, num_bytes in rows[:_NAMED_LABELS]]
        if len(rows) > _NAMED_LABELS:
            rest = rows[_NAMED_LABELS:]
            named.append(f"{len(rest)} others {format_bytes(sum(num_bytes for _, num_bytes in rest))}")
        run = ""
        if self.largest_free_bytes is not None:
            run = f", the largest free run is {self.largest_free_bytes} bytes"
        return (
            f"{self.tier} is out of memory: {self.label!r} asks for {self.requested_bytes} bytes "
            f"({format_bytes(self.requested_bytes)}), in use are {self.used_bytes} of {self.capacity_bytes} bytes "
            f"({format_bytes(self.capacity_bytes)}){run}. In use: {', '.join(named) or 'nothing'}. "
            f"{_REMEDIES[self.tier]}."
        )


class Store(ABC):
    """Thread-safe. Reads and writes of memory run in the caller's thread (a lane), those of a disk in the store's own
    threads: neither tensor nor region may be used for something else until the ticket is done. A failure is in it.

    A region occupies a multiple of `align_bytes`, and that is what counts as used.
    """

    align_bytes = ALIGN_BYTES
    starts_zeroed = False  # True: what was never written reads as zero, and takes no memory until then

    def __init__(self, tier: Tier, capacity_bytes: int) -> None:
        if capacity_bytes <= 0:
            raise ValueError(f"a store of {capacity_bytes} bytes on {tier}: the capacity must be more than zero bytes")
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self._lock = threading.RLock()
        self._free: FreeList | FreeLists = FreeList(capacity_bytes // self.align_bytes * self.align_bytes)
        self._regions: dict[int, Region] = {}  # by offset
        self._to_free: deque[Region] = deque()
        self._used_bytes = 0
        self._peak_bytes = 0
        self._by_label: dict[str, int] = {}
        self._peak_by_label: dict[str, int] | None = None  # None: the peak is now
        self._closed = False

    # ---- space

    def allocate(self, num_bytes: int, label: str) -> Region:
        return self._allocated(num_bytes, label, self._free.take)

    def _allocated(self, num_bytes: int, label: str, take: Callable[[int], int | None]) -> Region:
        if num_bytes <= 0:
            raise ValueError(f"cannot allocate {num_bytes} bytes for {label!r} on {self.tier}")
        size = self._rounded(num_bytes)
        with self._lock:
            self._check_open()
            self._catch_up()
            offset = take(size) if self._used_bytes + size <= self.capacity_bytes else None
            if offset is None:
                raise self._out_of_memory(size, label, self._free.largest_bytes)
            region = Region(offset, num_bytes, label)
            self._regions[offset] = region
            self._account(size, label)
            return region

    def free(self, region: Region) -> None:
        with self._lock:
            if self._closed:  # everything is free already
                return
            self._check_owned(region)
            del self._regions[region.offset]
            size = self._rounded(region.num_bytes)
            self._free.give(region.offset, size)
            self._account(-size, region.label)

    def free_later(self, region: Region) -> None:
        """For finalisers, which the garbage collector may run in the middle of anything: frees at the next question."""
        self._to_free.append(region)

    # ---- bytes

    @abstractmethod
    def read(self, region: Region, into: torch.Tensor, offset_bytes: int = 0) -> Ticket:
        """Fills `into` from the region. Raises at once on bad bounds; a failure on the way is in the ticket."""

    @abstractmethod
    def write(self, region: Region, source: torch.Tensor, offset_bytes: int = 0) -> Ticket:
        """Copies `source` into the region. Raises at once on bad bounds; a failure on the way is in the ticket."""

    def give_back(self, region: Region, offset_bytes: int, num_bytes: int) -> None:  # noqa: B027 (few stores can)
        """Nobody needs these values any more. The region stays; a store that can returns what is behind them."""

    # ---- accounts

    @property
    def used_bytes(self) -> int:
        """What this store has handed out or counted; not what else may be on its device."""
        with self._lock:
            self._catch_up()
            return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever in use. What was refused does not count."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        with self._lock:
            self._catch_up()
            self._peak_bytes, self._peak_by_label = self._used_bytes, None

    def breakdown(self) -> dict[str, int]:
        """Bytes in use, by label."""
        with self._lock:
            self._catch_up()
            return dict(self._by_label)

    def peak_breakdown(self) -> dict[str, int]:
        """Bytes in use at the moment of the peak, by label."""
        with self._lock:
            return dict(self._by_label if self._peak_by_label is None else self._peak_by_label)

    def close(self) -> None:
        """Frees everything. Idempotent. Views that somebody still has stay valid and keep the memory behind them."""
        with self._lock:
            self._peak_by_label = self.peak_breakdown()
            self._closed = True
            self._regions.clear()
            self._to_free.clear()
            self._by_label.clear()
            self._used_bytes = 0

    # ---- for subclasses

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.align_bytes) * self.align_bytes

    def _in_ticket(self, label: str, copy: Callable[..., None], *tensors: torch.Tensor) -> Ticket:
        """Copies here and now; a failure is the ticket's."""
        try:
            copy(*tensors)
        except Exception as error:
            ticket = Ticket(f"{label} on {self.tier}")
            ticket.set_error(error)
            return ticket
        return Ticket.completed(label)

    def _catch_up(self) -> None:
        """Applies what has ended since the last look."""
        while self._to_free:
            self.free(self._to_free.popleft())

    def _account(self, delta_bytes: int, label: str) -> None:
        """Changes the bytes in use. The breakdown of a peak is copied once, when it is left: growth stays cheap."""
        used_bytes = self._used_bytes + delta_bytes
        is_peak = self._peak_bytes < used_bytes <= self.capacity_bytes
        if not is_peak and self._peak_by_label is None:
            self._peak_by_label = dict(self._by_label)
        self._used_bytes = used_bytes
        left = self._by_label.get(label, 0) + delta_bytes
        if left:
            self._by_label[label] = left
        else:
            self._by_label.pop(label, None)
        if is_peak:
            self._peak_bytes, self._peak_by_label = used_bytes, None

    def _out_of_memory(self, num_bytes: int, label: str, largest_free_bytes: int | None = None) -> OutOfMemory:
        numbers = (self._used_bytes, self.capacity_bytes, dict(self._by_label))
        return OutOfMemory(self.tier, label, num_bytes, *numbers, largest_free_bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the store on {self.tier} is closed; make a new one (wrap the model again)")

    def _check_owned(self, region: Region) -> None:
        if self._regions.get(region.offset) is not region:
            raise ValueError(f"{region} is not allocated on {self.tier}: it was freed, or belongs to another store")

    def _check_bounds(self, region: Region, dtype: torch.dtype, offset_bytes: int, numel: int | None) -> int:
        """The number of elements, if there may be so many."""
        self._check_open()
        self._check_owned(region)
        if offset_bytes < 0 or offset_bytes % dtype.itemsize:
            raise ValueError(f"the offset {offset_bytes} into {region} is no multiple of {dtype.itemsize} ({dtype})")
        if numel is None:
            numel = max(0, region.num_bytes - offset_bytes) // dtype.itemsize
        end = offset_bytes + numel * dtype.itemsize
        if numel < 0 or end > region.num_bytes:
            raise ValueError(f"{numel} elements of {dtype} at {offset_bytes} end at {end}, outside of {region}")
        return numel


class MemoryStore(Store):
    """A store whose bytes a processor can address, its own or the accelerator's: they can be used where they are."""

    @abstractmethod
    def view(self, region: Region, dtype: torch.dtype, offset_bytes: int = 0, numel: int | None = None) -> torch.Tensor:
        """A flat tensor on the region's own bytes; to the region's end if `numel` is None."""

    def read(self, region: Region, into: torch.Tensor, offset_bytes: int = 0) -> Ticket:
        source = self.view(region, into.dtype, offset_bytes, into.numel()).view(into.shape)
        return self._in_ticket(region.label, self._copy, into, source)

    def write(self, region: Region, source: torch.Tensor, offset_bytes: int = 0) -> Ticket:
        target = self.view(region, source.dtype, offset_bytes, source.numel()).view(source.shape)
        return self._in_ticket(region.label, self._copy, target, source)

    def copied(self, region: Region, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        """As `read` or `write`; one of the two is a view of the region."""
        self._check_owned(region)
        return self._in_ticket(region.label, self._copy, target, source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Neither is part of a graph."""
        target.copy_(source)


@dataclass(frozen=True)
class LapPeak:
    """The most that an accelerator held for a while."""

    tensor_bytes: int
    reserved_bytes: int | None  # that torch had from the driver; None: there is no driver


class Accelerator(MemoryStore):
    """The GPU tier: a store that also holds what blocks allocate while they run."""

    device: torch.device

    @abstractmethod
    def lap(self) -> LapPeak:
        """Since the last lap. Begins another; peaks since wrapping go on."""

    @property
    def outside_bytes(self) -> int:
        """Tensors that the device held when the limit came into force, and that count for nobody."""
        return 0

    def enforce_limit(self) -> None:
        """Called once the model's values are in their places: from now on the capacity is hard for everything that the
        device holds, where it was not from the beginning."""

    @property
    def is_alone(self) -> bool:
        """Whether no other run of this process shares the device: else what the device holds is not this run's."""
        return True

    @abstractmethod
    def vacate(self) -> None:
        """Gives the memory of all regions back, whoever still has views of it. Nothing may use it. Regions stay; their
        values are gone."""

    @abstractmethod
    def reoccupy(self) -> None:
        """Takes memory for all regions again. Views of before are views of it."""

    @property
    def device_used_bytes(self) -> int:
        """Everything that the device holds, activations included, whoever counts it."""
        return self.used_bytes

    @property
    def device_peak_bytes(self) -> int:
        """The most that the device had set aside, activations included. This is what must stay within the capacity."""
        return self.peak_bytes

    @abstractmethod
    def meter(self, label: str = "activations") -> AbstractContextManager[None]:
        """Counts what the calling thread allocates inside, where the device does not count by itself."""

    @abstractmethod
    def unmetered(self) -> AbstractContextManager[None]:
        """Inside `meter()`, counts nothing for a while."""

    def empty(self, shape: torch.Size, dtype: torch.dtype, label: str) -> torch.Tensor:
        """Beside the regions, as what blocks allocate; outside of `meter()`, too."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self.adopt(tensor, label)
        return tensor

    @abstractmethod
    def adopt(self, tensor: torch.Tensor, label: str) -> None:
        """Counts an existing tensor's memory until it dies, unless it is counted already."""

    @abstractmethod
    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor is here already."""
