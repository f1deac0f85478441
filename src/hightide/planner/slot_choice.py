"""Which slots a chunk gets. One policy with two callers: the lowering passes, and the runtime when it fetches on
demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from hightide.planner.infeasible import TooFewSlots

Occupants = Sequence[int | None]  # per slot the chunk in it; a wide chunk stands in several consecutive slots
Use = Callable[[int], float]  # chunk -> tick


def choose_window(
    occupants: Occupants, width: int, next_use: Use, last_use: Use, pinned: AbstractSet[int]
) -> int | None:
    """First slot of the best `width` consecutive slots, or None if pinned chunks leave no room.

    The best window is the one that is needed again last (an empty one is never needed again); among equals the one that
    has been idle longest, because its fetch can start earliest; then the lowest. Every occupant of the window must
    go."""
    best: tuple[float, float, int] | None = None
    for start in range(len(occupants) - width + 1):
        chunks = {chunk for chunk in occupants[start : start + width] if chunk is not None}
        if chunks & pinned:
            continue
        needed_again = min(map(next_use, chunks), default=math.inf)
        idle_since = max(map(last_use, chunks), default=-math.inf)
        score = (needed_again, -idle_since, -start)
        if best is None or score > best:
            best = score
    return None if best is None else -best[2]


def choose_windows(occupants: Occupants, needed: Mapping[int, int], next_use: Use, last_use: Use) -> dict[int, int]:
    """Windows (first slots) for all chunks that one tick needs at once; `needed` maps each chunk to its width.

    Chunks that are in already stay and are left out of the answer. Only if they fragment the slots so that the others
    find no window, all are placed afresh from slot 0 on: that works whenever the widths add up to no more than there
    are slots."""
    room = list(occupants)
    pinned = {chunk for chunk in needed if chunk in room}
    windows: dict[int, int] = {}
    for chunk in sorted(needed.keys() - pinned, key=lambda chunk: (-needed[chunk], chunk)):
        start = choose_window(room, needed[chunk], next_use, last_use, pinned)
        if start is None:
            return _pack(needed, len(occupants))
        leaving = set(room[start : start + needed[chunk]])
        room = [None if entry in leaving else entry for entry in room]
        room[start : start + needed[chunk]] = [chunk] * needed[chunk]
        pinned.add(chunk)
        windows[chunk] = start
    return windows


def _pack(needed: Mapping[int, int], num_slots: int) -> dict[int, int]:
    if (total := sum(needed.values())) > num_slots:
        raise TooFewSlots(
            f"one block needs {total} slots at once for its chunks {sorted(needed)}, the plan has {num_slots}; raise "
            "num_slots or num_grad_slots in the plan",
            total,
        )
    windows: dict[int, int] = {}
    end = 0
    for chunk, width in sorted(needed.items(), key=lambda item: (-item[1], item[0])):
        windows[chunk] = end
        end += width
    return windows
