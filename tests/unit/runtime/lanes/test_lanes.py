"""Lanes run in their stated order, overlap, and never hang or hide a failure."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hightide.ir.tier import Lane
from hightide.runtime.lanes import fences
from hightide.runtime.lanes.fences import EventFence, present_stream
from hightide.runtime.lanes.lanes import TURNS, WORKERS, Lanes
from hightide.runtime.lanes.queues import KEPT_PASSES
from hightide.stores.ticket import Ticket
from waiting import OwnThreads

TIMEOUT_S = 30.0

THREADED = tuple(WORKERS)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(timeout_s=10.0)
    yield lanes
    lanes.close()


def boom() -> None:
    raise OSError("the cable fell out")


# ---- tickets


def test_a_ticket_hands_over_its_result_to_every_waiter() -> None:
    ticket = Ticket("copy")
    seen: list[object] = []
    threads = [threading.Thread(target=lambda: seen.append(ticket.wait(timeout_s=10))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not ticket.done
    ticket.set_result(42)
    for thread in threads:
        thread.join(10)
    assert seen == [42] * 4 and ticket.done and ticket.error is None
    assert Ticket.completed("x", 7).wait() == 7


def test_a_ticket_raises_the_very_error_every_time() -> None:
    ticket, error = Ticket("copy"), KeyError("k")
    ticket.set_error(error)
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            ticket.wait()
        assert caught.value is error
    with pytest.raises(AssertionError, match="twice"):
        ticket.set_result(1)


def test_a_ticket_names_itself_when_it_is_late() -> None:
    ticket = Ticket("fetch.3")
    with pytest.raises(TimeoutError, match=r"'fetch.3' was not done after 0.05 s"):
        ticket.wait(timeout_s=0.05)
    ticket.set_result("late")  # a waiter that gave up is no obstacle
    assert ticket.wait() == "late"


def test_done_callbacks_run_once_before_or_after_completion() -> None:
    ticket, calls = Ticket("copy"), []
    ticket.add_done_callback(lambda t: calls.append(("early", t.done)))
    assert calls == []
    ticket.set_result(None)
    ticket.add_done_callback(lambda t: calls.append(("late", t.done)))
    assert calls == [("early", True), ("late", True)]


# ---- order


@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H])
def test_an_in_order_lane_keeps_its_order_whatever_is_ready(lanes: Lanes, lane: Lane) -> None:
    ran: list[str] = []
    gate = Ticket("gate")
    first = lanes.submit("first", lane, 9, [gate], lambda: ran.append("first"))
    second = lanes.submit("second", lane, 0, [], lambda: ran.append("second"))
    time.sleep(0.05)
    assert ran == [] and not second.done
    gate.set_result(None)
    assert lanes.wait(second, lane) >= 0
    assert ran == ["first", "second"] and first.done
    assert [record.id for record in lanes.records] == ["first", "second"]


def test_the_cpu_lane_takes_the_ready_action_that_is_due_first(lanes: Lanes) -> None:
    ran: list[str] = []
    busy, gate = threading.Event(), Ticket("gate")
    taken = threading.Event()
    lanes.submit("busy", Lane.CPU, 0, [], lambda: (taken.set(), busy.wait(10)))
    assert taken.wait(10)  # so that the others queue up behind it
    tickets = [
        lanes.submit(name, Lane.CPU, due, after, lambda name=name: ran.append(name))  # type: ignore[misc]
        for name, due, after in (("c", 7, []), ("a", 1, [gate]), ("b", 5, []), ("b2", 5, []))
    ]
    busy.set()
    for ticket in (tickets[0], tickets[2], tickets[3]):
        lanes.wait(ticket, Lane.CPU)
    assert ran == ["b", "b2", "c"] and not tickets[1].done
    gate.set_result(None)
    lanes.wait(tickets[1], Lane.CPU)
    assert ran[-1] == "a"
    records = {record.id: record for record in lanes.records}
    assert dict(zip(records["b"].ready, records["b"].ready_dues, strict=True)) == {"c": 7, "b": 5, "b2": 5}
    assert set(records["c"].ready) == {"c"} and set(records["a"].ready) == {"a"}
    assert records["b"].due == 5


def test_lanes_overlap(lanes: Lanes) -> None:
    """Each lane waits for the others inside its work: serial execution would time out."""
    barrier = threading.Barrier(len(THREADED) + 1)
    tickets = [lanes.submit(f"meet.{lane}", lane, 0, [], lambda: barrier.wait(10)) for lane in THREADED]
    lanes.run_inline("meet.compute", lambda: barrier.wait(10))
    for lane, ticket in zip(THREADED, tickets, strict=True):
        lanes.wait(ticket, lane)
    assert {record.lane for record in lanes.records} == {Lane.COMPUTE, *THREADED}


def test_dependencies_chain_across_lanes(lanes: Lanes) -> None:
    ran: list[int] = []
    tickets: list[Ticket] = []
    for index in range(300):
        lane = THREADED[index % 3]
        tickets.append(lanes.submit(str(index), lane, 0, tickets[-1:], lambda index=index: ran.append(index)))  # type: ignore[misc]
    lanes.wait(tickets[-1], Lane.CPU)
    assert ran == list(range(300))


def test_results_and_inner_tickets_come_back(lanes: Lanes) -> None:
    inner = Ticket("read")
    outer = lanes.submit("fetch", Lane.H2D, 0, [], lambda: inner)
    time.sleep(0.05)
    assert not outer.done
    inner.set_result(5)
    assert outer.wait(timeout_s=10) == 5
    assert lanes.run_inline("clear", lambda: "cleared") == "cleared"


def test_wait_returns_the_seconds_stalled(lanes: Lanes) -> None:
    def stalled_s() -> float:
        slow = lanes.submit("slow", Lane.H2D, 0, [], lambda: time.sleep(0.1))
        began_s = time.perf_counter()
        waited_s = lanes.wait(slow, Lane.H2D)
        assert waited_s <= time.perf_counter() - began_s and lanes.wait(slow, Lane.H2D) == 0.0
        return waited_s

    assert any(stalled_s() > 0.03 for _ in range(10))  # a busy machine may keep this thread from waiting at once


def test_lanes_record_no_graph(lanes: Lanes) -> None:
    weight = torch.ones(3, requires_grad=True)
    result = lanes.submit("copy", Lane.CPU, 0, [], lambda: weight * 2).wait(timeout_s=10)
    assert isinstance(result, torch.Tensor) and not result.requires_grad


# ---- failure


@pytest.mark.parametrize("lane", THREADED)
def test_a_failure_reaches_every_waiter_as_the_original_exception(lanes: Lanes, lane: Lane) -> None:
    gate, ran = Ticket("gate"), []
    behind = [
        lanes.submit(f"queued.{other}", other, 0, [gate], lambda: ran.append(1)) for other in THREADED if other != lane
    ]
    failing = lanes.submit("failing", lane, 0, [], boom)
    with pytest.raises(OSError, match="cable") as caught:
        lanes.wait(failing, lane)
    original = caught.value
    assert lanes.failure is original and failing.error is original
    for ticket in behind:  # still waiting for the gate, which never opens
        with pytest.raises(OSError) as again:
            ticket.wait(timeout_s=5)
        assert again.value is original
    for call in (
        lanes.check,
        lambda: lanes.submit("more", lane, 0, [], boom),
        lambda: lanes.run_inline("more", lambda: None),
        lambda: lanes.wait(Ticket.completed("fine"), lane),
    ):
        with pytest.raises(OSError) as later:
            call()
        assert later.value is original
    assert ran == [] and lanes.records == []


def test_a_failed_dependency_fails_what_waits_for_it(lanes: Lanes) -> None:
    error = KeyError("from a store")
    dependency = Ticket("read")
    waiting = lanes.submit("fetch", Lane.H2D, 0, [dependency], lambda: None)
    dependency.set_error(error)
    with pytest.raises(KeyError) as caught:
        lanes.wait(waiting, Lane.H2D)
    assert caught.value is error is lanes.failure


def test_a_dependency_that_had_failed_before_submission_fails_it_too(lanes: Lanes) -> None:
    error = KeyError("earlier")
    dependency = Ticket("read")
    dependency.set_error(error)
    ticket = lanes.submit("update", Lane.CPU, 0, [dependency], lambda: None)
    with pytest.raises(KeyError):
        ticket.wait(timeout_s=5)
    assert lanes.failure is error


def test_the_first_failure_wins(lanes: Lanes) -> None:
    first, second = ValueError("first"), ValueError("second")
    lanes.fail(first)
    lanes.fail(second)
    with pytest.raises(ValueError, match="first"):
        lanes.check()


@pytest.mark.parametrize("lane", THREADED)
def test_a_dependency_that_never_ends_times_out_by_name(lane: Lane) -> None:
    lanes = Lanes(timeout_s=0.2)
    ticket = lanes.submit("fetch.7", lane, 0, [Ticket.completed("fine"), Ticket("evict.3")], lambda: None)
    with pytest.raises(TimeoutError, match=rf"'fetch.7' on the lane {lane} waited 0.2 s for 'evict.3'"):
        ticket.wait(timeout_s=10)
    with pytest.raises(TimeoutError, match=r"evict.3"):
        lanes.check()
    lanes.close()


def test_a_wait_for_work_that_never_ends_times_out() -> None:
    lanes = Lanes(timeout_s=0.2)
    release = threading.Event()
    ticket = lanes.submit("slow", Lane.H2D, 0, [], lambda: release.wait(10))
    with pytest.raises(TimeoutError, match=r"waited 0.2 s for 'slow' on the lane h2d"):
        lanes.wait(ticket, Lane.H2D)
    release.set()
    lanes.close()


def test_an_exception_of_inline_work_goes_to_the_caller_only(lanes: Lanes) -> None:
    with pytest.raises(OSError):
        lanes.run_inline("block", boom)
    assert lanes.failure is None and lanes.records == []
    lanes.wait(lanes.submit("fine", Lane.CPU, 0, [], lambda: None), Lane.CPU)


# ---- end


@pytest.mark.parametrize("fails", [False, True])
def test_close_ends_every_thread_and_every_queued_task(fails: bool) -> None:
    threads = OwnThreads()
    lanes = Lanes()
    assert {*WORKERS.values()} <= {*threads.names()}
    gate = Ticket("gate")
    queued = [lanes.submit(f"queued.{lane}", lane, 0, [gate], lambda: None) for lane in THREADED]
    if fails:
        lanes.submit("failing", Lane.CPU, 0, [], boom)
    lanes.close()
    lanes.close()
    assert not threads.alive()
    for ticket in queued:
        assert ticket.done and ticket.error is not None
    if not fails:
        with pytest.raises(RuntimeError, match="closed"):
            lanes.submit("more", Lane.CPU, 0, [], lambda: None)


def test_close_lets_running_work_finish() -> None:
    lanes = Lanes()
    started = threading.Event()
    ticket = lanes.submit("slow", Lane.D2H, 0, [], lambda: (started.set(), time.sleep(0.1)))
    started.wait(10)
    lanes.close()
    assert ticket.done and ticket.error is None


def test_close_does_not_wait_forever() -> None:
    lanes = Lanes()
    release, taken = threading.Event(), threading.Event()
    lanes.submit("stuck", Lane.H2D, 0, [], lambda: (taken.set(), release.wait(30)))
    assert taken.wait(10)
    with pytest.warns(RuntimeWarning, match="hightide-h2d still busy"):
        lanes.close(timeout_s=0.1)
    release.set()
    lanes.close()
    assert not any(thread.is_alive() for thread in lanes._threads)


def test_forgotten_lanes_end_their_threads() -> None:
    lanes = Lanes()
    threads = lanes._threads
    lanes.wait(lanes.submit("work", Lane.CPU, 0, [], lambda: None), Lane.CPU)
    del lanes
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_an_idle_lane_keeps_no_tensor_alive(lanes: Lanes) -> None:
    collected = threading.Event()

    class Load:
        def __del__(self) -> None:
            collected.set()

    load = Load()
    ticket = lanes.submit("work", Lane.CPU, 0, [], lambda load=load: None)  # type: ignore[misc]
    lanes.wait(ticket, Lane.CPU)
    del load, ticket
    assert collected.wait(5)


# ---- records


def test_records_belong_to_the_pass_that_submitted_and_are_bounded(lanes: Lanes) -> None:
    gate = Ticket("gate")
    carried = lanes.submit("carried", Lane.CPU, 0, [gate], lambda: None)
    assert lanes.begin_pass() == 1 == lanes.pass_index
    lanes.wait(lanes.submit("own", Lane.H2D, 0, [], lambda: None), Lane.H2D)
    gate.set_result(None)
    lanes.wait(carried, Lane.CPU)
    assert [record.id for record in lanes.records_of(0)] == ["carried"]
    assert [record.id for record in lanes.records_of(1)] == ["own"]
    record = lanes.records_of(1)[0]
    assert (record.pass_index, record.lane, record.ready) == (1, Lane.H2D, ())
    assert 0 < record.started_s <= record.ended_s
    for _ in range(20):
        lanes.begin_pass()
        lanes.run_inline("tick", lambda: None)
    assert len(lanes.records) == KEPT_PASSES and lanes.records_of(1) == []


def test_two_thousand_actions_take_little_bookkeeping(lanes: Lanes) -> None:
    started_s = time.perf_counter()
    tickets = [lanes.submit(str(index), THREADED[index % 3], index, [], lambda: None) for index in range(2000)]
    for index, ticket in enumerate(tickets):
        lanes.wait(ticket, THREADED[index % 3])
    assert time.perf_counter() - started_s < 5.0
    assert len(lanes.records) == 2000


class LateFence:
    """A point in a stream that is reached when the test says so."""

    def __init__(self, number: int = 0) -> None:
        self.reached = threading.Event()
        self.number = number

    def join(self) -> None:
        raise AssertionError("a lane without a stream cannot stand behind a fence")

    def synchronize(self) -> None:
        assert self.reached.wait(TIMEOUT_S)


def test_the_cpu_lane_takes_what_is_through_before_what_is_only_enqueued(lanes: Lanes) -> None:
    fence = LateFence()
    enqueued = Ticket.completed("copy", fence=fence)
    order: list[str] = []
    due_first = lanes.submit("due first", Lane.CPU, 1, [enqueued], lambda: order.append("due first"))
    due_later = lanes.submit("due later", Lane.CPU, 2, [], lambda: order.append("due later"))
    due_later.wait(TIMEOUT_S)
    assert order == ["due later"] and not due_first.done
    fence.reached.set()
    due_first.wait(TIMEOUT_S)
    assert order == ["due later", "due first"]


def test_fences_are_awaited_in_the_order_in_which_they_were_set(lanes: Lanes) -> None:
    """Updates are asked for in forward order; gradients come home in backward order."""
    fences = [LateFence(number) for number in (3, 2, 1)]
    blocker = LateFence(0)
    lanes.submit("first", Lane.CPU, 9, [Ticket.completed("copy", fence=blocker)], lambda: None)
    order: list[int] = []
    tasks = []
    for at, fence in enumerate(fences):
        home = Ticket.completed("copy", fence=fence)
        tasks.append(lanes.submit(f"update {at}", Lane.CPU, at, [home], lambda at=at: order.append(at)))  # type: ignore[misc]
    blocker.reached.set()
    for fence, task in zip(fences[::-1], tasks[::-1], strict=True):
        fence.reached.set()
        task.wait(TIMEOUT_S)
    assert order == [2, 1, 0]


def test_a_fence_that_fails_fails_the_lanes(lanes: Lanes) -> None:
    error = RuntimeError("the GPU has fallen off the bus")

    class Broken(LateFence):
        def synchronize(self) -> None:
            raise error

    task = lanes.submit("update", Lane.CPU, 1, [Ticket.completed("copy", fence=Broken())], lambda: None)
    with pytest.raises(RuntimeError) as raised:
        task.wait(TIMEOUT_S)
    assert raised.value is error and lanes.failure is error


def test_who_waits_for_a_fence_does_so_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else CUDA would make itself at home on the first one, in whichever thread that is."""
    present = [0]
    waited_on: list[int] = []

    @contextmanager
    def device(place: torch.device) -> Iterator[None]:
        present[0] = place.index
        yield
        present[0] = 0

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking, "a thread that waits for it sleeps"

        def record(self, stream: Any) -> None:
            pass

        def synchronize(self) -> None:
            waited_on.append(present[0])

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    EventFence(SimpleNamespace(device=torch.device("cuda", 2))).synchronize()  # type: ignore[arg-type]
    assert waited_on == [2] and present == [0]


