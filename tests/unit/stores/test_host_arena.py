"""Regions at the far end of the host's memory."""

from __future__ import annotations

import pytest

from hightide.stores.host_arena import HostArena
from hightide.stores.pinned import PinnedArena
from hightide.stores.store import OutOfMemory

KIB = 1024


def test_both_ends_meet_and_leave_no_holes() -> None:
    arena = HostArena(16 * KIB)
    front, back = [], []
    for _ in range(4):
        front.append(arena.allocate(2 * KIB, "front"))
        back.append(arena.allocate_last(2 * KIB, "back"))
    assert [region.offset for region in back] == [14 * KIB, 12 * KIB, 10 * KIB, 8 * KIB]
    arena.free(front.pop())
    assert arena.allocate_last(2 * KIB, "back").offset == 6 * KIB
    with pytest.raises(OutOfMemory):
        arena.allocate_last(1, "too much")
    arena.close()


def test_what_a_plan_needs_is_pinned_and_the_rest_is_used_where_that_is_full() -> None:
    arena = PinnedArena(16 * KIB, pinned_bytes=8 * KIB)
    assert arena.allocate_last(4 * KIB, "parked").offset == 4 * KIB
    arena.allocate(4 * KIB, "inputs")
    assert arena.allocate_last(4 * KIB, "parked off the plan").offset >= 8 * KIB
    arena.close()
