"""The links between host memory and the accelerator, by copies as the stores make them."""

from __future__ import annotations

import itertools
import statistics
import time

import torch

from hightide.ir.tier import Lane
from hightide.runtime.lanes.lanes import Streams
from hightide.stores.host_arena import HostArena
from hightide.stores.store import Accelerator
from hightide.stores.ticket import Fence

NUM_BUFFERS = 4  # on the host, per direction: a single one could stay in the processor's cache
TINY_BYTES = 4096


class Link:
    """One direction. A call issues a copy and returns when the copy before it is through: the link is never idle."""

    def __init__(self, lane: Lane, host: HostArena, gpu: Accelerator, streams: Streams, buffer_bytes: int) -> None:
        assert lane in (Lane.H2D, Lane.D2H), lane
        self._lane, self._gpu, self._streams = lane, gpu, streams
        self._region = gpu.allocate(buffer_bytes, f"{lane} buffer")
        regions = [host.allocate(buffer_bytes, f"{lane} buffers") for _ in range(NUM_BUFFERS)]
        self._buffers = [host.view(region, torch.uint8).fill_(1) for region in regions]
        self._turns = itertools.cycle(self._buffers)
        self._before: Fence | None = None

    def __call__(self) -> int:
        buffer = next(self._turns)
        self._copy(buffer)
        fence = self._streams.fence()
        if self._before is not None:
            self._before.synchronize()
        self._before = fence
        return buffer.nbytes

    def _copy(self, buffer: torch.Tensor) -> None:
        if self._lane is Lane.H2D:
            self._gpu.write(self._region, buffer).wait()
        else:
            self._gpu.read(self._region, buffer).wait()

    def latency_s(self, repeats: int = 50) -> float:
        """Of a copy of next to nothing, to its end."""
        times = []
        for _ in range(repeats):
            started_s = time.perf_counter()
            self._copy(self._buffers[0][:TINY_BYTES])
            if self._gpu.device.type == "cuda":
                torch.cuda.current_stream(self._gpu.device).synchronize()
            times.append(time.perf_counter() - started_s)
        return statistics.median(times)
