"""The GPU tier on a machine without a GPU: a bounded arena in RAM, and an account of everything a GPU would hold."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hightide.ir.tier import Tier
from hightide.stores.arena import ArenaStore
from hightide.stores.base import Accelerator, Region
from hightide.stores.meter import DEFAULT_LABEL, AllocationMeter, StorageLedger


class SimulatedAccelerator(ArenaStore, Accelerator):
    """Three things count against the capacity: regions (slots, persistent chunks), storages that were allocated under
    `meter()` or adopted, and explicit charges. Whatever exceeds it raises OutOfMemory with the numbers."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(Tier.GPU, capacity_bytes)
        self.device = torch.device("cpu")
        self._offsets: list[int] = []  # of live regions, sorted
        self._ledger = StorageLedger(self._on_change, self._lock)
        self._active = threading.local()
        assert self._storage is not None
        self._ledger.ignore(self._storage)  # its regions are counted one by one

    def allocate(self, num_bytes: int, label: str) -> Region:
        with self._lock:
            region = super().allocate(num_bytes, label)
            insort(self._offsets, region.offset)
            return region

    def free(self, region: Region) -> None:
        with self._lock:
            super().free(region)
            if not self._closed:
                del self._offsets[bisect_right(self._offsets, region.offset) - 1]

    def region_at(self, data_ptr: int) -> Region | None:
        """The region that holds this address, if any: which chunk a saved tensor is a view of."""
        offset = data_ptr - self._base
        if not 0 <= offset < self.capacity_bytes:
            return None
        with self._lock:
            index = bisect_right(self._offsets, offset) - 1
            if index < 0:
                return None
            region = self._regions[self._offsets[index]]
            return region if offset < region.offset + region.num_bytes else None

    @contextmanager
    def meter(self, label: str = DEFAULT_LABEL) -> Iterator[None]:
        """Counts what the calling thread allocates inside. Nested meters count once, under the inner label."""
        active: AllocationMeter | None = getattr(self._active, "meter", None)
        if active is not None:
            outer, active.label = active.label, label
            try:
                yield
            finally:
                active.label = outer
            return
        self._active.meter = AllocationMeter(label=label, ledger=self._ledger)
        try:
            with self._active.meter:
                yield
        finally:
            self._active.meter = None

    @contextmanager
    def unmetered(self) -> Iterator[None]:
        """Inside, the calling thread's allocations do not count: work that a real accelerator would not see."""
        active: AllocationMeter | None = getattr(self._active, "meter", None)
        if active is None:
            yield
            return
        outer, active.paused = active.paused, True
        try:
            yield
        finally:
            active.paused = outer

    def adopt(self, tensor: torch.Tensor, label: str) -> None:
        """Counts an existing tensor's storage until it dies, unless it is counted already (views of the arena are)."""
        self._ledger.count(tensor.untyped_storage(), label)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor's bytes count here already."""
        return self._ledger.knows(tensor.untyped_storage())

    def charge(self, num_bytes: int, label: str) -> None:
        """Counts bytes that are neither a region nor a storage."""
        with self._lock:
            self._check_open()
            self._settle()
            if self._used_bytes + num_bytes > self.capacity_bytes:
                raise self._out_of_memory(num_bytes, label)
            self._account(num_bytes, label)

    def discharge(self, num_bytes: int, label: str) -> None:
        with self._lock:
            if self._closed:
                return
            charged_bytes = self._by_label.get(label, 0)
            if num_bytes > charged_bytes:
                raise ValueError(f"cannot discharge {num_bytes} bytes of {label!r}: {charged_bytes} are charged")
            self._account(-num_bytes, label)

    def close(self) -> None:
        super().close()
        self._offsets.clear()

    def _settle(self) -> None:
        super()._settle()
        self._ledger.settle()

    def _on_change(self, delta_bytes: int, label: str) -> None:
        """A storage was born or has died. One that does not fit stays counted until it dies: it is in RAM."""
        if self._closed:
            return
        overdrawn = self._used_bytes + delta_bytes > self.capacity_bytes
        error = self._out_of_memory(delta_bytes, label) if overdrawn and delta_bytes > 0 else None
        self._account(delta_bytes, label)
        if error is not None:
            raise error
