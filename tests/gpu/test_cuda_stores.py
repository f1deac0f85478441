"""What the stores of a real GPU do besides the conformance suite: a hard limit, one slab, memory pinned late."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch

from hightide.stores import device_limit
from hightide.stores.cuda import CudaAccelerator
from hightide.stores.pinned import PinnedArena
from hightide.stores.store import OutOfMemory

pytestmark = pytest.mark.gpu

MIB = 2**20
SEGMENT_BYTES = 20 * MIB  # torch's allocator reserves in such steps


def fraction() -> float:
    return device_limit._fraction(torch.cuda.current_device())


def test_the_limit_is_hard_says_its_numbers_and_goes_with_the_store() -> None:
    before = fraction()
    others_bytes = torch.cuda.memory_reserved()  # of tests that ran before
    outside = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    store = CudaAccelerator(512 * MIB, torch.device("cuda"), slab_bytes=128 * MIB)
    store.allocate(100 * MIB, "slots")
    store.enforce_limit()
    with store.meter("activations"):
        fits = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(OutOfMemory) as caught, store.meter("activations"):
        torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    error = caught.value
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert (error.requested_bytes, error.capacity_bytes) == (300 * MIB, 512 * MIB)
    assert error.breakdown["slots"] == 100 * MIB
    assert "Limits(gpu" in str(error)
    assert (store.used_bytes, store.peak_bytes) == (100 * MIB, 100 * MIB)
    assert store.device_peak_bytes <= others_bytes + (512 + 256) * MIB + SEGMENT_BYTES
    del fits, outside
    store.close()
    assert fraction() == before
    torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")


def test_a_forgotten_store_takes_its_limit_along() -> None:
    before = fraction()
    store = CudaAccelerator(512 * MIB, torch.device("cuda"))
    store.enforce_limit()
    assert fraction() < before
    del store
    gc.collect()
    assert fraction() == before


def test_what_the_model_occupied_before_is_not_outside_of_the_limit() -> None:
    model = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    store = CudaAccelerator(256 * MIB, torch.device("cuda"), slab_bytes=64 * MIB)
    del model  # as wrap frees parameters that were on the GPU
    store.enforce_limit()
    with pytest.raises(OutOfMemory), store.meter():
        torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
    store.close()


def test_regions_lie_in_one_allocation_and_beyond_it_have_their_own() -> None:
    reserved_bytes = torch.cuda.memory_reserved()
    store = CudaAccelerator(256 * MIB, torch.device("cuda"), slab_bytes=64 * MIB)
    reserved_bytes = torch.cuda.memory_reserved() - reserved_bytes
    assert reserved_bytes <= 64 * MIB + SEGMENT_BYTES  # less, where a segment had room left
    slab_bytes = torch.cuda.memory_reserved()
    inside = [store.allocate(21 * MIB, "inside") for _ in range(3)]
    assert torch.cuda.memory_reserved() == slab_bytes
    beyond = store.allocate(30 * MIB, "beyond")
    views = [store.view(region, torch.float32) for region in (*inside, beyond)]
    for number, view in enumerate(views):
        view.fill_(number)
    assert all(bool((view == number).all()) for number, view in enumerate(views))
    assert views[1].data_ptr() - views[0].data_ptr() == 21 * MIB
    store.free(beyond)
    assert store.used_bytes == 63 * MIB
    store.close()


def test_copies_from_a_pinned_arena_do_not_wait_for_the_gpu() -> None:
    arena = PinnedArena(64 * MIB)
    region = arena.allocate(64 * MIB, "data")
    arena.view(region, torch.float32).fill_(3.0)
    arena.pin()
    target = torch.zeros(16 * MIB, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        arena.read(region, target).wait()
        arena.write(region, target).wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert bool((target == 3.0).all())
    assert arena.view(region, torch.uint8).is_pinned()
    arena.close()


def test_a_refusal_to_pin_warns_and_works_and_leaves_no_error_behind() -> None:
    arena = PinnedArena(MIB)
    region = arena.allocate(MIB, "data")
    assert int(torch.cuda.cudart().cudaHostRegister(arena._base, MIB, 0)) == 0
    with pytest.warns(UserWarning, match="could not be pinned"):  # it is registered already
        arena.pin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target = torch.zeros(MIB // 4, device="cuda")  # the first kernel since the refusal
        arena.write(region, target + 2.0).wait()
        arena.read(region, target).wait()
    assert bool((target == 2.0).all())
    torch.cuda.cudart().cudaHostUnregister(arena._base)
    arena.close()


def test_memory_of_a_forgotten_arena_can_be_pinned_again() -> None:
    for _ in range(20):  # the system gives the same addresses again
        arena = PinnedArena(8 * MIB)
        arena.pin()
        assert arena.is_pinned
        del arena
        gc.collect()


def test_the_slab_of_a_second_run_is_allocated_under_its_own_limit() -> None:
    first = CudaAccelerator(256 * MIB, torch.device("cuda"), slab_bytes=192 * MIB)
    first.enforce_limit()
    assert first.is_alone
    second = CudaAccelerator(512 * MIB, torch.device("cuda"), slab_bytes=448 * MIB)
    assert not first.is_alone and not second.is_alone
    second.enforce_limit()
    with pytest.raises(OutOfMemory), second.meter():
        torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")  # 64 MiB are left to each
    first.close()
    assert second.is_alone
    with pytest.raises(OutOfMemory), second.meter():
        torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
    second.close()


def test_a_slab_that_does_not_fit_leaves_no_limit_behind() -> None:
    before = fraction()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(OutOfMemory, match="slots and persistent chunks"):
        CudaAccelerator(2 * total_bytes, torch.device("cuda"), slab_bytes=2 * total_bytes)
    assert fraction() == before and not device_limit._devices


def test_a_vacated_slab_is_free_whoever_has_views_and_comes_back_under_them() -> None:
    store = CudaAccelerator(256 * MIB, torch.device("cuda"), slab_bytes=64 * MIB)
    regions = [store.allocate(64 * MIB, "inside"), store.allocate(32 * MIB, "beyond")]
    views = [store.view(region, torch.float32) for region in regions]
    held_bytes = torch.cuda.memory_allocated()
    store.vacate()
    assert torch.cuda.memory_allocated() == held_bytes - 96 * MIB
    store.reoccupy()
    assert torch.cuda.memory_allocated() == held_bytes
    for number, view in enumerate(views):
        view.fill_(number + 1)
    for number, region in enumerate(regions):
        assert bool((store.view(region, torch.float32) == number + 1).all())
    store.close()
