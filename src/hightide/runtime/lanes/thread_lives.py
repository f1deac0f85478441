"""Lives of the threads that lanes.py makes, each from its begin to its end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

from hightide.ir.tier import Lane
from hightide.runtime.lanes.queues import LaneRecord, Queue, SharedState, Task, Watcher
from hightide.runtime.lanes.update_threads import TileQueue
from hightide.stores.ticket import Ticket

if TYPE_CHECKING:
    from hightide.runtime.lanes.lanes import Streams


def share(tiles: TileQueue, number: int, begun: threading.Semaphore) -> None:
    """Of a thread that shares updates."""
    torch.set_num_threads(1)
    begun.release()
    with torch.no_grad():
        while (job := tiles.join()) is not None:
            try:
                job.work(number)
            except BaseException as error:  # it belongs to whoever brought the work
                job.fail(error)
            tiles.leave(job)
            del job  # an idle thread must not keep an update's tensors alive


def work(queue: Queue, lane: Lane, timeout_s: float, streams: Streams, begun: threading.Semaphore) -> None:
    """Of a lane's thread."""
    if lane.on_host:
        torch.set_num_threads(1)
    begun.release()
    with torch.no_grad(), streams.of(lane):  # copies and updates are no part of anyone's graph
        while (taken := queue.take()) is not None:
            task, error = taken
            if error is None:
                _run(task, queue.state, timeout_s, streams)
            else:
                task.ticket.set_error(error)
            del taken, task, error  # an idle thread must not keep a task's tensors alive


def watch(watcher: Watcher, begun: threading.Semaphore) -> None:
    """Of a thread that waits for fences."""
    begun.release()
    while (taken := watcher.take()) is not None:
        ticket, then = taken
        try:
            assert ticket.fence is not None
            ticket.fence.synchronize()
        except BaseException as error:  # whatever it is, it belongs to the user's thread
            watcher.state.fail(error)
        else:
            then()
        del taken, ticket, then


def _run(task: Task, state: SharedState, timeout_s: float, streams: Streams) -> None:
    started_s = time.perf_counter()
    try:
        on_host = task.lane.on_host
        for ticket in task.after:
            if ticket.fence is not None:
                ticket.fence.synchronize() if on_host else ticket.fence.join()
        began = streams.mark(task.lane)
        result = task.run()
        if isinstance(result, Ticket):
            result = result.wait(timeout_s)
        ended = None if began is None else streams.mark(task.lane)
        task.ticket.fence = None if on_host else streams.fence()
    except BaseException as error:  # whatever it is, it belongs to the user's thread
        state.fail(error)
        task.ticket.set_error(error)
        return
    ended_s = time.perf_counter()
    # The record comes before the ticket: who has waited for an action finds its record.
    span = (started_s, ended_s)
    events = None if began is None or ended is None else (began, ended)
    num_bytes = result if isinstance(result, int) else 0
    done = (task.pass_index, task.lane, task.id, *span, task.ready, task.ready_dues, task.due, events)
    state.record(LaneRecord(*done, num_bytes=num_bytes))
    task.ticket.set_result(result)
