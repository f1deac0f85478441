"""The HOST tier."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from hightide.ir.tier import Tier
from hightide.stores.arena import ArenaStore
from hightide.stores.freelist import FreeList
from hightide.stores.store import ALIGN_BYTES, OutOfMemory, Region
from hightide.stores.ticket import DEFAULT_TIMEOUT_S

LENT = "copies for a checkpoint"
AHEAD = "memory that is made ready for them"
READY_BYTES = 2**26  # so much spare memory is made real at a time


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
        self._ready = self._end  # up to here pages were made real
        self.peak_lent_bytes = 0

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

    def lend(self, num_bytes: int, leaves_gpu: bool = True) -> Region | None:
        """Of what the plan does not need, to be given back by `free`. None: there is no room, or somebody waits for
        it. What does not leave the GPU takes memory that is not pinned, while there is some."""
        begins = [self._end] if leaves_gpu else [self._unpinned, self._end]
        with self._lock:
            if self._num_recalls:
                return None
            self._begin_lending()
            for begin in begins:
                with suppress(OutOfMemory):
                    region = super()._allocated(num_bytes, LENT, partial(self._runs.take_from, begin=begin))
                    self.peak_lent_bytes = max(self.peak_lent_bytes, self._by_label[LENT])
                    return region
            return None

    @property
    def _unpinned(self) -> int:
        """From here on nothing is."""
        return self._end

    def make_ready(self, num_bytes: int) -> bool:
        """Makes pages real of a part of the first `num_bytes` that can be lent: whether something was left to do. Their
        first use is slow, and somebody would wait for it. For one thread at a time, beside whatever goes on."""
        with self._lock:
            begin = max(self._ready, self._unpinned)
            end = min(self._end + num_bytes, self.capacity_bytes)
            runs = () if self._closed or self._num_recalls else self._runs.free_from(begin)
            first, size = next(((first, min(first + size, end) - first) for first, size in runs), (end, 0))
            if size <= 0:
                return False
            size = min(size, READY_BYTES)
            self._begin_lending()
            region = super()._allocated(size, AHEAD, partial(self._runs.take_from, begin=first))
            self._ready = first + size
        try:
            self._touch(first, size)
        finally:
            self.free(region)
        return True

    def _touch(self, offset: int, num_bytes: int) -> None:
        """Of memory that is nobody's."""
        storage = self._storage
        if storage is not None:
            pages = torch.empty(0, dtype=torch.uint8).set_(
                storage, offset, (-(-num_bytes // mmap.PAGESIZE),), (mmap.PAGESIZE,)
            )
            pages.zero_()

    @property
    def spare_bytes(self) -> int:
        """That could be lent now, in one piece or several."""
        with self._lock:
            self._catch_up()
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
                    if not self._by_label.keys() & {LENT, AHEAD} or not self._recalled():
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

    def pin_spare(self, num_bytes: int, slice_bytes: int | None = None) -> bool:
        """Pins a part of what can be lent, unless so much of it is pinned already: whether there is now more."""
        return False

    def is_pinned_at(self, region: Region) -> bool:
        return False

    def unpin(self) -> None:
        """Nobody copies from here to a GPU any more: pages can be given back."""
