"""Paces of lanes that run together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from hightide.doctor.pace import MIN_PIECES, Work, measure_together
from hightide.ir.tier import Lane
from hightide.runtime.lanes.lanes import Lanes
from waiting import soon


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes(timeout_s=20.0, num_update_threads=1)
    yield made
    made.close()


def sleeping(seconds: float, num_bytes: int) -> Work:
    def work() -> int:
        time.sleep(seconds)
        return num_bytes

    return work


def test_each_lane_has_its_own_pace(lanes: Lanes) -> None:
    works = {Lane.H2D: sleeping(0.01, 100), Lane.CPU: sleeping(0.03, 100)}

    def is_its_own() -> bool:
        paces = measure_together(lanes, works, window_s=0.3)
        assert set(paces) == {Lane.H2D, Lane.CPU}
        for lane, seconds in ((Lane.H2D, 0.01), (Lane.CPU, 0.03)):
            assert min(paces[lane].piece_s) >= seconds
            assert paces[lane].bytes_per_s <= 100 / seconds
        return all(paces[lane].bytes_per_s > 30 / seconds for lane, seconds in ((Lane.H2D, 0.01), (Lane.CPU, 0.03)))

    assert soon(is_its_own)  # on a busy machine sleepers wake up late


def test_pieces_longer_than_the_window_are_waited_for(lanes: Lanes) -> None:
    paces = measure_together(lanes, {Lane.CPU: sleeping(0.05, 1)}, window_s=0.0)
    assert len(paces[Lane.CPU].piece_s) >= MIN_PIECES


def test_only_the_time_in_which_all_run_counts(lanes: Lanes) -> None:
    """The copying lane is ten times as fast until the other one has begun."""
    others = threading.Event()

    def copy() -> int:
        time.sleep(0.02 if others.is_set() else 0.002)
        return 100

    def update() -> int:
        time.sleep(0.2 if not others.is_set() else 0.02)
        others.set()
        return 1

    pace = measure_together(lanes, {Lane.H2D: copy, Lane.CPU: update}, window_s=0.2)[Lane.H2D]
    assert pace.bytes_per_s <= 100 / 0.02


def test_a_failure_is_the_works_own(lanes: Lanes) -> None:
    error = RuntimeError("the link is gone")

    def fail() -> int:
        raise error

    with pytest.raises(RuntimeError) as caught:
        measure_together(lanes, {Lane.H2D: fail, Lane.CPU: sleeping(0.01, 1)}, window_s=0.1)
    assert caught.value is error
