"""What every store must do, whatever its tier. A new store is one more factory."""

from __future__ import annotations

import gc
import os
import random
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from file_store import FileStore
from hightide.ir.limits import DiskLimit
from hightide.stores import pinned
from hightide.stores.cuda import CudaAccelerator
from hightide.stores.disk import DiskStore
from hightide.stores.host_arena import HostArena
from hightide.stores.pinned import PinnedArena
from hightide.stores.simulated import SimulatedAccelerator
from hightide.stores.store import MemoryStore, OutOfMemory, Region, Store
from hightide.stores.ticket import Ticket

KIB = 1024
WAIT_S = 60.0  # a disk may be busy with others


def cuda(capacity_bytes: int) -> Store:
    return CudaAccelerator(capacity_bytes, torch.device("cuda"), slab_bytes=capacity_bytes)


def registered(capacity_bytes: int) -> Store:
    store = PinnedArena(capacity_bytes)
    store.pin()
    assert store.is_pinned
    return store


def refused(capacity_bytes: int) -> Store:
    store = PinnedArena(capacity_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "_register", lambda address, num_bytes: 2)
        with pytest.warns(UserWarning, match=rf"{capacity_bytes} bytes.*could not be pinned.*ulimit -l"):
            store.pin()
    assert not store.is_pinned
    return store


def disk(*more_bytes: int, **options: bool) -> Callable[[int], Store]:
    """A store on the disk of the tests, with further folders."""

    def make(capacity_bytes: int) -> Store:
        with ExitStack() as folders:  # which may go: the files have no names
            sizes = [capacity_bytes, *more_bytes]
            limits = [DiskLimit(folders.enter_context(tempfile.TemporaryDirectory()), size) for size in sizes]
            return DiskStore(limits, capacity_bytes, request_bytes=8 * KIB, **options)

    return make


FACTORIES: dict[str, Callable[[int], Store]] = {
    "simulated": SimulatedAccelerator,
    "host": HostArena,
    "not yet pinned": PinnedArena,
    "pinning refused": refused,
    "file": FileStore,
    "disk": disk(),
    "disk through the page cache": disk(is_direct=False),
    "disk without sums": disk(are_checked=False),
    "disk in two folders": disk(8 * KIB),
    "cuda": cuda,
    "pinned": registered,
}
NO_MEMORY = ("file", *(name for name in FACTORIES if name.startswith("disk")))
NEED_CUDA = ("cuda", "pinned")
ALL = [pytest.param(name, marks=[pytest.mark.gpu] if name in NEED_CUDA else []) for name in FACTORIES]
WITH_VIEWS = [param for param in ALL if param.values[0] not in NO_MEMORY]


@pytest.fixture(params=ALL)
def factory(request: pytest.FixtureRequest) -> Callable[[int], Store]:
    return FACTORIES[request.param]


@pytest.fixture
def store(factory: Callable[[int], Store]) -> Iterator[Store]:
    store = factory(64 * KIB)
    yield store
    store.close()


@pytest.fixture(params=WITH_VIEWS)
def memory(request: pytest.FixtureRequest) -> Iterator[MemoryStore]:
    store = FACTORIES[request.param](64 * KIB)
    assert isinstance(store, MemoryStore)
    yield store
    store.close()


def filled(store: Store, region: Region, value: int) -> None:
    store.write(region, torch.full((region.num_bytes,), value, dtype=torch.uint8)).wait(timeout_s=WAIT_S)


def values(store: Store, region: Region) -> torch.Tensor:
    into = torch.zeros(region.num_bytes, dtype=torch.uint8)
    store.read(region, into).wait(timeout_s=WAIT_S)
    return into


def test_allocations_are_aligned_apart_and_counted(store: Store) -> None:
    unit = store.align_bytes
    sizes = [1, unit - 1, unit, unit + 1, 8 * unit - 96]
    regions = [store.allocate(size, f"r{size}") for size in sizes]
    ends = [region.offset + region.num_bytes for region in regions]
    assert all(region.offset % unit == 0 for region in regions)
    assert all(end <= region.offset for end, region in zip(ends, regions[1:], strict=False))
    assert [region.num_bytes for region in regions] == sizes
    assert store.used_bytes == (1 + 1 + 1 + 2 + 8) * unit
    assert store.breakdown()[f"r{unit + 1}"] == 2 * unit


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_an_empty_allocation_is_refused(store: Store, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="cannot allocate"):
        store.allocate(num_bytes, "nothing")


