"""Which byte ranges of an arena are free."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate


class FreeList:
    """First fit; neighbours are joined when freed. Runs are sorted by offset and never touch each other."""

    def __init__(self, num_bytes: int) -> None:
        self._offsets = [0] if num_bytes else []
        self._sizes = [num_bytes] if num_bytes else []

    @property
    def largest_bytes(self) -> int:
        return max(self._sizes, default=0)

    def take(self, num_bytes: int) -> int | None:
        """The offset of a range of this size, which is no longer free; None if no run is long enough."""
        for index, size in enumerate(self._sizes):
            if size >= num_bytes:
                offset = self._offsets[index]
                if size == num_bytes:
                    del self._offsets[index], self._sizes[index]
                else:
                    self._offsets[index] += num_bytes
                    self._sizes[index] -= num_bytes
                return offset
        return None

    def take_last(self, num_bytes: int, end: int) -> int | None:
        """As `take`, of all ranges before `end` the last one."""
        for index in reversed(range(len(self._offsets))):
            first, last = self._offsets[index], self._offsets[index] + self._sizes[index]
            offset = min(last, end) - num_bytes
            if offset >= first:
                return self._cut(index, offset, num_bytes)
        return None

    def take_from(self, num_bytes: int, begin: int) -> int | None:
        """As `take`, of all ranges from `begin` on the first one."""
        for index, first in enumerate(self._offsets):
            offset = max(first, begin)
            if offset + num_bytes <= first + self._sizes[index]:
                return self._cut(index, offset, num_bytes)
        return None

    def free_from(self, begin: int) -> list[tuple[int, int]]:
        """(offset, bytes) of all that is free from there on."""
        runs = ((max(first, begin), first + size) for first, size in zip(self._offsets, self._sizes, strict=True))
        return [(first, last - first) for first, last in runs if last > first]

    def _cut(self, index: int, offset: int, num_bytes: int) -> int:
        """Takes bytes out of a run."""
        first, last = self._offsets[index], self._offsets[index] + self._sizes[index]
        del self._offsets[index], self._sizes[index]
        for start, size in ((first, offset - first), (offset + num_bytes, last - offset - num_bytes)):
            if size:
                self.give(start, size)
        return offset

    def give(self, offset: int, num_bytes: int) -> None:
        index = bisect_left(self._offsets, offset)
        end = offset + num_bytes
        assert index == 0 or self._offsets[index - 1] + self._sizes[index - 1] <= offset, "freed bytes that were free"
        assert index == len(self._offsets) or end <= self._offsets[index], "freed bytes that were free"
        self._offsets.insert(index, offset)
        self._sizes.insert(index, num_bytes)
        self._join(index)
        if index:
            self._join(index - 1)

    def _join(self, index: int) -> None:
        """Joins a run with the next one if they touch."""
        if index + 1 < len(self._offsets) and self._offsets[index] + self._sizes[index] == self._offsets[index + 1]:
            self._sizes[index] += self._sizes[index + 1]
            del self._offsets[index + 1], self._sizes[index + 1]


class FreeLists:
    """Several arenas, one after the other. A range lies in one of them: the one with the most free bytes that has room,
    so that all are used alike."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._lists = [FreeList(size) for size in sizes]
        self._begins = list(accumulate(sizes, initial=0))[:-1]
        self._free_bytes = list(sizes)

    @property
    def largest_bytes(self) -> int:
        return max(one.largest_bytes for one in self._lists)

    def take(self, num_bytes: int) -> int | None:
        for index in sorted(range(len(self._lists)), key=lambda index: -self._free_bytes[index]):
            offset = self._lists[index].take(num_bytes)
            if offset is not None:
                self._free_bytes[index] -= num_bytes
                return self._begins[index] + offset
        return None

    def give(self, offset: int, num_bytes: int) -> None:
        index, inside = self.place(offset)
        self._lists[index].give(inside, num_bytes)
        self._free_bytes[index] += num_bytes

    def place(self, offset: int) -> tuple[int, int]:
        """In which arena, and where in it."""
        index = bisect_right(self._begins, offset) - 1
        return index, offset - self._begins[index]
