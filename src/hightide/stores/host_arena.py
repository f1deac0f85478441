"""The HOST tier."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from hightide.ir.tier import Tier
from hightide.stores.arena import ArenaStore
from hightide.stores.freelist import FreeList
from hightide.stores.store import ALIGN_BYTES, OutOfMemory, Region
from hightide.stores.ticket import DEFAULT_TIMEOUT_S

LENT = "copies for a checkpoint"


class HostArena(ArenaStore):
    """Homes of streamed chunks, optimizer states and stashed block inputs, in one mapping of exactly the limit. What a
    plan leaves free of it is lent for a while; whoever runs off the plan and needs it waits until it is given back. Its
    pages stay real then: the next one finds them, and what is slow is the first use."""

    def __init__(self, capacity_bytes: int, huge_bytes: int = 0, needed_bytes: int | None = None) -> None:
        """`needed_bytes`: that the plan takes at most, at the arena's beginning; None: all."""
        super().__init__(Tier.HOST, capacity_bytes, huge_bytes)
        wanted_bytes = capacity_bytes if needed_bytes is None else -(-needed_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self._end = min(wanted_bytes, capacity_bytes)  # of what a plan needs
        self._returned = threading.Condition(self._lock)
        self._num_recalls = 0  # who wait for what is lent
        self._has_lent = False

    def allocate_last(self, num_bytes: int, label: str) -> Region:
        """At the other end than `allocate`: what comes and goes at both ends leaves no holes in between. Anywhere, if
        a run off the plan has filled what the plan needs."""
        free = self._runs

        def take(size: int) -> int | None:
            offset = free.take_last(size, self._end)
            return free.take(size) if offset is None else offset

        return self._allocated(num_bytes, label, take)

    @property
    def _runs(self) -> FreeList:
        assert isinstance(self._free, FreeList)
        return self._free

    # ---- what is lent

    def lend(self, num_bytes: int) -> Region | None:
        """Of what the plan does not need, to be given back by `free`. None: there is no room, or somebody waits for
        it."""
        with self._lock:
            if self._num_recalls:
                return None
            self._begin_lending()
            try:
                return super()._allocated(num_bytes, LENT, lambda size: self._runs.take_from(size, self._end))
            except OutOfMemory:
                return None

    @property
    def spare_bytes(self) -> int:
        """That could be lent now, in one piece or several."""
        with self._lock:
            self._settle()
            return sum(num_bytes for _, num_bytes in self._runs.free_from(self._end))

    def free(self, region: Region) -> None:
        with self._lock:
            super().free(region)
            self._returned.notify_all()

    def _begin_lending(self) -> None:
        """Memory that is used for the first time comes several times as fast in huge pages."""
        if not self._has_lent:
            self._has_lent = True
            begin = -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE
            self._prefer_huge_pages(begin, max(0, self.capacity_bytes - begin))

    def _allocated(self, num_bytes: int, label: str, take: Callable[[int], int | None]) -> Region:
        with self._lock:
            while True:
                try:
                    return super()._allocated(num_bytes, label, take)
                except OutOfMemory:
                    if not self._by_label.get(LENT) or not self._recalled():
                        raise

    def _recalled(self) -> bool:
        """Whether something was given back, before it took too long."""
        self._num_recalls += 1
        try:
            return self._returned.wait(DEFAULT_TIMEOUT_S)
        finally:
            self._num_recalls -= 1

    # ---- a GPU's

    @property
    def is_pinned(self) -> bool:
        return False

    def pin(self) -> None:
        """Called once the model's values are in their places. Without a GPU there is nobody to pin memory for."""

    def pin_spare(self, num_bytes: int) -> bool:
        """Pins a part of what can be lent, unless so much of it is pinned already: whether there is now more."""
        return False

    def is_pinned_at(self, region: Region) -> bool:
        return False

    def unpin(self) -> None:
        """Nobody copies from here to a GPU any more: pages can be given back."""