def test_a_store_needs_a_capacity(factory: Callable[[int], Store]) -> None:
    with pytest.raises(ValueError, match="more than zero"):
        factory(0)


def test_exhaustion_says_the_numbers_and_harms_nothing(store: Store) -> None:
    kept = store.allocate(40 * KIB, "weights")
    filled(store, kept, 7)
    with pytest.raises(OutOfMemory) as caught:
        store.allocate(28 * KIB, "too much")
    error = caught.value
    assert (error.tier, error.requested_bytes, error.used_bytes) == (store.tier, 28 * KIB, 40 * KIB)
    assert (error.capacity_bytes, error.largest_free_bytes) == (64 * KIB, 24 * KIB)
    assert error.breakdown == {"weights": 40 * KIB}
    for words in ("too much", str(28 * KIB), str(40 * KIB), str(64 * KIB), "weights 40.0 KiB", f"Limits({store.tier}"):
        assert words in str(error)
    assert store.used_bytes == store.peak_bytes == 40 * KIB
    assert bool((values(store, kept) == 7).all())
    store.allocate(24 * KIB, "just right")
    assert store.used_bytes == store.capacity_bytes


def test_freed_bytes_are_reused(store: Store) -> None:
    regions = [store.allocate(16 * KIB, "r") for _ in range(4)]
    store.free(regions[2])
    assert store.used_bytes == 48 * KIB
    assert store.allocate(16 * KIB, "again").offset == regions[2].offset


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 2, 0), (0, 2, 1, 3)])
def test_freed_neighbours_become_one_run(store: Store, order: tuple[int, ...]) -> None:
    regions = [store.allocate(16 * KIB, "r") for _ in range(4)]
    for index in order:
        store.free(regions[index])
    assert store.used_bytes == 0
    assert store.allocate(64 * KIB, "all").offset == 0


def test_fragmentation_names_the_largest_free_run(store: Store) -> None:
    regions = [store.allocate(8 * KIB, "r") for _ in range(8)]
    for region in regions[::2]:
        store.free(region)
    with pytest.raises(OutOfMemory, match=f"largest free run is {8 * KIB} bytes"):
        store.allocate(16 * KIB, "whole")


