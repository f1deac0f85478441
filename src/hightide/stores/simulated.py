"""The GPU tier on a machine without a GPU: a bounded arena in RAM, and an account of everything a GPU would hold.

Not seen: what autograd's engine allocates between blocks in backward, until a block receives it; workspaces inside of a
single kernel; and, of the host, the 1 MiB of each thread in which updates without the C kernel widen gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hightide.ir.tier import Tier
from hightide.stores.arena import ArenaStore
from hightide.stores.meter import DEFAULT_LABEL, AllocationMeter, StorageLedger
from hightide.stores.store import Accelerator, LapPeak


class SimulatedAccelerator(ArenaStore, Accelerator):
    """Two things count against the capacity: regions (slots, persistent chunks), and storages that were allocated under
    `meter()` or adopted. Whatever exceeds it raises OutOfMemory with the numbers."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(Tier.GPU, capacity_bytes, in_forks=True)  # where a real one's tensors raise, they do no harm
        self.device = torch.device("cpu")
        self._ledger = StorageLedger(self._on_change, self._lock)
        self._active = threading.local()
        self._lap_peak_bytes = 0
        assert self._storage is not None
        self._ledger.ignore(self._storage)  # its regions are counted one by one

    def reoccupy(self) -> None:
        """Pages become real when they are touched."""

    def lap(self) -> LapPeak:
        with self._lock:
            self._catch_up()
            peak = LapPeak(self._lap_peak_bytes, None)
            self._lap_peak_bytes = self._used_bytes
            return peak

    def _account(self, delta_bytes: int, label: str) -> None:
        super()._account(delta_bytes, label)
        if self._used_bytes <= self.capacity_bytes:  # what was refused does not count
            self._lap_peak_bytes = max(self._lap_peak_bytes, self._used_bytes)

    def meter(self, label: str = DEFAULT_LABEL) -> AbstractContextManager[None]:
        """Counts what the calling thread allocates inside. Nested meters count once, under the inner label."""
        return _Counted(self._active, self._ledger, label)

    @contextmanager
    def unmetered(self) -> Iterator[None]:
        """Inside, the calling thread's allocations do not count: work that a real accelerator would not see, or that
        torch.compile does, which refuses to run under a dispatch mode."""
        active: AllocationMeter | None = getattr(self._active, "meter", None)
        if active is None:
            yield
            return
        self._active.meter = None
        try:
            with _disable_current_modes():
                yield
        finally:
            self._active.meter = active

    def adopt(self, tensor: torch.Tensor, label: str) -> None:
        """Counts an existing tensor's storage until it dies, unless it is counted already (views of the arena are)."""
        self._ledger.count(tensor.untyped_storage(), label)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor's bytes count here already."""
        return self._ledger.knows(tensor.untyped_storage())

    def _catch_up(self) -> None:
        super()._catch_up()
        self._ledger.catch_up()

    def _on_change(self, delta_bytes: int, label: str) -> None:
        """A storage was born or has died. One that does not fit stays counted until it dies: it is in RAM."""
        if self._closed:
            return
        overdrawn = self._used_bytes + delta_bytes > self.capacity_bytes
        error = self._out_of_memory(delta_bytes, label) if overdrawn and delta_bytes > 0 else None
        self._account(delta_bytes, label)
        if error is not None:
            raise error


class _Counted:
    """No generator: there are several around every block."""

    __slots__ = ("_active", "_label", "_ledger", "_outer")

    def __init__(self, active: threading.local, ledger: StorageLedger, label: str) -> None:
        self._active, self._ledger, self._label = active, ledger, label
        self._outer: str | None = None  # the label of the meter around this one

    def __enter__(self) -> None:
        active = self._active
        meter: AllocationMeter | None = getattr(active, "meter", None)
        if meter is None:
            spare: AllocationMeter | None = getattr(active, "spare", None)  # of the last section
            meter = active.meter = AllocationMeter(ledger=self._ledger) if spare is None else spare
            active.spare, meter.label = None, self._label
            meter.__enter__()
        else:
            self._outer, meter.label = meter.label, self._label

    def __exit__(self, *error: Any) -> None:
        meter: AllocationMeter = self._active.meter
        if self._outer is not None:
            meter.label = self._outer
            return
        self._active.meter, self._active.spare = None, meter
        meter.__exit__(*error)
