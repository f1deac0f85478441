"""Which chunk occupies which slots. A chunk wider than a slot occupies consecutive ones."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hightide.planner.slots import choose_window


class SlotTable:
    """Occupancy of one pool of equal slots. Policy (which window to take) is the planner's `choose_window`."""

    def __init__(self, num_slots: int, widths: list[int]) -> None:
        self._lock = threading.Lock()
        self._occupants: list[int | None] = [None] * num_slots
        self._widths = widths
        self._first: dict[int, int] = {}  # chunk -> its first slot

    def first(self, chunk: int) -> int | None:
        return self._first.get(chunk)

    def occupants(self, first: int, chunk: int) -> set[int]:
        """Other chunks in the window that `chunk` would take from slot `first` on."""
        window = self._occupants[first : first + self._widths[chunk]]
        return {other for other in window if other is not None and other != chunk}

    def everyone(self) -> list[int]:
        return list(self._first)

    def fits(self, first: int, chunk: int) -> bool:
        return first + self._widths[chunk] <= len(self._occupants)

    def take(self, first: int, chunk: int) -> None:
        with self._lock:
            width = self._widths[chunk]
            assert self.fits(first, chunk), f"chunk {chunk} needs {width} slots from {first} of {len(self._occupants)}"
            assert not self.occupants(first, chunk), f"slot {first} still holds {self.occupants(first, chunk)}"
            self._occupants[first : first + width] = [chunk] * width
            self._first[chunk] = first

    def drop(self, chunk: int) -> None:
        with self._lock:
            first = self._first.pop(chunk, None)
            if first is not None:
                width = self._widths[chunk]
                self._occupants[first : first + width] = [None] * width

    def window_for(
        self,
        chunk: int,
        next_use: Callable[[int], float],
        last_use: Callable[[int], float],
        pinned: set[int],
    ) -> int | None:
        return choose_window(list(self._occupants), self._widths[chunk], next_use, last_use, pinned)
