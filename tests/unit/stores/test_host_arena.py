"""Regions at the far end of the host's memory, and what is lent beyond what a plan needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import PAGESIZE

import pytest
import torch

from hightide.stores import host_arena, pinned
from hightide.stores.host_arena import LENT, HostArena
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


def test_what_is_lent_lies_beyond_the_plan_and_never_exceeds_the_limit() -> None:
    arena = HostArena(16 * KIB, needed_bytes=6 * KIB)
    assert arena.spare_bytes == 10 * KIB
    lent = [arena.lend(4 * KIB), arena.lend(4 * KIB)]
    assert [region.offset for region in lent if region is not None] == [6 * KIB, 10 * KIB]
    assert arena.lend(4 * KIB) is None and arena.spare_bytes == 2 * KIB
    assert arena.allocate_last(2 * KIB, "parked").offset == 4 * KIB and arena.allocate(4 * KIB, "inputs").offset == 0
    assert arena.peak_bytes <= arena.capacity_bytes and arena.breakdown()[LENT] == 8 * KIB
    arena.close()


def test_what_is_lent_comes_in_huge_pages_which_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what the plan needs, and not before somebody asks."""
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(HostArena, "_prefer_huge_pages", lambda _, begin, size: advised.append((begin, size)))
    arena = HostArena(4 * PAGESIZE, needed_bytes=PAGESIZE + KIB)
    assert advised == [(0, 0)]
    for _ in range(2):
        region = arena.lend(2 * PAGESIZE)
        assert region is not None
        view = arena.view(region, torch.uint8).fill_(7)
        arena.free(region)
    assert advised[1:] == [(2 * PAGESIZE, 2 * PAGESIZE)] and bool((view == 7).all())
    arena.close()


def test_who_needs_what_is_lent_waits_until_it_is_given_back() -> None:
    arena = HostArena(16 * KIB, needed_bytes=8 * KIB)
    lent = [arena.lend(2 * KIB) for _ in range(4)]
    threads = [threading.Timer(0.05 * number, arena.free, [region]) for number, region in enumerate(lent, 1)]
    for thread in threads:
        thread.start()
    region = arena.allocate(12 * KIB, "off the plan")
    assert region.num_bytes == 12 * KIB and arena.breakdown()[LENT] <= 4 * KIB
    for thread in threads:
        thread.join()
    assert arena.spare_bytes == 4 * KIB and LENT not in arena.breakdown()
    with pytest.raises(OutOfMemory):
        arena.allocate(8 * KIB, "more than there is")
    arena.close()


def test_nothing_is_lent_while_somebody_waits_for_it() -> None:
    arena = HostArena(8 * KIB, needed_bytes=0)
    lent = arena.lend(6 * KIB)
    assert lent is not None
    waiting = threading.Thread(target=arena.allocate, args=(4 * KIB, "off the plan"))
    waiting.start()
    while not arena._num_recalls:
        time.sleep(0.001)
    assert arena.lend(1 * KIB) is None
    arena.free(lent)
    waiting.join()
    assert arena.lend(1 * KIB) is not None
    arena.close()


def test_who_waits_in_vain_is_told_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "DEFAULT_TIMEOUT_S", 0.05)
    arena = HostArena(8 * KIB, needed_bytes=0)
    arena.lend(6 * KIB)
    with pytest.raises(OutOfMemory, match=LENT):
        arena.allocate(4 * KIB, "off the plan")
    arena.close()


def test_spare_memory_is_pinned_in_slices_that_no_region_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[int, int] = {}
    monkeypatch.setattr(pinned, "_register", lambda address, num_bytes: registered.update({address: num_bytes}) or 0)
    monkeypatch.setattr(pinned, "_unregister", lambda address, *_: registered.pop(address))
    monkeypatch.setattr(pinned, "SLICE_BYTES", 4 * PAGESIZE)
    arena = PinnedArena(32 * PAGESIZE, pinned_bytes=2 * PAGESIZE + 512)
    assert not arena.pin_spare(PAGESIZE), "what the plan needs is not pinned"
    arena.pin()
    while arena.pin_spare(10 * PAGESIZE):
        pass
    base = arena._base
    assert [*registered.values()] == [2 * PAGESIZE + 512, 4 * PAGESIZE, 4 * PAGESIZE, 2 * PAGESIZE]
    pages = [page for at, size in registered.items() for page in range(at // PAGESIZE, -(-(at + size) // PAGESIZE))]
    assert len(pages) == len(set(pages)), "CUDA refuses to register a page twice"
    regions = []
    while (region := arena.lend(1536)) is not None:
        regions.append(region)
        first, last = base + region.offset, base + region.offset + region.num_bytes
        inside = [at for at, size in registered.items() if at <= first and last <= at + size]
        overlaps = [at for at, size in registered.items() if first < at + size and at < last]
        assert inside == overlaps and arena.is_pinned_at(region) == bool(inside)
    assert {arena.is_pinned_at(region) for region in regions} == {True, False}
    for region in regions:
        arena.free(region)
    assert not arena.pin_spare(10 * PAGESIZE), "it is pinned already"
    arena.close()
    assert not registered


def test_memory_is_pinned_for_its_own_gpu_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's first GPU is number 0, whatever the process trains on."""
    present = threading.local()
    seen: list[tuple[str, int]] = []

    @contextmanager
    def device(place: torch.device) -> Iterator[None]:
        present.index = place.index
        yield
        present.index = 0

    class Cudart:
        def cudaHostRegister(self, *_: int) -> int:
            seen.append(("register", present.index))
            return 0 if len(seen) < 3 else 2

        def cudaHostUnregister(self, _: int) -> None:
            seen.append(("unregister", present.index))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append(("synchronize", present.index)))
    monkeypatch.setattr(pinned, "_forget_error", lambda: seen.append(("forget", present.index)))
    monkeypatch.setattr(pinned, "SLICE_BYTES", 4 * PAGESIZE)
    arena = PinnedArena(32 * PAGESIZE, pinned_bytes=2 * PAGESIZE, device=torch.device("cuda", 3))
    arena.pin()
    saver = threading.Thread(target=lambda: [arena.pin_spare(10 * PAGESIZE) for _ in range(2)])
    saver.start()
    saver.join()
    arena.close()
    assert [what for what, _ in seen] == [*["register"] * 3, "forget", *["synchronize", "unregister"] * 2]
    assert {index for _, index in seen} == {3}


def test_where_no_more_can_be_pinned_it_is_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([0, 2])
    monkeypatch.setattr(pinned, "_register", lambda address, num_bytes: next(answers))
    monkeypatch.setattr(pinned, "_unregister", lambda address, *_: None)
    arena = PinnedArena(32 * PAGESIZE, pinned_bytes=2 * PAGESIZE)
    arena.pin()
    spare_bytes = arena.spare_bytes
    assert not arena.pin_spare(4 * PAGESIZE) and not arena.pin_spare(4 * PAGESIZE)
    assert arena.spare_bytes == spare_bytes
    region = arena.lend(PAGESIZE)
    assert region is not None and not arena.is_pinned_at(region)
    arena.close()
