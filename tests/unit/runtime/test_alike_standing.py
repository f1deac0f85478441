"""What the watchman learns of a rank's lanes, and of the thread that runs the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hightide.ir.tier import Lane
from hightide.runtime.alike import is_watched_by
from hightide.runtime.lanes.lanes import Lanes
from hightide.runtime.schedule.in_flight import InFlight
from hightide.shard.communicators import GATHER, REDUCE
from hightide.shard.own_rank import Standing
from hightide.shard.signs import Patience
from hightide.shard.watchman import Watchman
from hightide.stores.ticket import Ticket
from waiting import soon


@pytest.fixture
def flight() -> Iterator[InFlight]:
    lanes = Lanes(timeout_s=10.0, several_ranks=True)
    yield InFlight(lanes)
    lanes.close()


@pytest.fixture
def watchman() -> Watchman:
    store = dist.HashStore()
    return Watchman(store, 0, 2, (GATHER, REDUCE), Patience(), "rank 0", 0)


def standing_of(watchman: Watchman) -> Standing:
    found = watchman.own.standing()
    assert found is not None
    return found


def test_lanes_that_wait_for_something_else_are_idle(flight: InFlight, watchman: Watchman) -> None:
    is_watched_by(watchman, flight)
    assert standing_of(watchman) == Standing(False, True, (), 0)
    owed = Ticket("what nobody does yet")
    done = flight.lanes.submit("copy", Lane.H2D, 0, [owed], lambda: None)
    assert standing_of(watchman) == Standing(False, True, (), 0)
    owed.set_result()
    done.wait()
    assert soon(lambda: standing_of(watchman) == Standing(False, True, (), 1))


@pytest.mark.parametrize("lane", [Lane.H2D, Lane.CPU, Lane.GATHER, Lane.REDUCE])
def test_a_lane_at_work_is_told(flight: InFlight, watchman: Watchman, lane: Lane) -> None:
    """Of one between ranks, under which names: whether it waits for others, the watchman knows."""
    is_watched_by(watchman, flight)
    began, goes_on = threading.Event(), threading.Event()
    ticket = flight.lanes.submit("work", lane, 0, [], lambda: (began.set(), goes_on.wait(10)))
    assert began.wait(10)
    found = standing_of(watchman)
    names = {Lane.GATHER: (("gather",),), Lane.REDUCE: (("reduce", "across", "step"),)}.get(lane, ())
    assert (found.is_idle, found.at_others, found.num_done) == (lane in (Lane.GATHER, Lane.REDUCE), names, 1)
    goes_on.set()
    ticket.wait()
    assert soon(lambda: standing_of(watchman) == Standing(False, True, (), 1))


def test_a_wait_for_a_lane_is_told(flight: InFlight, watchman: Watchman) -> None:
    is_watched_by(watchman, flight)
    owed = Ticket("a gather")
    waits = threading.Thread(target=lambda: flight.wait(owed, Lane.GATHER))
    waits.start()
    assert soon(lambda: standing_of(watchman) == Standing(True, True, (), 1))
    owed.set_result()
    waits.join(10)
    assert standing_of(watchman) == Standing(False, True, (), 1)


def test_the_watchman_keeps_no_run_alive(watchman: Watchman) -> None:
    lanes = Lanes(timeout_s=10.0, several_ranks=True)
    is_watched_by(watchman, flight := InFlight(lanes))
    lanes.close()
    del flight
    assert watchman.own.standing() is None and watchman.own.owes_others()
