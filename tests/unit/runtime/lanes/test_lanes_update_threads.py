"""Threads that share an update: all of it is done, failures are the original ones, nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from hightide.ir.tier import Lane
from hightide.runtime.lanes.lanes import UPDATER, Lanes, default_update_threads
from waiting import OwnThreads


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(timeout_s=10.0, num_update_threads=4)
    yield lanes
    lanes.close()


def test_every_thread_takes_part(lanes: Lanes) -> None:
    """Each waits for the others inside: fewer than four at once would break the barrier."""
    together, seen = threading.Barrier(4), []

    def work(number: int) -> None:
        together.wait(10)
        seen.append((number, threading.current_thread().name, torch.get_num_threads()))

    lanes.wait(lanes.submit("update", Lane.CPU, 0, [], lambda: lanes.update_threads.run(work, 99)), Lane.CPU)
    assert sorted(number for number, _, _ in seen) == [0, 1, 2, 3]
    assert {name for number, name, _ in seen if number == 0} == {"hightide-cpu"}
    assert {threads for _, _, threads in seen} == {1}


def test_no_more_threads_than_asked_for(lanes: Lanes) -> None:
    for wanted in (1, 2, 3):
        seen: list[int] = []
        lanes.update_threads.run(lambda number, seen=seen: (seen.append(number), time.sleep(0.02)), wanted)  # type: ignore[misc]
        assert 1 <= len(seen) <= wanted and 0 in seen and len(set(seen)) == len(seen)


def test_many_short_jobs_lose_nothing(lanes: Lanes) -> None:
    for _ in range(300):
        counted, lock = [0], threading.Lock()

        def work(_: int, counted: list[int] = counted, lock: threading.Lock = lock) -> None:
            for _ in range(5):
                with lock:
                    counted[0] += 1

        before = counted[0]
        lanes.update_threads.run(work, 4)
        after = counted[0]
        assert after % 5 == 0 and 5 <= after - before <= 20  # who came, came to an end


@pytest.mark.parametrize("failing", [0, 2])
def test_the_failure_of_any_thread_is_the_failure_of_the_update(lanes: Lanes, failing: int) -> None:
    error, together, ended = MemoryError("tile 7"), threading.Barrier(4), []

    def work(number: int) -> None:
        together.wait(10)
        if number == failing:
            raise error
        time.sleep(0.05)
        ended.append(number)

    ticket = lanes.submit("update", Lane.CPU, 0, [], lambda: lanes.update_threads.run(work, 4))
    with pytest.raises(MemoryError) as caught:
        lanes.wait(ticket, Lane.CPU)
    assert caught.value is error and lanes.failure is error
    assert len(ended) == 3  # nobody writes any more when the failure is seen


def test_a_thread_that_does_not_come_back_is_a_timeout() -> None:
    lanes = Lanes(timeout_s=0.2, num_update_threads=2)
    release, both = threading.Event(), threading.Barrier(2)

    def work(number: int) -> None:
        both.wait(10)
        if number:
            release.wait(10)

    with pytest.raises(TimeoutError, match=r"still busy after 0.2 s"):
        lanes.update_threads.run(work, 2)
    release.set()
    lanes.close()


def test_they_end_with_the_lanes_and_with_forgotten_lanes() -> None:
    threads = OwnThreads(UPDATER)
    lanes = Lanes(num_update_threads=3)
    assert len(threads.alive()) == 2
    lanes.close()
    assert not threads.alive()
    lanes = Lanes(num_update_threads=3)
    del lanes
    assert threads.end()


def test_other_threads_keep_their_number_of_torch_threads() -> None:
    """[Note: threads of torch] A thread that is born later inherits the last set_num_threads of anyone."""
    own, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(3)
        lanes = Lanes(num_update_threads=3)
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        copying = lanes.submit("copy", Lane.H2D, 0, [], lambda: seen.append(torch.get_num_threads()))
        lanes.wait(copying, Lane.H2D)
        seen.append(torch.get_num_threads())
        lanes.close()
    finally:
        torch.set_num_threads(own)
    assert seen == [3, 3, 3]


def test_the_number_comes_from_the_cores_and_not_from_the_environment() -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert default_update_threads() == max(1, num_cores - 2)
    code = "from hightide.runtime.lanes.lanes import Lanes; print(Lanes().update_threads.num_threads)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert int(printed.stdout) == max(1, num_cores - 2), printed.stderr
    with pytest.raises(ValueError, match="0 threads"):
        Lanes(num_update_threads=0)
