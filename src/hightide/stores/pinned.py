"""Host memory that a GPU can copy from and to at full speed.

[Note: when memory is pinned] Pinning makes every page of the arena real. Done before the model's values were moved
in, the model would exist twice: as it was, and as empty pages. So an arena starts as plain memory and is pinned in a
later step, when the originals are gone.
"""

from __future__ import annotations

import mmap
import threading
import warnings
import weakref
from bisect import bisect_right
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from hightide.ir.units import exactly
from hightide.process.forks import Birthplace
from hightide.stores.host_arena import HostArena
from hightide.stores.store import ALIGN_BYTES, Region

SLICE_BYTES = 2**28  # so much spare memory is pinned at a time


class PinnedArena(HostArena):
    """A host arena that is registered with CUDA: exactly what the plan needs is pinned, and copies there run
    asynchronously. What goes beyond it, up to the limit, is plain memory: block inputs of a forward that somebody keeps
    without its backward. Where the system refuses to pin, it says so and works as plain memory."""

    def __init__(
        self, capacity_bytes: int, pinned_bytes: int | None = None, device: torch.device | None = None
    ) -> None:
        """`device`: the GPU for which it is pinned; None: the present one."""
        super().__init__(capacity_bytes, min(pinned_bytes or capacity_bytes, capacity_bytes), pinned_bytes)
        self._device = device
        self._pinned_bytes = self._end
        self._keep_apart()
        self._unpin: weakref.finalize | None = None
        self._pinned_spare: list[tuple[int, int]] = []  # (offset, bytes) of what is pinned beyond that
        self._unpin_spare: list[weakref.finalize] = []
        self._can_pin_more = True
        self._pinning = threading.Lock()

    def _keep_apart(self) -> None:
        """CUDA refuses to copy a region of which only a part is registered: what lies between the parts is never
        given."""
        if self._pinned_bytes + ALIGN_BYTES <= self.capacity_bytes:
            self._free.take(self._pinned_bytes)
            self._free.take(ALIGN_BYTES)
            self._free.give(0, self._pinned_bytes)

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None

    def pin(self) -> None:
        """See [Note: when memory is pinned]."""
        self._check_open()
        if self.is_pinned:
            return
        status = self._registered(self._base, self._pinned_bytes)
        if status == 0:
            # Also if nobody closes it: memory that is unmapped while it is registered cannot be registered again.
            self._unpin = weakref.finalize(self, _unregister, self._base, Birthplace(), self._device)
            self._unpin.atexit = False
            return
        warnings.warn(
            f"{exactly(self._pinned_bytes)} of host memory could not be pinned "
            f"(CUDA error {status}): copies to and from the GPU will be slower and will not overlap. Raise the limit "
            "of locked memory (ulimit -l), or lower Limits(host=...)",
            stacklevel=2,
        )

    # ---- what is lent

    def pin_spare(self, num_bytes: int, slice_bytes: int | None = None) -> bool:
        """Slice by slice, whole pages each, with some bytes before and after it that nobody gets: see _keep_apart. They
        stay pinned: another time it is done already. Others may allocate meanwhile, and who else pins waits. While CUDA
        registers memory, others may wait for CUDA: so pages are made real before."""
        with self._pinning:
            with self._lock:
                missing_bytes = num_bytes - sum(size for _, size in self._pinned_spare)
                if missing_bytes <= 0 or self._closed or not self.is_pinned or not self._can_pin_more:
                    return False
                begin = self._unpinned
                free_bytes = max((size for _, size in self._runs.free_from(begin)), default=0) - 2 * mmap.PAGESIZE
                wanted_bytes = min(slice_bytes or SLICE_BYTES, _pages(missing_bytes + mmap.PAGESIZE - 1))
                size = min(wanted_bytes, _pages(free_bytes))
                offset = self._runs.take_from(size + 2 * mmap.PAGESIZE, begin) if size > 0 else None
                if offset is None:
                    return False
                start = _pages(offset + ALIGN_BYTES + mmap.PAGESIZE - 1)
                self._begin_lending()
            self._touch(start, size)
            status = self._registered(self._base + start, size)
            with self._lock:
                if status:
                    self._can_pin_more = False
                    self._runs.give(offset, size + 2 * mmap.PAGESIZE)
                    return False
                self._pinned_spare.append((start, size))
                unpin = weakref.finalize(self, _unregister, self._base + start, Birthplace(), self._device)
                unpin.atexit = False
                self._unpin_spare.append(unpin)
                self._runs.give(start, size)
                return True

    @property
    def _unpinned(self) -> int:
        return sum(self._pinned_spare[-1]) if self._pinned_spare else self._end

    def is_pinned_at(self, region: Region) -> bool:
        if region.offset + region.num_bytes <= self._pinned_bytes:
            return self.is_pinned
        index = bisect_right(self._pinned_spare, region.offset, key=lambda known: known[0]) - 1
        return index >= 0 and region.offset < sum(self._pinned_spare[index])

    def _registered(self, address: int, num_bytes: int) -> int:
        """Perhaps in a thread of its own; CUDA's error, 0 for none, which it has forgotten then."""
        with _on(self._device):
            status = _register(address, num_bytes)
            if status:
                _forget_error()
        return status

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=self.is_pinned)

    def unpin(self) -> None:
        with self._pinning:  # nothing is registered after that
            while self._unpin_spare:
                self._unpin_spare.pop()()
            self._pinned_spare.clear()
            if self._unpin is not None:
                self._unpin()
                self._unpin = None

    def close(self) -> None:
        self.unpin()
        super().close()


def _pages(num_bytes: int) -> int:
    """The bytes of so many whole ones."""
    return num_bytes // mmap.PAGESIZE * mmap.PAGESIZE


def _register(address: int, num_bytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))


def _unregister(address: int, birthplace: Birthplace, device: torch.device | None) -> None:
    if not birthplace.is_here:  # a fork can neither use CUDA nor end what the memory is to its parent
        return
    with _on(device):
        torch.cuda.synchronize()  # a copy may still be on its way
        torch.cuda.cudart().cudaHostUnregister(address)


def _on(device: torch.device | None) -> AbstractContextManager[object]:
    """Threads begin with the first GPU, whatever others have chosen: CUDA would make itself at home there, which takes
    half a GiB of it, and copies of another one would not be waited for."""
    return nullcontext() if device is None else torch.cuda.device(device)


def _forget_error() -> None:
    """CUDA reports a refusal once more, at the next launch of a kernel. This is that launch, so that it is not the
    user's."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
