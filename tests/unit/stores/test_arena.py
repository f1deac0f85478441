"""Where an arena's bytes lie: not in forked children, and never across the end of what is pinned."""

from __future__ import annotations

import mmap
import random
import sys

import pytest
import torch

from forked import run_script
from hightide.stores.host_arena import HostArena
from hightide.stores.pinned import PinnedArena
from hightide.stores.simulated import SimulatedAccelerator
from hightide.stores.store import OutOfMemory

KIB = 1024

# Forking belongs into a process of its own: this one has threads.
FORKING = """
import os
import torch
from hightide.stores.host_arena import HostArena
from hightide.stores.pinned import PinnedArena


def is_mapped(address):
    ranges = (line.split()[0].split("-") for line in open("/proc/self/maps"))
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


stores = [PinnedArena(1 << 20), HostArena(1 << 20)]
addresses = []
for store in stores:
    view = store.view(store.allocate(1 << 16, "data"), torch.uint8)
    view.fill_(1)
    addresses.append(view.data_ptr())
ordinary = torch.ones(1 << 22, dtype=torch.uint8)
assert all(is_mapped(address) for address in addresses)
child = os.fork()
if child == 0:
    os._exit(sum(is_mapped(address) for address in addresses) + 10 * is_mapped(ordinary.data_ptr()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="MADV_DONTFORK and /proc are Linux's")
def test_forked_children_do_not_inherit_the_arena() -> None:
    """A worker of a DataLoader would make every page that training writes exist twice."""
    run = run_script(FORKING, [], timeout_s=60)
    assert run.status == 0, run.stderr
    assert int(run.stdout) == 10, "ordinary memory is inherited (10), the two arenas are not (0)"


@pytest.mark.parametrize("pinned_bytes", [512, 1000, 20 * KIB, 20 * KIB + 1, 40 * KIB, 64 * KIB - 100, 64 * KIB])
def test_no_region_lies_across_the_end_of_what_is_pinned(pinned_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses to copy a region of which only a part is registered."""
    registered: list[int] = []
    monkeypatch.setattr(
        "hightide.stores.pinned._register", lambda address, num_bytes: registered.append(num_bytes) or 1
    )
    arena = PinnedArena(64 * KIB, pinned_bytes)
    with pytest.warns(UserWarning, match="could not be pinned"):
        arena.pin()
    (end,) = registered
    assert end >= pinned_bytes
    chance = random.Random(pinned_bytes)
    held, seen = [], set()
    for _ in range(400):
        if held and chance.random() < 0.4:
            arena.free(held.pop(chance.randrange(len(held))))
            continue
        try:
            region = arena.allocate(chance.randrange(1, 6 * KIB), "data")
        except OutOfMemory:
            continue
        held.append(region)
        assert region.offset + region.num_bytes <= end or region.offset >= end, (region, end)
        seen.add(region.offset < end)
    assert True in seen
    assert (False in seen) == (end < 64 * KIB), "both parts are given out, where there are two"


def test_the_pinned_part_is_given_whole_and_first() -> None:
    arena = PinnedArena(64 * KIB, 20 * KIB)
    assert arena.allocate(20 * KIB, "planned").offset == 0


def test_pages_inside_of_a_range_are_given_back_and_no_others() -> None:
    arena = HostArena(64 * KIB)
    region = arena.allocate(64 * KIB, "data")
    whole = arena.view(region, torch.uint8).fill_(1)
    arena.give_back(region, 5 * KIB, 22 * KIB)
    page = mmap.PAGESIZE
    begin, end = -(-5 * KIB // page) * page, 27 * KIB // page * page
    assert begin < end, "the test needs small pages"
    assert whole[begin:end].count_nonzero() == 0
    assert bool((whole[:begin] == 1).all()) and bool((whole[end:] == 1).all())
    arena.give_back(region, 100, 100)  # no whole page
    assert bool((whole[:begin] == 1).all())


def test_a_vacated_accelerator_can_be_filled_again_through_old_views() -> None:
    gpu = SimulatedAccelerator(64 * KIB)
    region = gpu.allocate(20 * KIB, "data")
    view = gpu.view(region, torch.uint8).fill_(1)
    gpu.vacate()
    assert view.count_nonzero() == 0
    gpu.reoccupy()
    view.fill_(2)
    assert bool((gpu.view(region, torch.uint8) == 2).all())
    assert gpu.used_bytes == 20 * KIB and gpu.is_alone


@pytest.mark.parametrize(
    "arena", [HostArena(64 * KIB), PinnedArena(96 * KIB, pinned_bytes=64 * KIB)], ids=["plain", "pinned"]
)
def test_what_comes_and_goes_at_both_ends_leaves_no_holes(arena: HostArena) -> None:
    """Inputs as large as two gradients, which park from the far end while inputs go: as many bytes at a time as there
    are. From one end, the first gradient in the place of an input would leave a hole that no input fits."""
    for _ in range(3):
        inputs = [arena.allocate(8 * KIB, f"input {at}") for at in range(8)]
        assert [one.offset for one in inputs] == [8 * KIB * at for at in range(8)]
        gradients = []
        for _ in range(8):
            arena.free(inputs.pop())
            gradients.append(arena.allocate_last(4 * KIB, "gradient"))
        assert [one.offset for one in gradients] == [64 * KIB - 4 * KIB * at for at in range(1, 9)]
        for at in range(8):
            arena.free(gradients.pop())
            inputs.append(arena.allocate(8 * KIB, f"input {at}")) if at < 4 else None
        for one in inputs:
            arena.free(one)
    arena.allocate(64 * KIB, "all of it")
    with pytest.raises(OutOfMemory):
        HostArena(4 * KIB).allocate_last(8 * KIB, "too much")