def test_a_stream_waits_for_a_fence_once_and_for_its_own_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is one that torch has not made: another may have its address later."""
    waited: list[int] = []
    present = [0]
    gpu = torch.device("cuda", 0)

    class Event:
        def __init__(self, blocking: bool) -> None:
            pass

        def record(self, stream: Any) -> None:
            pass

        def wait(self, stream: Any) -> None:
            waited.append(stream.number)

    def stream(device: torch.device) -> Any:
        assert device == gpu
        return SimpleNamespace(device=gpu, number=present[0])

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (present[0], index, 1), raising=False)
    monkeypatch.setattr(fences, "_known", {})
    default, lane, another, foreign = 0, 0x23, 0x43, 0x7F00
    present[0] = lane
    fence = EventFence(*present_stream(gpu))
    for number in (lane, default, default, another, default, foreign, foreign, another):
        present[0] = number
        fence.join()
    assert waited == [default, another, foreign, foreign]
    assert {key[0] for key in fences._known} == {default, lane, another}
    EventFence(stream(gpu)).join()
    assert waited[-1] == another and len(waited) == 5, "of a fence without a name everyone waits"


# ---- lanes between ranks


@contextmanager
def between_ranks(in_turn: bool = True) -> Iterator[Lanes]:
    lanes = Lanes(timeout_s=10.0, num_update_threads=1, several_ranks=True, in_turn=in_turn)
    try:
        yield lanes
    finally:
        lanes.close()


def test_collectives_are_issued_in_the_order_of_submission_whichever_can_be_first() -> None:
    """Of all lanes and models: each rank submits in the same order, and is ready in another. See [Note: collectives in
    one order]."""

    def order(in_turn: bool) -> list[str]:
        ran: list[str] = []
        with between_ranks(in_turn) as lanes, between_ranks(in_turn) as others:
            fetched = Ticket("fetched")
            gather = lanes.submit("gather", Lane.GATHER, 0, [fetched], lambda: ran.append("gather"))
            other = others.submit("other", Lane.REDUCE, 0, [gather], lambda: ran.append("other model"))
            reduce = lanes.submit("reduce", Lane.REDUCE, 0, [], lambda: ran.append("reduce"))
            if not in_turn:
                lanes.wait(reduce, Lane.REDUCE)
            fetched.set_result(None)
            lanes.wait(gather, Lane.GATHER)
            others.wait(other, Lane.REDUCE)
            lanes.wait(reduce, Lane.REDUCE)
        return ran

    assert order(in_turn=True) == ["gather", "other model", "reduce"]
    assert order(in_turn=False) == ["reduce", "gather", "other model"]


def test_lanes_that_have_failed_hold_up_no_others() -> None:
    with between_ranks() as lanes, between_ranks() as others:
        lanes.submit("never", Lane.GATHER, 0, [Ticket("never")], lambda: None)
        after = others.submit("after", Lane.GATHER, 0, [], lambda: 7)
        lanes.fail(KeyError("a bad batch"))
        others.wait(after, Lane.GATHER)
        assert after.wait() == 7
    assert not TURNS._tasks
