"""The GPU tier on a real GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from hightide.ir.tier import Tier
from hightide.stores.base import Accelerator, Region


class CudaAccelerator(Accelerator):
    """Slots and persistent chunks are exact-size allocations, made once. Activations come from torch's caching
    allocator, which the process limits to the plan's capacity; everything is allocated on the stream of the user's
    thread."""

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        super().__init__(Tier.GPU, capacity_bytes)
        self.device = device
        self._memory: dict[int, torch.UntypedStorage] = {}  # by the region's offset
        torch.cuda.reset_peak_memory_stats(device)

    def allocate(self, num_bytes: int, label: str) -> Region:
        with self._lock:
            region = super().allocate(num_bytes, label)
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self._memory[region.offset] = memory.untyped_storage()
            return region

    def free(self, region: Region) -> None:
        with self._lock:
            super().free(region)
            self._memory.pop(region.offset, None)

    def view(self, region: Region, dtype: torch.dtype, offset_bytes: int = 0, numel: int | None = None) -> torch.Tensor:
        with self._lock:
            numel = self._check_bounds(region, dtype, offset_bytes, numel)
            storage = self._memory[region.offset]
        with torch.no_grad():
            start = offset_bytes // dtype.itemsize
            return torch.empty(0, dtype=dtype, device=self.device).set_(storage, start, (numel,), (1,))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(source, non_blocking=True)

    @property
    def used_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak_bytes(self) -> int:
        """What torch has reserved from the driver at most: that is what another process cannot have."""
        return torch.cuda.max_memory_reserved(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def meter(self, label: str = "activations") -> AbstractContextManager[None]:
        return nullcontext()

    def unmetered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def adopt(self, tensor: torch.Tensor, label: str) -> None:
        """The device counts by itself."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def close(self) -> None:
        super().close()
        self._memory.clear()
