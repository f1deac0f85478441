"""Which chunk occupies which slots. A chunk wider than a slot occupies consecutive ones.

[Note: slots and streams] On a GPU a slot is free in this table as soon as the copy that empties it is enqueued, which
is before that copy has read it. The schedule orders takers behind leavers by dependencies, but only where the model
keeps to the plan. So the table remembers the fences of those who left a slot, and every taker joins them on its own
stream, planned or not: for a copy that is through this costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hightide.planner.slot_choice import choose_window
from hightide.stores.ticket import Fence


class SlotTable:
    """Occupancy of one pool of equal slots. Policy (which window to take) is the planner's `choose_window`."""

    def __init__(self, num_slots: int, widths: list[int]) -> None:
        self._lock = threading.Lock()
        self._occupants: list[int | None] = [None] * num_slots
        self._widths = widths
        self._first: dict[int, int] = {}  # chunk -> its first slot
        self._fences: list[list[Fence]] = [[] for _ in range(num_slots)]  # of who used each slot since it was taken

    def first(self, chunk: int) -> int | None:
        return self._first.get(chunk)

    def width(self, chunk: int) -> int:
        return self._widths[chunk]

    def occupants(self, first: int, chunk: int) -> set[int]:
        """Other chunks in the window that `chunk` would take from slot `first` on."""
        return set(self._occupants[first : first + self._widths[chunk]]) - {None, chunk}  # type: ignore[return-value]

    def everyone(self) -> list[int]:
        return list(self._first)

    def fits(self, first: int, chunk: int) -> bool:
        return first + self._widths[chunk] <= len(self._occupants)

    def take(self, first: int, chunk: int) -> list[Fence]:
        """Returns what the taker's stream has to join. See [Note: slots and streams]."""
        with self._lock:
            width = self._widths[chunk]
            assert self.fits(first, chunk), f"chunk {chunk} needs {width} slots from {first} of {len(self._occupants)}"
            assert not self.occupants(first, chunk), f"slot {first} still holds {self.occupants(first, chunk)}"
            fences: dict[int, Fence] = {}
            for slot in range(first, first + width):
                self._occupants[slot] = chunk
                fences.update({id(fence): fence for fence in self._fences[slot]})
                self._fences[slot] = []
            self._first[chunk] = first
            return list(fences.values())

    def used_until(self, chunk: int, fence: Fence | None) -> None:
        """A stream works in the chunk's slots until this fence."""
        with self._lock:
            first = self._first.get(chunk)
            if fence is not None and first is not None:
                for slot in range(first, first + self._widths[chunk]):
                    self._fences[slot].append(fence)

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
