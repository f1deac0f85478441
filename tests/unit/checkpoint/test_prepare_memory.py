"""Memory for saves comes beside training: no step waits for it, and the first save finds it there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from mmap import PAGESIZE
from typing import Any

import pytest
import torch

import disk_plans
import hightide
import models
from hightide.checkpoint import prepare
from hightide.runtime import plan_stores
from hightide.runtime import run_values as run_module
from hightide.stores import host_arena, pinned
from hightide.stores.host_arena import HostArena
from hightide.stores.pinned import PinnedArena
from snapshot_readers import Case, Reader, Training, assert_same_bits, with_spare
from waiting import OwnThreads, soon

SPARE_BYTES = 2**22


class Registration:
    """Of CUDA, as it were: it takes as long as somebody wants."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.registered: dict[int, int] = {}
        self.num_waiting = 0

    def register(self, address: int, num_bytes: int) -> int:
        self.num_waiting += 1
        assert self.goes_on.wait(60)
        self.num_waiting -= 1
        self.registered[address] = num_bytes
        return 0

    def unregister(self, address: int, *_: object) -> None:
        del self.registered[address]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registration]:
    """A host arena that is pinned, beside the simulated accelerator."""
    found = Registration()
    monkeypatch.setattr(pinned, "_register", found.register)
    monkeypatch.setattr(pinned, "_unregister", found.unregister)
    monkeypatch.setattr(plan_stores, "HostArena", lambda size, needed_bytes: PinnedArena(size, needed_bytes))
    monkeypatch.setattr(prepare, "PIN_BYTES", 16 * PAGESIZE)
    for module in (run_module, prepare):
        monkeypatch.setattr(module, "TILE_BYTES", 2048)
    monkeypatch.setattr(run_module, "SMALL_TILE_BYTES", 2048)
    yield found
    found.goes_on.set()


def begun(update: str = "deferred") -> Training:
    training = Case(
        lambda: models.hand_written(num_layers=4),
        lambda plan: with_spare(disk_plans.placed(plan, "gpu"), SPARE_BYTES),
        {"update": update},
    ).begin()
    training.steps(2)
    return training


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_no_step_waits_while_memory_is_pinned_and_the_first_save_finds_it(update: str, cuda: Registration) -> None:
    training = begun(update)
    own, before = OwnThreads(prepare.THREAD), len(cuda.registered)
    cuda.goes_on.clear()
    hightide.prepare_saves(training.model)
    assert soon(lambda: cuda.num_waiting == 1)
    training.steps(2)  # would not end: nothing is registered before this test says so
    assert cuda.num_waiting == 1 and len(cuda.registered) == before
    cuda.goes_on.set()
    assert own.end()
    there = len(cuda.registered)
    assert there > before + 1, "in several pieces"
    cuda.goes_on.clear()  # whoever still had to wait for it would do so for ever
    expected = training.at_rest()
    snapshot = training.run.snapshot()
    reader = Reader(snapshot, num_parts=3)
    training.steps(2)
    assert_same_bits(reader.values(), expected)
    assert snapshot.cost.waited_s == 0 and len(cuda.registered) == there
    training.close()
    assert not cuda.registered


def test_a_save_that_nobody_has_prepared_waits_for_it(cuda: Registration) -> None:
    """What the test above would not notice otherwise."""
    training = begun()
    cuda.goes_on.clear()
    expected = training.at_rest()
    snapshot = training.run.snapshot()
    reader = Reader(snapshot)
    assert soon(lambda: cuda.num_waiting == 1)
    step = threading.Thread(target=training.steps, args=(1,))
    step.start()
    kept = training.run.performer.updating.saving
    assert kept is not None and soon(lambda: kept._num_waiting > 0)
    step.join(0.1)
    assert step.is_alive(), "its updates are on the GPU, and their values cannot leave yet"
    cuda.goes_on.set()
    step.join(60)
    assert_same_bits(reader.values(), expected)
    assert snapshot.cost.waited_s > 0
    training.close()


def test_a_run_that_ends_meanwhile_registers_nothing_any_more(cuda: Registration) -> None:
    """Memory that is unmapped while it is registered cannot be registered again: the end waits for the piece."""
    training = begun()
    own = OwnThreads(prepare.THREAD)
    cuda.goes_on.clear()
    hightide.prepare_saves(training.model)
    assert soon(lambda: cuda.num_waiting == 1)
    ends = threading.Thread(target=training.close)
    ends.start()
    ends.join(0.2)
    assert ends.is_alive()
    cuda.goes_on.set()
    ends.join(60)
    assert own.end() and not cuda.registered


def test_a_process_that_ends_waits_for_the_piece_and_no_longer(
    cuda: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would end the thread in the middle of a torch operation, and that aborts the process."""
    at_exit: list[Any] = []
    monkeypatch.setattr(prepare.atexit, "register", lambda work, *args: at_exit.append(partial(work, *args)))
    training = begun()
    own, before = OwnThreads(prepare.THREAD), len(cuda.registered)
    cuda.goes_on.clear()
    hightide.prepare_saves(training.model)
    assert soon(lambda: cuda.num_waiting == 1)
    (end,) = at_exit
    ends = threading.Thread(target=end)
    ends.start()
    ends.join(0.1)
    assert ends.is_alive()
    cuda.goes_on.set()
    ends.join(60)
    assert not own.alive() and len(cuda.registered) == before + 1
    training.close()


def test_memory_that_is_not_pinned_is_made_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be lent, once, and nothing of what the plan needs."""
    touched: list[tuple[int, int]] = []
    real = HostArena._touch
    monkeypatch.setattr(HostArena, "_touch", lambda *args: (touched.append(args[1:]), real(*args))[1])
    monkeypatch.setattr(host_arena, "READY_BYTES", 16 * PAGESIZE)
    arena = HostArena(100 * PAGESIZE, needed_bytes=30 * PAGESIZE + 512)
    used = arena.allocate(30 * PAGESIZE + 512, "the plan")
    arena.view(used, torch.uint8).fill_(7)
    lent = arena.lend(PAGESIZE)
    assert lent is not None
    arena.view(lent, torch.uint8).fill_(9)
    while arena.make_ready(60 * PAGESIZE):
        pass
    begins, ends = [at for at, _ in touched], [at + size for at, size in touched]
    assert begins[0] == lent.offset + PAGESIZE and begins[1:] == ends[:-1] and max(ends) == 90 * PAGESIZE + 512
    assert (arena.view(used, torch.uint8) == 7).all() and (arena.view(lent, torch.uint8) == 9).all()
    assert arena.used_bytes == 31 * PAGESIZE + 512 and not arena.make_ready(60 * PAGESIZE)
    assert arena.peak_lent_bytes == PAGESIZE
    arena.close()
    assert not arena.make_ready(100 * PAGESIZE)


def test_what_does_not_leave_the_gpu_takes_no_pinned_memory_while_there_is_other(cuda: Registration) -> None:
    arena = PinnedArena(64 * PAGESIZE, pinned_bytes=2 * PAGESIZE)
    arena.pin()
    while arena.pin_spare(8 * PAGESIZE):
        pass
    plain, leaving = arena.lend(PAGESIZE, leaves_gpu=False), arena.lend(PAGESIZE)
    assert plain is not None and leaving is not None
    assert not arena.is_pinned_at(plain) and arena.is_pinned_at(leaving)
    while (more := arena.lend(PAGESIZE, leaves_gpu=False)) is not None:
        last = more
    assert arena.is_pinned_at(last), "better than none"
    arena.close()
