"""The meter counts what a GPU would hold, to the byte."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from hightide.stores.meter import AllocationMeter
from hightide.stores.simulated import SimulatedAccelerator
from hightide.stores.store import OutOfMemory

ROWS, WIDTH, HIDDEN = 8, 16, 64
KIB = 1024


def mlp() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, WIDTH))


def test_a_storage_counts_until_its_last_user_dies() -> None:
    with AllocationMeter() as meter:
        a = torch.empty(100)
        view = a[:10]
    assert meter.live_bytes == 400
    del a
    assert meter.live_bytes == 400  # the view keeps the whole storage
    del view
    assert (meter.live_bytes, meter.peak_bytes) == (0, 400)


def test_views_in_place_and_out_count_nothing_new() -> None:
    outside = torch.randn(8, 8)
    target = torch.empty(8, 8)
    with AllocationMeter() as meter:
        results = [outside.t(), outside[2:], outside.view(64), outside.add_(1), outside.detach(), outside.unbind(0)]
        results.append(torch.add(outside, 1, out=target))
        results.append(torch.ops.aten._unsafe_view(outside, [64]))
        results.append(torch.nn.functional.dropout(outside, 0.5, training=False))
        with torch.inference_mode():  # composites arrive whole here
            results.append(outside.reshape(64))
            results.append(torch.nn.functional.dropout(outside, 0.5, training=False))
    assert (meter.live_bytes, meter.peak_bytes) == (0, 0)


def test_copies_hidden_behind_view_names_count() -> None:
    outside = torch.randn(8, 8)
    with AllocationMeter() as meter, torch.inference_mode():
        copy = outside.t().reshape(64)
        assert meter.live_bytes == copy.nbytes == 256
        same = outside.t().contiguous()
        assert meter.live_bytes == 256 + same.nbytes


def test_constants_count() -> None:
    with AllocationMeter() as meter:
        constant = torch.tensor([1.0, 2.0, 3.0])
        assert meter.live_bytes == constant.nbytes == 12


def test_a_storage_that_out_has_resized_counts_its_new_size() -> None:
    with AllocationMeter() as meter:
        target = torch.empty(0)
        torch.add(torch.ones(10), 1, out=target)
        assert meter.live_bytes == 40
        del target
    assert meter.live_bytes == 0


def test_several_outputs_each_count() -> None:
    x = torch.randn(10)
    with AllocationMeter() as meter:
        values, indices = torch.sort(x)
        assert meter.live_bytes == values.nbytes + indices.nbytes == 40 + 80


def test_nested_meters_of_one_ledger_count_once() -> None:
    with AllocationMeter() as outer, AllocationMeter(ledger=outer.ledger):
        a = torch.empty(100)
        assert outer.live_bytes == a.nbytes


def test_on_change_hears_every_birth_and_death() -> None:
    changes: list[tuple[int, str]] = []
    with AllocationMeter(lambda delta, label: changes.append((delta, label)), label="x") as meter:
        a = torch.empty(10)
        b = a.view(2, 5) + 1
        del a, b
        assert meter.live_bytes == 0
    assert sorted(changes) == [(-40, "x"), (-40, "x"), (40, "x"), (40, "x")]


def test_storages_in_reference_cycles_die_with_the_garbage_collector() -> None:
    with AllocationMeter() as meter:
        gc.disable()
        try:
            cycle: list[object] = [torch.empty(100)]
            cycle.append(cycle)
            del cycle
            assert meter.live_bytes == 400
            gc.collect()
            assert meter.live_bytes == 0
        finally:
            gc.enable()


def test_an_address_that_is_reused_at_once_counts_again() -> None:
    with AllocationMeter() as meter:
        for _ in range(200):
            a = torch.empty(100)
            assert meter.live_bytes == a.nbytes
            del a
    assert (meter.live_bytes, meter.peak_bytes) == (0, 400)


def test_keep_and_recompute_of_an_mlp_to_the_byte() -> None:
    model, x = mlp(), torch.randn(ROWS, WIDTH, requires_grad=True)
    hidden_bytes, out_bytes = ROWS * HIDDEN * 4, ROWS * WIDTH * 4
    with AllocationMeter() as keep:
        kept = model(x)
        # Linear saves its input; tanh saves its output, which is the second Linear's input: one tensor.
        assert keep.live_bytes == hidden_bytes + out_bytes
        assert keep.peak_bytes == 2 * hidden_bytes  # before and after tanh; the output is smaller and comes later
    with AllocationMeter() as recompute:
        again = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
        assert recompute.live_bytes == out_bytes
    assert torch.equal(kept, again)
    with recompute:
        recompute.ledger._peak_bytes = 0
        again.sum().backward()
        assert recompute.peak_bytes > hidden_bytes + out_bytes
    gradient_bytes = sum(p.nbytes for p in model.parameters()) + x.nbytes
    assert recompute.live_bytes == gradient_bytes + out_bytes


def test_backward_releases_what_forward_kept() -> None:
    model, x = mlp(), torch.randn(ROWS, WIDTH)
    with AllocationMeter() as meter:
        model(x).sum().backward()
        assert meter.live_bytes == sum(p.nbytes for p in model.parameters())
        model.zero_grad(set_to_none=True)
    assert meter.live_bytes == 0


def test_fake_tensors_count_as_real_ones() -> None:
    def run(meter: AllocationMeter) -> tuple[int, int]:
        model, x = mlp(), torch.randn(ROWS, WIDTH)
        with meter:
            loss = model(x).sum()
            after_forward = meter.live_bytes
            loss.backward()
        return after_forward, meter.peak_bytes

    real = run(AllocationMeter())
    with FakeTensorMode():
        fake = run(AllocationMeter())
    assert fake == real and real[0] > 0


def test_fake_tensors_of_hundreds_of_gigabytes_count() -> None:
    with FakeTensorMode(), AllocationMeter() as meter:
        a = torch.empty(200 * KIB**3, dtype=torch.uint8)
        b = a + 1
        del a
        assert meter.live_bytes == b.nbytes == 200 * KIB**3
        assert meter.peak_bytes == 400 * KIB**3


# ---- the simulated accelerator's account


def test_regions_and_storages_add_up() -> None:
    gpu = SimulatedAccelerator(64 * KIB)
    gpu.allocate(KIB, "slots")
    with gpu.meter("activations"):
        a = torch.empty(256)
        with gpu.meter("logits"):
            b = torch.empty(10)
        c = a + 1
    assert gpu.breakdown() == {"slots": KIB, "activations": 2 * KIB, "logits": 40}
    assert gpu.used_bytes == gpu.peak_bytes == 3 * KIB + 40
    assert gpu.peak_breakdown() == gpu.breakdown()
    del a, b, c
    assert gpu.breakdown() == {"slots": KIB}
    assert gpu.peak_breakdown()["activations"] == 2 * KIB


def test_nothing_counts_outside_of_the_meter_or_in_another_thread() -> None:
    gpu = SimulatedAccelerator(64 * KIB)
    before = torch.empty(100)
    made: list[torch.Tensor] = []
    with gpu.meter():
        thread = threading.Thread(target=lambda: made.append(torch.empty(100) + 1))
        thread.start()
        thread.join()
    after = before + 1
    assert made[0].nbytes == after.nbytes == 400
    assert gpu.used_bytes == 0


def test_threads_under_their_own_meters_share_one_account() -> None:
    gpu = SimulatedAccelerator(64 * KIB)
    made: list[torch.Tensor] = []

    def work() -> None:
        with gpu.meter("theirs"):
            made.append(torch.empty(100))

    with gpu.meter("mine"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        made.append(torch.empty(100))
    assert gpu.breakdown() == {"theirs": 400, "mine": 400}
    made.clear()
    assert gpu.used_bytes == 0


def test_adopted_tensors_count_once_and_views_of_the_arena_never() -> None:
    gpu = SimulatedAccelerator(64 * KIB)
    slot = gpu.view(gpu.allocate(KIB, "slots"), torch.float32)
    batch = torch.empty(100)
    gpu.adopt(batch, "batch")
    gpu.adopt(batch[3:], "batch")
    gpu.adopt(slot, "batch")
    with gpu.meter():
        gpu.adopt(batch.view(10, 10), "batch")
        grown = slot.view(16, 16).t()
        metered = torch.empty(10)
        gpu.adopt(metered, "batch")
        gpu.view(gpu.allocate(KIB, "slots"), torch.float32).fill_(1)
    assert gpu.breakdown() == {"slots": 2 * KIB, "batch": 400, "activations": 40}
    del batch
    assert gpu.breakdown() == {"slots": 2 * KIB, "activations": 40}
    assert grown.shape == (16, 16)


def forward_too_much() -> None:
    x = torch.empty(4 * KIB, dtype=torch.uint8)
    held = [x + 1 for _ in range(10)]
    assert not held, "should have run out"


def backward_too_much() -> None:
    x = torch.ones(KIB, requires_grad=True)
    y = (x.expand(2, KIB) * 2).sum()  # forward needs 12 KiB and keeps 4; backward needs 16 and a little
    y.backward()


@pytest.mark.parametrize("work", [forward_too_much, backward_too_much])
def test_exceeding_the_capacity_raises_where_it_happens_and_heals_when_tensors_die(work: Callable[[], None]) -> None:
    gpu = SimulatedAccelerator(16 * KIB)
    gpu.allocate(512, "slots")
    with pytest.raises(OutOfMemory) as caught, gpu.meter():
        work()
    error = caught.value
    assert error.used_bytes + error.requested_bytes > error.capacity_bytes == 16 * KIB
    assert error.breakdown["slots"] == 512 and error.breakdown["activations"] > 0
    assert "activations" in str(error) and str(16 * KIB) in str(error)
    assert gpu.peak_bytes <= 16 * KIB
    assert sum(gpu.peak_breakdown().values()) == gpu.peak_bytes
    del caught, error
    gc.collect()
    assert gpu.used_bytes == 512
    with gpu.meter():
        assert torch.empty(8 * KIB, dtype=torch.uint8).nbytes < 16 * KIB


def test_regions_and_activations_compete_for_the_same_bytes() -> None:
    gpu = SimulatedAccelerator(16 * KIB)
    with gpu.meter():
        a = torch.empty(12 * KIB, dtype=torch.uint8)
        with pytest.raises(OutOfMemory, match=r"activations 12.0 KiB"):
            gpu.allocate(8 * KIB, "slots")
    del a
    gpu.allocate(8 * KIB, "slots")


def test_the_garbage_collector_in_other_threads_does_not_disturb_the_account() -> None:
    gpu = SimulatedAccelerator(1024 * KIB)
    problems: list[BaseException] = []
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            gc.collect(0)

    def work() -> None:
        try:
            with gpu.meter():
                for _ in range(300):
                    cycle: list[object] = [torch.empty(64)]
                    cycle.append(cycle)
                    assert gpu.used_bytes >= 256
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    collector = threading.Thread(target=collect, daemon=True)
    for thread in (collector, *threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    collector.join(60)
    gc.collect()
    assert not problems and not any(thread.is_alive() for thread in (*threads, collector))
    assert gpu.used_bytes == 0 and gpu.breakdown() == {}


def test_torch_compile_leaves_the_code_of_a_mode_alone() -> None:
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        compiled.append(graph)
        return graph.forward

    def inside(func: object, args: object, kwargs: object) -> int:
        return 0 if torch.ones(2).sum() > 0 else 1

    with AllocationMeter(inside=inside) as meter:
        found = torch.compile(lambda x: (x.sin() + 1).cos(), backend=backend)(torch.ones(3))
        assert meter.live_bytes == found.nbytes
    assert not compiled
