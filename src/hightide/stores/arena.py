"""A store on one anonymous mapping of exactly its capacity. Pages become real when they are first touched."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch

from hightide.ir.tier import Tier
from hightide.stores.store import MemoryStore, Region

# A capacity is a limit, not a need: do not ask the system to set it aside. Python names the flag from 3.13 on.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class CannotMap(ValueError, MemoryError):
    """The system refuses a mapping of the size that a limit asks for."""


class ArenaStore(MemoryStore):
    starts_zeroed = True

    def __init__(self, tier: Tier, capacity_bytes: int, huge_bytes: int = 0, in_forks: bool = False) -> None:
        """`huge_bytes`: how much of the mapping's beginning is surely used: a single touched byte makes a huge page
        real. `in_forks`: a forked child can read it; else that ends the child with a segmentation fault."""
        super().__init__(tier, capacity_bytes)
        try:
            mapping = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, OverflowError) as error:
            problem = f"cannot map {capacity_bytes} bytes for {tier}: {error}"
            raise CannotMap(f"{problem}; lower Limits({tier}=...)") from error
        if hasattr(mmap, "MADV_DONTFORK") and not in_forks:  # every page that is written meanwhile would exist twice
            mapping.madvise(mmap.MADV_DONTFORK)
        self._mapping: mmap.mmap | None = mapping
        self._prefer_huge_pages(0, huge_bytes)
        # The storage owns the mapping. It is never unmapped by hand: torch.frombuffer exports no buffer, so
        # mmap.close() would succeed under living views and the next access would be a segmentation fault.
        self._storage: torch.UntypedStorage | None = torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()
        self._base = self._storage.data_ptr()

    def _prefer_huge_pages(self, begin: int, num_bytes: int) -> None:
        """`begin` is the first byte of a page."""
        assert self._mapping is not None
        if num_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them: pages stay small
                self._mapping.madvise(mmap.MADV_HUGEPAGE, begin, num_bytes)

    def view(self, region: Region, dtype: torch.dtype, offset_bytes: int = 0, numel: int | None = None) -> torch.Tensor:
        with self._lock:
            numel = self._check_bounds(region, dtype, offset_bytes, numel)
            storage = self._storage
        assert storage is not None
        # set_() and not a slice of one base tensor: slices share a version counter, so that filling one slot would
        # invalidate what autograd saved of all others.
        start = (region.offset + offset_bytes) // dtype.itemsize
        return torch.empty(0, dtype=dtype).set_(storage, start, (numel,), (1,))

    def give_back(self, region: Region, offset_bytes: int, num_bytes: int) -> None:
        """The pages that lie inside: they read as zero."""
        offset = region.offset + offset_bytes
        self._give_back(-(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, offset + num_bytes)

    def vacate(self) -> None:
        """Gives all memory back, whoever still has views of it. Regions stay, and read as zero."""
        self._give_back(0, self.capacity_bytes)

    def _give_back(self, begin: int, end: int) -> None:
        """`begin` is the first byte of a page. Of the last page only a whole one: the rest may be somebody else's."""
        num_bytes = end // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if num_bytes > 0 and hasattr(mmap, "MADV_DONTNEED"):
            assert self._mapping is not None, "the store is closed"
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, num_bytes)

    def close(self) -> None:
        super().close()
        self._storage = self._mapping = None
