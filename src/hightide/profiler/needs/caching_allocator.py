"""Torch's allocator on a GPU: what it would hold for a block that runs eagerly, told by replaying its allocations.

[Note: holes of one block] A block makes and frees dozens of tensors of different sizes. Torch's allocator cuts them out
of one range of memory for each of two kinds of sizes, which grows by pages and is not given back: a tensor goes into
the smallest free part that is large enough, free neighbours become one part, and the range grows only where no part is
large enough, by what its last part lacks. So what is reserved depends on the order of sizes, and for an eager
transformer layer it is a tenth more than its tensors at their peak. Compiled blocks allocate few and equal sizes.

Replayed are three blocks forward, then three backward with their recomputation, as a step has them: by then the range
does not grow any more. Graphs that are kept leave fewer holes, as they are taken and given in order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from hightide.stores.meter import Event

ROUND_BYTES = 512
SMALL_BYTES = 2**20  # tensors up to here have a range of their own
SMALL_PAGE_BYTES, PAGE_BYTES = 2 * 2**20, 20 * 2**20
NUM_BLOCKS = 3


@dataclass
class _Part:
    num_bytes: int
    owner: Hashable | None = None  # None: free


@dataclass
class _Range:
    """Of memory that only grows."""

    page_bytes: int
    parts: list[_Part] = field(default_factory=list)  # by address
    reserved_bytes: int = 0

    def take(self, owner: Hashable, num_bytes: int) -> None:
        part = None  # the smallest that is large enough
        for free in self.parts:
            if free.owner is None and free.num_bytes >= num_bytes and (part is None or free.num_bytes < part.num_bytes):
                part = free
        if part is None:
            part = self._grown(num_bytes)
        rest = part.num_bytes - num_bytes
        if rest >= ROUND_BYTES:
            part.num_bytes = num_bytes
            self.parts.insert(self._place(part) + 1, _Part(rest))
        part.owner = owner

    def give(self, owner: Hashable) -> None:
        place = next(place for place, part in enumerate(self.parts) if part.owner == owner)
        self.parts[place].owner = None
        for first in (place, place - 1):
            if 0 <= first < len(self.parts) - 1 and self.parts[first].owner is self.parts[first + 1].owner is None:
                self.parts[first].num_bytes += self.parts.pop(first + 1).num_bytes

    def _grown(self, num_bytes: int) -> _Part:
        if not self.parts or self.parts[-1].owner is not None:
            self.parts.append(_Part(0))
        last = self.parts[-1]
        more = -(-(num_bytes - last.num_bytes) // self.page_bytes) * self.page_bytes
        last.num_bytes += more
        self.reserved_bytes += more
        return last

    def _place(self, part: _Part) -> int:
        return next(place for place, other in enumerate(self.parts) if other is part)


class CachingAllocator:
    """Torch's, with segments that grow. See [Note: holes of one block]."""

    def __init__(self) -> None:
        self._small, self._large = _Range(SMALL_PAGE_BYTES), _Range(PAGE_BYTES)
        self._sizes: dict[Hashable, int] = {}
        self._live_bytes = self.peak_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return self._small.reserved_bytes + self._large.reserved_bytes

    @property
    def holes_bytes(self) -> int:
        """What is reserved beyond the peak, and not for the rest of the last page of each range."""
        return max(0, self.reserved_bytes - SMALL_PAGE_BYTES - PAGE_BYTES - self.peak_bytes)

    def take(self, owner: Hashable, num_bytes: int) -> None:
        size = max(1, -(-num_bytes // ROUND_BYTES)) * ROUND_BYTES
        self._sizes[owner] = size
        self._of(size).take(owner, size)
        self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def give(self, owner: Hashable) -> None:
        size = self._sizes.pop(owner)
        self._of(size).give(owner)
        self._live_bytes -= size

    def replay(self, events: Sequence[Event], run: Hashable) -> list[Hashable]:
        """The owners of what is left."""
        alive: dict[Hashable, None] = {}
        for event in events:
            owner = (run, event.storage)
            if event.num_bytes > 0:
                self.take(owner, event.num_bytes)
                alive[owner] = None
            elif owner in alive:
                self.give(owner)
                del alive[owner]
        return list(alive)

    def _of(self, num_bytes: int) -> _Range:
        return self._small if num_bytes <= SMALL_BYTES else self._large


def holes_of(forward: Sequence[Event], backward: Sequence[Event], outputs_bytes: int) -> int:
    """Of blocks in a row, each forward without a graph, and `backward` with its recomputation. What a block returns is
    as large as what it receives, as a rule."""
    allocator = CachingAllocator()
    results: list[Hashable] = []
    for number in range(NUM_BLOCKS):
        made = allocator.replay(forward, ("forward", number))
        for owner in results:
            allocator.give(owner)
        results = made
    for owner in results:
        allocator.give(owner)
    gradient: Hashable = ("gradient", NUM_BLOCKS)
    allocator.take(gradient, outputs_bytes)
    for number in reversed(range(NUM_BLOCKS)):
        allocator.take(("input", number), outputs_bytes)
        left = allocator.replay(backward, ("backward", number))
        for owner in (gradient, ("input", number)):
            allocator.give(owner)
        gradient = ("gradient", number)
        allocator.take(gradient, outputs_bytes)
        for owner in left:
            allocator.give(owner)
    return allocator.holes_bytes
