"""Which byte ranges of an arena are free."""

from __future__ import annotations

from bisect import bisect_left


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
