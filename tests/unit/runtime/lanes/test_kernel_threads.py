"""Threads that share work in C: all of them take part, they come back for work in Python, and nothing hangs."""

from __future__ import annotations

import ctypes
import shutil
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from forked import run_script
from hightide.optim import build
from hightide.optim.c_kernel import numbers_type
from hightide.runtime.lanes.kernel_threads import WorkInC
from hightide.runtime.lanes.lanes import UPDATER, Lanes
from waiting import OwnThreads

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
LONG_S = 20.0
EXITS = """
import os, sys, torch
from hightide.optim.adam import AdamWRule
from hightide.optim.host_update import HostUpdate
from hightide.optim.operands import Operands
from hightide.runtime.lanes.lanes import Lanes

lanes = Lanes(num_update_threads=4)
rule = AdamWRule()
hyper = rule.read(dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, maximize=False))
ops = Operands(torch.ones(4096), torch.ones(4096), (torch.zeros(4096), torch.zeros(4096)))
update = HostUpdate(rule, lanes.update_threads, "c", 128)
for _ in range(200):
    update.update(ops, 1, hyper)
"""


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(timeout_s=LONG_S, num_update_threads=4)
    yield lanes
    lanes.close()


def work_in_c(call: Callable[[], object]) -> WorkInC:
    """As C sees it, a function of one address; in truth it comes back to Python, where a test can look."""
    library = build.load("adam")
    assert library is not None
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: call() and None)
    return WorkInC(library, function, numbers_type("unused")(), alive=function)


def meet(lanes: Lanes, num_threads: int, in_c: bool) -> set[str]:
    """The names of so many threads that were inside at once. Who is on the way to the crew is missed by a run, so it
    is tried until all have come."""
    until_s = time.monotonic() + LONG_S
    while time.monotonic() < until_s:
        inside, lock, names = [0], threading.Lock(), set()

        def call(inside: list[int] = inside, lock: threading.Lock = lock, names: set[str] = names) -> None:
            with lock:
                inside[0] += 1
                names.add(threading.current_thread().name)
            deadline_s = time.monotonic() + 0.5
            while inside[0] < num_threads and time.monotonic() < deadline_s:
                time.sleep(0.001)

        lanes.update_threads.run(work_in_c(call) if in_c else lambda _, call=call: call(), num_threads)  # type: ignore[misc]
        assert len(names) <= num_threads
        if len(names) == num_threads:
            return names
    raise AssertionError(f"never {num_threads} threads at once")


def test_every_thread_takes_part_and_no_more_than_wanted(lanes: Lanes) -> None:
    assert len(meet(lanes, 4, in_c=True)) == 4
    assert len(meet(lanes, 2, in_c=True)) == 2


def test_they_come_back_for_work_in_python_and_go_again(lanes: Lanes) -> None:
    for _ in range(3):
        assert len(meet(lanes, 4, in_c=True)) == 4
        assert len(meet(lanes, 4, in_c=False)) == 4


def test_a_run_ends_when_all_who_joined_have_returned(lanes: Lanes) -> None:
    meet(lanes, 4, in_c=True)
    for _ in range(20):
        begun, ended = [], []

        def call(begun: list[int] = begun, ended: list[int] = ended) -> None:
            begun.append(1)
            time.sleep(0.002 * len(begun))
            ended.append(1)

        lanes.update_threads.run(work_in_c(call), 4)
        assert len(begun) == len(ended) >= 1


def test_a_thread_that_does_not_come_back_is_a_timeout() -> None:
    lanes = Lanes(timeout_s=0.3, num_update_threads=2)
    meet(lanes, 2, in_c=True)
    release, main, seen = threading.Event(), threading.current_thread(), []

    def call() -> None:
        seen.append(threading.current_thread())
        deadline_s = time.monotonic() + LONG_S
        while len(seen) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        if threading.current_thread() is not main:
            release.wait(LONG_S)

    started_s = time.monotonic()
    with pytest.raises(TimeoutError, match=r"still busy after 0.3 s"):
        lanes.update_threads.run(work_in_c(call), 2)
    assert 0.3 <= time.monotonic() - started_s < LONG_S
    release.set()
    lanes.close()
    assert not [thread for thread in seen if thread is not main and thread.is_alive()]


def test_they_end_with_the_lanes_and_with_forgotten_lanes() -> None:
    threads = OwnThreads(UPDATER)
    for close in (True, False):
        lanes = Lanes(num_update_threads=3)
        meet(lanes, 3, in_c=True)
        if close:
            lanes.close()
            assert not threads.alive()
        del lanes
        assert threads.end()


def test_work_that_comes_after_the_end_is_done_by_who_brings_it() -> None:
    for first_in_c in (True, False):
        lanes = Lanes(num_update_threads=3)
        meet(lanes, 3, in_c=first_in_c)
        lanes.close()
        names: set[str] = set()
        for _ in range(3):
            lanes.update_threads.run(work_in_c(lambda names=names: names.add(threading.current_thread().name)), 3)
        assert names == {threading.current_thread().name}


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("", marks=pytest.mark.long),
        "del lanes, update",
        "child = os.fork()\nif child: assert os.waitpid(child, 0)[1] == 0\nelse: lanes.close(0.1)",
    ],
)
def test_a_process_ends_while_they_wait(end: str) -> None:
    assert run_script(EXITS + end, [], timeout_s=60).status == 0
