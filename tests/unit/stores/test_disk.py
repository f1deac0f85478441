"""The disk store beyond what every store does: alignment, several disks, threads, counts, its end."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import run_script
from hightide.ir.chunk import region_bytes
from hightide.ir.limits import DiskLimit
from hightide.ir.tier import Tier
from hightide.stores import disk_file
from hightide.stores.disk import DiskStore
from hightide.stores.disk_file import PageBuffer
from hightide.stores.disk_requests import BUFFER_BYTES, Traffic
from hightide.stores.store import OutOfMemory, Store

SECTOR = 4096
MIB = 1 << 20
WAIT_S = 60.0  # a disk may be busy with others


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., DiskStore]]:
    made: list[DiskStore] = []

    def make(num_bytes: int = MIB, **options: Any) -> DiskStore:
        made.append(DiskStore([DiskLimit(str(tmp_path), num_bytes)], **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


def aligned(num_bytes: int, shift: int = 0) -> torch.Tensor:
    return torch.frombuffer(PageBuffer(num_bytes + SECTOR).memory, dtype=torch.uint8)[shift : shift + num_bytes]


def noise(num_bytes: int, shift: int = 0, seed: int = 0) -> torch.Tensor:
    memory = aligned(num_bytes, shift)
    return memory.copy_(torch.randint(256, (num_bytes,), generator=torch.Generator().manual_seed(seed)))


def put(store: Store, values: torch.Tensor, label: str = "data") -> Any:
    region = store.allocate(values.nbytes, label)
    store.write(region, values).wait(WAIT_S)
    return region


def got(store: Store, region: Any) -> torch.Tensor:
    into = torch.empty(region.num_bytes, dtype=torch.uint8)
    store.read(region, into).wait(WAIT_S)
    return into


@pytest.mark.parametrize("is_direct", [True, False])
def test_any_part_from_any_memory(make: Callable[..., DiskStore], is_direct: bool) -> None:
    """Against bytes in memory, with requests so small that most parts are several."""
    store = make(is_direct=is_direct, request_bytes=2 * SECTOR)
    if is_direct and not store.is_direct:
        pytest.skip("the file system of the tests has no direct transfers")
    assert store.is_direct is is_direct
    num_bytes = 20 * SECTOR + 1000
    region, expected = store.allocate(num_bytes, "data"), torch.zeros(num_bytes, dtype=torch.uint8)
    around = [put(store, noise(SECTOR, seed=seed)) for seed in range(2)]
    chance = random.Random(0)
    edges = [0, 1, SECTOR - 1, SECTOR, SECTOR + 1, 7 * SECTOR, num_bytes - 1000, num_bytes - 1, num_bytes]
    for turn in range(150):
        start, stop = sorted(chance.choice([*edges, chance.randrange(num_bytes)]) for _ in range(2))
        shift = chance.choice([0, start % SECTOR, 8, chance.randrange(SECTOR)])
        if turn % 2:
            expected[start:stop] = source = noise(stop - start, shift, seed=turn)
            store.write(region, source, start).wait(WAIT_S)
        else:
            into = aligned(stop - start, shift)
            store.read(region, into, start).wait(WAIT_S)
            assert torch.equal(into, expected[start:stop]), (start, stop, shift)
    assert torch.equal(got(store, region), expected)
    for seed, one in enumerate(around):
        assert torch.equal(got(store, one), noise(SECTOR, seed=seed))


@pytest.mark.parametrize("how", ["strided", "expanded rows", "conjugate", "parameter", "inference"])
def test_odd_tensors(make: Callable[..., DiskStore], how: str) -> None:
    store = make(16 * MIB)
    values = torch.arange(BUFFER_BYTES // 4 + 1000, dtype=torch.float32)
    if how == "strided":
        values = torch.arange(2 * BUFFER_BYTES // 4, dtype=torch.float32).view(-1, 1024).t()
    elif how == "expanded rows":
        values = torch.arange(1000.0).expand(3, 1000)
    elif how == "conjugate":
        values = torch.complex(values[:500], values[500:1000]).conj()
    elif how == "parameter":
        values = torch.nn.Parameter(values)
    elif how == "inference":
        with torch.inference_mode():
            values = values + 1
    region = store.allocate(values.nbytes, "data")
    store.write(region, values).wait(WAIT_S)
    into = torch.empty(values.shape, dtype=values.dtype)
    store.read(region, into).wait(WAIT_S)
    assert torch.equal(into, values.resolve_conj())
    back = torch.empty(values.shape[::-1], dtype=values.dtype).permute(*range(values.ndim - 1, -1, -1))
    store.read(region, back).wait(WAIT_S)
    assert torch.equal(back, into)


def test_nothing_is_moved_at_once(make: Callable[..., DiskStore]) -> None:
    store = make()
    region = store.allocate(SECTOR, "data")
    store.write(region, torch.empty(0)).wait(WAIT_S)
    store.read(region, torch.empty(0), SECTOR).wait(WAIT_S)
    assert store.traffic == Traffic()


def test_aligned_tensors_go_straight_and_bytes_are_counted(
    make: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(request_bytes=16 * SECTOR)
    values = noise(40 * SECTOR + 8)
    addresses = [values.data_ptr() + at * SECTOR for at in range(41)]
    seen: list[tuple[int, int, int]] = []
    real = os.pwritev

    def pwritev(descriptor: int, buffers: Any, offset: int) -> int:
        view = torch.frombuffer(buffers[0], dtype=torch.uint8)
        seen.append((view.data_ptr(), len(view), offset))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    region = put(store, values)
    straight = [one for one in seen if one[0] in addresses]
    assert sorted(size for _, size, _ in straight) == [12 * SECTOR, 14 * SECTOR, 14 * SECTOR]
    assert len(seen) == 4 and all(address % SECTOR == size % SECTOR == at % SECTOR == 0 for address, size, at in seen)
    assert store.traffic == Traffic(asked_written_bytes=40 * SECTOR + 8, written_bytes=41 * SECTOR)
    got(store, region)
    assert store.traffic.asked_read_bytes == 40 * SECTOR + 8 and store.traffic.read_bytes == 41 * SECTOR


def test_neighbours_in_one_sector_are_written_at_once(make: Callable[..., DiskStore]) -> None:
    store = make(depth=8)
    num_bytes, size = 4 * SECTOR, 48
    region, expected = store.allocate(num_bytes, "states"), torch.zeros(num_bytes, dtype=torch.uint8)
    for turn in range(4):
        parts = [noise(size, seed=turn * 1000 + at) for at in range(0, num_bytes - size, size)]
        tickets = [store.write(region, part, index * size) for index, part in enumerate(parts)]
        for index, (ticket, part) in enumerate(zip(tickets, parts, strict=True)):
            ticket.wait(WAIT_S)
            expected[index * size : (index + 1) * size] = part
        assert torch.equal(got(store, region), expected)


def test_requests_of_a_kind_and_both_kinds_run_together(
    make: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(depth=2)
    regions = [put(store, noise(SECTOR, seed=seed)) for seed in range(4)]
    meet = threading.Barrier(4)  # two reads and two writes, or it breaks
    real = {name: getattr(os, name) for name in ("preadv", "pwritev")}
    for name in real:

        def call(*args: Any, name: str = name) -> int:
            meet.wait(WAIT_S)
            return int(real[name](*args))

        monkeypatch.setattr(os, name, call)
    memory = [aligned(SECTOR) for _ in regions]
    moves = (store.read, store.read, store.write, store.write)
    for ticket in [move(*pair) for move, pair in zip(moves, zip(regions, memory, strict=True), strict=True)]:
        ticket.wait(WAIT_S)
    assert torch.equal(memory[1], noise(SECTOR, seed=1))


def test_regions_spread_over_disks_and_lie_on_one(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    store = DiskStore([DiskLimit(str(folders[0]), 64 * SECTOR), DiskLimit(str(folders[1]), 32 * SECTOR)])
    assert store.capacity_bytes == 96 * SECTOR
    with pytest.raises(OutOfMemory):
        store.allocate(65 * SECTOR, "too large for each")
    regions = [store.allocate(8 * SECTOR, f"r{index}") for index in range(12)]
    on_first = [region for region in regions if region.offset < 64 * SECTOR]
    assert len(on_first) == 8 and all(region.offset + 8 * SECTOR <= 64 * SECTOR for region in on_first)
    assert {region.offset < 64 * SECTOR for region in regions[4:8]} == {True, False}  # by turns, once both are as full
    for seed, region in enumerate(regions):
        store.write(region, noise(8 * SECTOR, seed=seed)).wait(WAIT_S)
    for seed, region in enumerate(regions):
        assert torch.equal(got(store, region), noise(8 * SECTOR, seed=seed))
    with pytest.raises(OutOfMemory):
        store.allocate(1, "more")
    store.close()


def test_what_was_never_written_reads_as_zeros(make: Callable[..., DiskStore]) -> None:
    store = make()
    assert not got(store, store.allocate(10 * SECTOR + 5, "fresh")).any()


def test_bad_sizes(tmp_path: Path) -> None:
    limit = DiskLimit(str(tmp_path), MIB)
    for options in ({"request_bytes": 1000}, {"request_bytes": 0}, {"depth": 0}):
        with pytest.raises(ValueError, match="multiple of 4096"):
            DiskStore([limit], **options)
    with pytest.raises(ValueError, match=r"10 bytes on .*give 4096 at least"):
        DiskStore([limit, DiskLimit(str(tmp_path), 10)])
    with pytest.raises(ValueError, match="more than zero"):
        DiskStore([])


def test_through_the_page_cache_it_says_so_once(
    make: Callable[..., DiskStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_file, "_try_direct", lambda descriptor: "the cable is too short")
    with pytest.warns(UserWarning, match="the cable is too short") as caught:
        store = make()
    assert len(caught) == 1 and str(tmp_path) in str(caught[0].message) and not store.is_direct
    values = noise(3 * SECTOR + 1)
    assert torch.equal(got(store, put(store, values)), values)


def open_files(folder: Path) -> int:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of the listing itself
            found.append(os.readlink(link))
    return sum(str(folder) in target for target in found)


@pytest.fixture
def others() -> set[threading.Thread]:
    """Threads of other tests' stores, which may be about to end."""
    gc.collect()
    return set(threading.enumerate())


