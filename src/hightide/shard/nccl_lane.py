"""Collectives over NCCL, on the stream that is current in the calling thread, which does not wait for them.

[Note: communicators are made at once] NCCL makes a communicator, and connects the GPUs, at the first collective of each
kind. That takes seconds and hundreds of MiB, and may wait for all that the GPU has to do. In the first steps two lanes
would make theirs at the same time, while compute runs, from memory that the plan has given to others. So each lane does
its collectives once when it comes to be: in one order on all ranks, and before anybody asks how much memory is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from hightide.process.interrupts import safe_point
from hightide.shard.ranks import Ranks
from hightide.shard.watchman import Watchman

# torch 2.13 has other names for them, and warns of the older ones
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)

FIRST_NUMEL = 1 << 20  # each rank's part of what is sent first: enough for the ways that NCCL has for large chunks
LOOK_S = 0.002


class NcclLane:
    """In place: a rank's part of the whole is where NCCL expects it."""

    def __init__(self, ranks: Ranks, lane: str) -> None:
        assert ranks.watchman is not None
        members, self.group = ranks.circle(lane)
        self.lane, self.rank, self.world = lane, members.index(ranks.rank), len(members)
        self._watchman: Watchman = ranks.watchman

    def open(self, device: torch.device) -> None:
        """See [Note: communicators are made at once]. All members call it, and wait."""
        whole = torch.zeros(self.world * FIRST_NUMEL, device=device)
        self.reduce(f"the first of lane {self.lane}", whole)
        self.gather(f"the first of lane {self.lane}", whole)
        if device.type == "cuda":
            done = torch.cuda.current_stream(device).record_event()
            while not done.query():  # others may be late, or end
                self._watchman.check()
                safe_point()
                time.sleep(LOOK_S)

    def gather(self, name: str, whole: torch.Tensor) -> None:
        content = whole.view(torch.uint8)  # NCCL does not know all dtypes
        own = content.view(self.world, -1)[self.rank]
        self._issue(name, content, lambda: _all_gather(content, own, group=self.group, async_op=True))

    def reduce(self, name: str, whole: torch.Tensor) -> None:
        own = whole.view(self.world, -1)[self.rank]
        self._issue(name, whole, lambda: _reduce_scatter(own, whole, group=self.group, async_op=True))

    def sum_all(self, name: str, values: torch.Tensor) -> None:
        rows = values.new_empty(self.world, values.numel())
        own = values.clone()
        self._issue(name, values, lambda: _all_gather(rows.view(-1), own, group=self.group, async_op=True))
        values.copy_(rows[0])
        for row in rows[1:]:
            values += row

    def _issue(self, name: str, content: torch.Tensor, begin: Callable[[], dist.Work]) -> None:
        works: list[dist.Work] = []

        def is_through() -> bool:
            with suppress(RuntimeError):
                return bool(works) and works[0].is_completed()
            return False  # it was broken off

        issued = self._watchman.issue(self.lane, f"{name}, {content.nbytes} bytes", is_through)
        try:
            works.append(begin())
            works[0].wait()  # the stream does
        except RuntimeError as error:
            raise self._watchman.explain(issued, error) from error
