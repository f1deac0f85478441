"""The HOST tier."""

from __future__ import annotations

from hightide.ir.tier import Tier
from hightide.stores.arena import ArenaStore
from hightide.stores.freelist import FreeList
from hightide.stores.store import Region


class HostArena(ArenaStore):
    """Homes of streamed chunks, optimizer states and stashed block inputs, in one mapping of exactly the limit."""

    def __init__(self, capacity_bytes: int, huge_bytes: int = 0) -> None:
        super().__init__(Tier.HOST, capacity_bytes, huge_bytes)

    def allocate_last(self, num_bytes: int, label: str) -> Region:
        """At the other end than `allocate`: what comes and goes at both ends leaves no holes in between. Anywhere, if
        a run off the plan has filled what the plan needs."""
        free = self._free
        assert isinstance(free, FreeList)

        def take(size: int) -> int | None:
            offset = free.take_last(size, self._end)
            return free.take(size) if offset is None else offset

        return self._allocated(num_bytes, label, take)

    @property
    def _end(self) -> int:
        """Of what a plan needs."""
        return self.capacity_bytes

    def pin(self) -> None:
        """Called once the model's values are in their places. Without a GPU there is nobody to pin memory for."""

    def unpin(self) -> None:
        """Nobody copies from here to a GPU any more: pages can be given back."""