def disk_threads(others: set[threading.Thread]) -> list[str]:
    mine = set(threading.enumerate()) - others
    return sorted(thread.name for thread in mine if thread.name.startswith("hightide-disk"))


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_threads_and_descriptors_go_with_the_store(
    others: set[threading.Thread], make: Callable[..., DiskStore], tmp_path: Path, how: str
) -> None:
    num_threads = torch.get_num_threads()
    store = DiskStore([DiskLimit(str(tmp_path), MIB)])
    assert open_files(tmp_path) == 1 and len(disk_threads(others)) == 9 and torch.get_num_threads() == num_threads
    values = noise(SECTOR)
    put(store, values)
    if how == "closed":
        store.close()
    del store
    gc.collect()
    assert disk_threads(others) == [] and open_files(tmp_path) == 0
    assert torch.equal(values, noise(SECTOR))


def test_close_refuses_what_waits_and_ends_what_runs(
    others: set[threading.Thread], make: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(depth=1)
    regions = [put(store, noise(SECTOR, seed=seed)) for seed in range(3)]
    began, go_on = threading.Event(), threading.Event()
    real = os.preadv

    def preadv(*args: Any) -> int:
        began.set()
        go_on.wait(WAIT_S)
        return real(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    memory = [aligned(SECTOR) for _ in regions]
    tickets = [store.read(region, into) for region, into in zip(regions, memory, strict=True)]
    began.wait(WAIT_S)
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    for ticket in tickets[1:]:
        with pytest.raises(RuntimeError, match="closed before"):
            ticket.wait(WAIT_S)
    go_on.set()
    tickets[0].wait(WAIT_S)
    assert torch.equal(memory[0], noise(SECTOR))
    closing.join(WAIT_S)
    assert not closing.is_alive() and disk_threads(others) == []


FORKING = """
import os, sys, torch
from hightide.ir.limits import DiskLimit
from hightide.ir.tier import Tier
from hightide.ir.chunk import region_bytes
from hightide.stores.disk import DiskStore

store = DiskStore([DiskLimit(sys.argv[1], 1 << 20)])
region = store.allocate(4096, "data")
store.write(region, torch.ones(1024)).wait(60)
def links():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass  # the list's own
    return [one for one in found if one.startswith(sys.argv[1])]
assert len(links()) == 1, links()
child = os.fork()
if not child:
    try:
        assert links() == [], links()  # a child that lives on does not keep the space
        store.read(region, torch.zeros(1024))
    except RuntimeError as error:
        assert "is a fork" in str(error)
        store.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
into = torch.zeros(1024)
store.read(region, into).wait(60)
assert bool((into == 1).all())
if not os.fork():
    sys.exit(0)  # with all that Python does at the end
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
store.read(region, into).wait(60)
print("parent is well")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks threads of Linux")
def test_a_fork_cannot_use_it_and_does_no_harm(tmp_path: Path) -> None:
    done = run_script(FORKING, [str(tmp_path)], timeout_s=110)
    assert (done.status, done.stdout) == (0, "parent is well\n"), done.stderr


def test_it_sets_aside_what_plans_count(make: Callable[..., DiskStore]) -> None:
    store = make()
    for num_bytes in (1, 511, SECTOR, SECTOR + 1, 10 * SECTOR - 1):
        before = store.used_bytes
        store.allocate(num_bytes, "data")
        assert store.used_bytes - before == region_bytes(num_bytes, Tier.DISK)
    assert region_bytes(513, Tier.HOST) == region_bytes(513) == 1024