def test_double_free_and_foreign_regions_are_refused(store: Store, factory: Callable[[int], Store]) -> None:
    region = store.allocate(KIB, "mine")
    store.free(region)
    with pytest.raises(ValueError, match="freed"):
        store.free(region)
    again = store.allocate(KIB, "mine")
    assert again == region
    with pytest.raises(ValueError, match="freed"):  # equal, but not the one that is allocated
        store.free(region)
    with pytest.raises(ValueError, match="another store"):
        store.free(Region(again.offset, KIB, "mine"))
    other = factory(64 * KIB)
    with pytest.raises(ValueError, match="another store"):
        other.read(again, torch.zeros(1))
    other.close()
    assert store.used_bytes == -(-KIB // store.align_bytes) * store.align_bytes


def test_free_later_frees_at_the_next_question(store: Store) -> None:
    region = store.allocate(64 * KIB, "stash")
    store.free_later(region)
    assert store.allocate(64 * KIB, "next").offset == 0
    assert store.used_bytes == 64 * KIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_what_is_written_is_read(store: Store, dtype: torch.dtype) -> None:
    source = torch.arange(96).to(dtype).reshape(8, 12)
    store.allocate(KIB, "before")
    region = store.allocate(source.nbytes, "data")
    ticket = store.write(region, source)
    assert isinstance(ticket, Ticket)
    ticket.wait(timeout_s=WAIT_S)
    into = torch.zeros_like(source)
    store.read(region, into).wait(timeout_s=WAIT_S)
    assert torch.equal(into, source)


def test_strided_tensors_are_read_and_written_by_value(store: Store) -> None:
    source = torch.arange(12.0).reshape(3, 4).t()
    region = store.allocate(48, "data")
    store.write(region, source).wait(timeout_s=WAIT_S)
    into = torch.zeros(3, 4).t()
    store.read(region, into).wait(timeout_s=WAIT_S)
    assert torch.equal(into, source)


def test_offsets_address_parts(store: Store) -> None:
    region = store.allocate(64, "data")
    store.write(region, torch.arange(16, dtype=torch.float32)).wait(timeout_s=WAIT_S)
    store.write(region, torch.tensor([50.0, 60.0]), offset_bytes=20).wait(timeout_s=WAIT_S)
    into = torch.zeros(4)
    store.read(region, into, offset_bytes=16).wait(timeout_s=WAIT_S)
    assert into.tolist() == [4.0, 50.0, 60.0, 7.0]


def test_bounds_are_checked_at_once(store: Store) -> None:
    region = store.allocate(64, "data")
    calls: list[Callable[[], object]] = [
        lambda: store.write(region, torch.zeros(17)),
        lambda: store.read(region, torch.zeros(16), offset_bytes=4),
        lambda: store.read(region, torch.zeros(1), offset_bytes=-4),
        lambda: store.write(region, torch.zeros(1), offset_bytes=2),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="data"):
            call()


def test_a_freed_region_has_no_bytes(store: Store) -> None:
    region = store.allocate(64, "data")
    store.free(region)
    for call in (lambda: store.read(region, torch.zeros(1)), lambda: store.write(region, torch.zeros(1))):
        with pytest.raises(ValueError, match="freed"):
            call()


def broken_calls(store: Store) -> list[tuple[object, str]]:
    """What moves its bytes in the end."""
    if isinstance(store, DiskStore):
        return [(os, "preadv"), (os, "pwritev")]
    return [(store, "_copy" if isinstance(store, MemoryStore) else "_transfer")]


def test_an_error_in_flight_is_raised_by_the_ticket(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    region = store.allocate(64, "data")
    broken = OSError("the cable fell out")

    def fail(*_: object) -> None:
        raise broken

    for owner, name in broken_calls(store):
        monkeypatch.setattr(owner, name, fail)
    for ticket in (store.read(region, torch.zeros(4)), store.write(region, torch.zeros(4))):
        with pytest.raises(OSError) as caught:
            ticket.wait(timeout_s=WAIT_S)
        assert ticket.done and ticket.error is caught.value is broken
    monkeypatch.undo()
    store.write(region, torch.ones(16)).wait(timeout_s=WAIT_S)  # the store itself is well
    assert bool((values(store, region).view(torch.float32) == 1.0).all())


def test_peak_is_the_most_in_use_and_knows_its_parts(store: Store) -> None:
    first = store.allocate(16 * KIB, "a")
    second = store.allocate(16 * KIB, "b")
    store.free(first)
    store.allocate(8 * KIB, "c")
    assert (store.used_bytes, store.peak_bytes) == (24 * KIB, 32 * KIB)
    assert store.peak_breakdown() == {"a": 16 * KIB, "b": 16 * KIB}
    store.reset_peak()
    assert (store.peak_bytes, store.peak_breakdown()) == (24 * KIB, {"b": 16 * KIB, "c": 8 * KIB})
    store.free(second)
    assert (store.peak_bytes, store.peak_breakdown()) == (24 * KIB, {"b": 16 * KIB, "c": 8 * KIB})
    assert store.breakdown() == {"c": 8 * KIB}


def test_close_is_final_and_idempotent(store: Store) -> None:
    region = store.allocate(64, "data")
    store.close()
    store.close()
    assert store.used_bytes == 0
    for call in (
        lambda: store.allocate(64, "more"),
        lambda: store.read(region, torch.zeros(4)),
        lambda: store.write(region, torch.zeros(4)),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    store.free(region)  # owners may still clean up behind it


def test_many_threads_never_share_bytes(store: Store) -> None:
    problems: list[BaseException] = []

    def hammer(seed: int) -> None:
        chance = random.Random(seed)
        held: list[tuple[Region, int]] = []
        try:
            for turn in range(150):
                if held and chance.random() < 0.5:
                    region, value = held.pop(chance.randrange(len(held)))
                    into = torch.zeros(region.num_bytes, dtype=torch.uint8)
                    store.read(region, into).wait(timeout_s=WAIT_S)
                    assert bool((into == value).all()), "someone else wrote into this region"
                    store.free(region)
                    continue
                try:
                    region = store.allocate(chance.randrange(1, 3000), f"thread {seed}")
                except OutOfMemory:
                    continue
                value = (seed * 31 + turn) % 251
                store.write(region, torch.full((region.num_bytes,), value, dtype=torch.uint8)).wait(timeout_s=WAIT_S)
                held.append((region, value))
            for region, _ in held:
                store.free(region)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=hammer, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems and not any(thread.is_alive() for thread in threads)
    assert store.used_bytes == 0 and store.breakdown() == {}
    assert 0 < store.peak_bytes <= store.capacity_bytes
    assert store.allocate(64 * KIB, "all").offset == 0


# -- stores that are memory ---------------------------------------------------------------------------------------


def test_addresses_of_views_are_aligned_and_stable(memory: MemoryStore) -> None:
    first, second = memory.allocate(600, "a"), memory.allocate(600, "b")
    addresses = [memory.view(region, torch.uint8).data_ptr() for region in (first, second)]
    assert all(address % memory.align_bytes == 0 for address in addresses)
    assert addresses[1] - addresses[0] == second.offset - first.offset
    assert memory.view(first, torch.uint8).data_ptr() == addresses[0]


def test_views_alias_the_region(memory: MemoryStore) -> None:
    region = memory.allocate(64, "data")
    view = memory.view(region, torch.float32)
    view.fill_(3.0)
    into = torch.zeros(16)
    memory.read(region, into).wait(timeout_s=WAIT_S)
    assert bool((into == 3.0).all())
    assert memory.view(region, torch.float32)[0] == 3.0


def test_writing_one_region_does_not_invalidate_what_autograd_saved_of_another(memory: MemoryStore) -> None:
    weight, other = (memory.view(memory.allocate(64, name), torch.float32) for name in ("weight", "other"))
    weight.fill_(2.0)
    x = torch.ones(16, device=weight.device, requires_grad=True)
    y = (x * weight).sum()
    other.fill_(1.0)
    y.backward()
    assert x.grad is not None and bool((x.grad == 2.0).all())


def test_views_have_bounds_too(memory: MemoryStore) -> None:
    region = memory.allocate(64, "data")
    memory.write(region, torch.arange(16, dtype=torch.float32)).wait(timeout_s=WAIT_S)
    assert memory.view(region, torch.float32, offset_bytes=24, numel=2).tolist() == [6.0, 7.0]
    assert memory.view(region, torch.float32, offset_bytes=56).tolist() == [14.0, 15.0]
    for options in ({"dtype": torch.float64, "offset_bytes": 64, "numel": 1}, {"dtype": torch.uint8, "numel": -1}):
        with pytest.raises(ValueError, match="data"):
            memory.view(region, **options)
    memory.free(region)
    with pytest.raises(ValueError, match="freed"):
        memory.view(region, torch.uint8)


def test_close_leaves_views_alone_and_gives_no_more(memory: MemoryStore) -> None:
    region = memory.allocate(64, "data")
    view = memory.view(region, torch.float32)
    view.fill_(1.5)
    memory.close()
    assert view.sum() == 24.0  # no crash: whoever has a view has its memory
    with pytest.raises(RuntimeError, match="closed"):
        memory.view(region, torch.uint8)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads resident memory from /proc")
@pytest.mark.parametrize("name", [name for name in FACTORIES if name not in (*NEED_CUDA, *NO_MEMORY)])
def test_memory_becomes_real_when_touched_and_goes_back_at_close(name: str) -> None:
    factory, mib = FACTORIES[name], 1024 * KIB
    gc.collect()  # memory that other tests have left would go at any moment
    before = resident_bytes()
    store = factory(4096 * mib)
    assert isinstance(store, MemoryStore)
    region = store.allocate(2048 * mib, "mostly untouched")
    view = store.view(region, torch.uint8, numel=64 * mib)
    assert resident_bytes() - before < 32 * mib
    view.fill_(1)
    touched = resident_bytes() - before
    assert 60 * mib < touched < 128 * mib
    del view
    store.close()
    assert resident_bytes() - before < touched - 48 * mib
