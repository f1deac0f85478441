"""The GPU tier on a real GPU."""

from __future__ import annotations

import os
import re
import weakref
from contextlib import AbstractContextManager, nullcontext

import torch

from hightide.ir.tier import Tier
from hightide.ir.units import parse_bytes
from hightide.stores import device_limit
from hightide.stores.store import Accelerator, LapPeak, OutOfMemory, Region


def use_expandable_segments() -> None:
    """Lets the caching allocator grow its segments instead of making new ones: activations of many sizes would
    otherwise leave holes of gigabytes, which count against the limit. A user's own configuration stays."""
    if any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        return
    setting = "expandable_segments:True"
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(setting)
    else:
        torch.cuda.memory._set_allocator_settings(setting)


class CudaAccelerator(Accelerator):
    """Regions lie in one slab, which is allocated at once: torch's allocator would round each of them up and could
    leave holes between them. Activations come from torch's caching allocator. Everything is allocated on the stream
    of the user's thread, and the process is held to the capacity by that allocator (device_limit.py).

    [Note: from when a limit counts] The slab of a second run must not fail under the limit of the first. So a limit
    counts before its slab is allocated. What the process has reserved by then comes on top, because the model itself
    may still be on the GPU; once its values have moved into the slab, only what is left beside the slabs does, and the
    limit is hard."""

    def __init__(self, capacity_bytes: int, device: torch.device, slab_bytes: int = 0) -> None:
        """`slab_bytes`: what all regions will need together. A region beyond it gets memory of its own."""
        super().__init__(Tier.GPU, capacity_bytes)
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        use_expandable_segments()
        self._empty_cache()  # a slab cut out of a larger cached block would share its fate
        self._outside_tensor_bytes = 0
        self._slab_bytes = min(slab_bytes, capacity_bytes)
        self._apart: dict[int, torch.UntypedStorage] = {}  # regions beyond the slab, by offset
        self._reserved_before_bytes = 0  # at most, before the present lap
        self._limit = device_limit.Limit(capacity_bytes, self._slab_bytes)
        device_limit.add(self.device.index, self._limit, torch.cuda.memory_reserved(self.device))
        self._unlimit = weakref.finalize(self, _let_go, self.device.index, self._limit)  # also if nobody closes it
        self._unlimit.atexit = False
        try:
            self._slab = self._memory(self._slab_bytes, "slots and persistent chunks") if slab_bytes else None
        except BaseException:
            self._unlimit()
            raise
        torch.cuda.reset_peak_memory_stats(self.device)

    def allocate(self, num_bytes: int, label: str) -> Region:
        with self._lock:
            region = super().allocate(num_bytes, label)
            if region.offset + num_bytes > self._slab_bytes:
                try:
                    self._apart[region.offset] = self._memory(num_bytes, label)
                except OutOfMemory:
                    super().free(region)
                    raise
            return region

    def free(self, region: Region) -> None:
        with self._lock:
            super().free(region)
            self._apart.pop(region.offset, None)

    def view(self, region: Region, dtype: torch.dtype, offset_bytes: int = 0, numel: int | None = None) -> torch.Tensor:
        with self._lock:
            numel = self._check_bounds(region, dtype, offset_bytes, numel)
            apart = self._apart.get(region.offset)
            storage, start = (self._slab, region.offset) if apart is None else (apart, 0)
        assert storage is not None
        start = (start + offset_bytes) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage, start, (numel,), (1,))  # as in ArenaStore

    def _memory(self, num_bytes: int, label: str) -> torch.UntypedStorage:
        with self.meter(label):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def vacate(self) -> None:
        """Nothing of it stays, whatever a graph has saved of it: the GPU has no room for two slabs. To read an old view
        now is an error of CUDA."""
        torch.cuda.synchronize(self.device)
        for storage, _ in self._storages():
            storage.resize_(0)
        self._empty_cache()

    def reoccupy(self) -> None:
        with self.meter("slots and persistent chunks"):
            for storage, num_bytes in self._storages():
                storage.resize_(num_bytes)

    def _storages(self) -> list[tuple[torch.UntypedStorage, int]]:
        slab = [] if self._slab is None else [(self._slab, self._slab_bytes)]
        return slab + [(storage, self._regions[offset].num_bytes) for offset, storage in self._apart.items()]

    # ---- what the device holds

    def enforce_limit(self) -> None:
        """See [Note: from when a limit counts]."""
        self._check_open()
        self._empty_cache()
        device_limit.end_loading(self.device.index, self._limit, torch.cuda.memory_reserved(self.device))
        self._outside_tensor_bytes = max(0, torch.cuda.memory_allocated(self.device) - self._slab_bytes)
        self.reset_peak()

    @property
    def is_alone(self) -> bool:
        return device_limit.num_limits(self.device.index) == 1

    @property
    def outside_bytes(self) -> int:
        return self._outside_tensor_bytes

    @property
    def device_used_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    def device_peak_bytes(self) -> int:
        """What torch has reserved from the driver at most: that is what another process cannot have."""
        return max(self._reserved_before_bytes, torch.cuda.max_memory_reserved(self.device))

    def lap(self) -> LapPeak:
        peak = LapPeak(torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device))
        self._reserved_before_bytes = self.device_peak_bytes
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def reset_peak(self) -> None:
        super().reset_peak()
        self._reserved_before_bytes = 0
        torch.cuda.reset_peak_memory_stats(self.device)

    def meter(self, label: str = "activations") -> AbstractContextManager[None]:
        return _InOurWords(self, label)

    def refused(self, label: str, message: str) -> OutOfMemory:
        found = re.search(r"Tried to allocate ([\d.]+) (B|K|M|G)", message.replace("bytes", "B"))
        requested_bytes = parse_bytes(f"{found[1]}{found[2]}iB".replace("BiB", "B"), "requested") if found else 0
        reserved_bytes = torch.cuda.memory_reserved(self.device)
        allocated_bytes = torch.cuda.memory_allocated(self.device)
        parts = {
            **self.breakdown(),
            "activations and others": allocated_bytes - self.used_bytes,
            "cached by torch": reserved_bytes - allocated_bytes,
        }
        return OutOfMemory(self.tier, label, requested_bytes, reserved_bytes, self.capacity_bytes, parts)

    def unmetered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def empty(self, shape: torch.Size, dtype: torch.dtype, label: str) -> torch.Tensor:
        with self.meter(label):
            return super().empty(shape, dtype, label)

    def adopt(self, tensor: torch.Tensor, label: str) -> None:
        """The device counts by itself."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def close(self) -> None:
        self._unlimit()
        super().close()
        self._slab = None
        self._apart.clear()
        self._empty_cache()  # what stays cached is room above another run's limit

    def _empty_cache(self) -> None:
        with torch.cuda.device(self.device):  # else CUDA makes itself at home on the present one
            torch.cuda.empty_cache()


class _InOurWords:
    """The device counts by itself. A refusal of its allocator is said in the words of all stores. No generator: there
    are several around every block."""

    __slots__ = ("_gpu", "_label")

    def __init__(self, gpu: CudaAccelerator, label: str) -> None:
        self._gpu, self._label = gpu, label

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ours = isinstance(error, OutOfMemory)  # of a meter inside of this one, or of another tier
        if isinstance(error, torch.OutOfMemoryError) and not ours:
            raise self._gpu.refused(self._label, str(error)) from error


def _let_go(index: int, limit: device_limit.Limit) -> None:
    """While the slab still exists: a copy that is under way must not write into memory that is somebody else's."""
    torch.cuda.synchronize(index)
    device_limit.drop(index, limit)
