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
        self._first: dict[int, int] = {}
        self.first: Callable[[int], int | None] = self._first.get  # the first slot of a chunk, asked all the time
        self._fences: list[list[Fence]] = [[] for _ in range(num_slots)]  # of who used each slot since it was taken

    def width(self, chunk: int) -> int:
        return self._widths[chunk]

    def occupant(self, slot: int) -> int | None:
        return self._occupants[slot]

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
            end, occupants = first + self._widths[chunk], self._occupants
            assert end <= len(occupants), f"chunk {chunk} needs the slots {first} to {end - 1} of {len(occupants)}"
            fences: list[Fence] = []
            for slot in range(first, end):
                assert occupants[slot] in (None, chunk), f"slot {slot} still holds {occupants[slot]}"
                occupants[slot] = chunk
                if self._fences[slot]:
                    fences += [fence for fence in self._fences[slot] if fence not in fences]  # once, of wide ones
                    self._fences[slot] = []
            self._first[chunk] = first
            return fences

    def used_until(self, chunk: int, fence: Fence | None) -> None:
        """A stream works in the chunk's slots until this fence."""
        if fence is None:
            return
        with self._lock:
            first = self._first.get(chunk)
            if first is not None:
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
