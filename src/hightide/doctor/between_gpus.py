"""How fast ranks gather and average chunks, alone and beside the links between host and GPU.

[Note: as many pieces on each rank] A collective needs all ranks, so each does as many as all others, whatever time that
takes; only copies, which are a rank's own, go on for as long as collectives beside them do. The slowest rank counts."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hightide.doctor.links import NUM_BUFFERS, Link
from hightide.doctor.measure import Tell, stores_of
from hightide.ir.chunk import ALIGN_NUMEL
from hightide.ir.machine import CollectiveRates, Links, Machine
from hightide.ir.tier import Lane
from hightide.runtime.alike import lanes_of
from hightide.runtime.lanes.lanes import Lanes
from hightide.shard.collectives import Collectives, Section
from hightide.stores.store import ALIGN_BYTES

LATENCIES = 20


@dataclass(frozen=True)
class CollectiveEffort:
    chunk_bytes: int = 256 << 20  # whole, as a large layer's
    num_pieces: int = 8

    @classmethod
    def here(cls, device: torch.device) -> CollectiveEffort:
        return cls() if device.type == "cuda" else cls(chunk_bytes=8 << 20, num_pieces=4)


def measure_links(
    collectives: Collectives, effort: CollectiveEffort | None = None, tell: Tell = lambda _: None
) -> Links:
    """All ranks call it; nodes must have equally many."""
    ranks = collectives.ranks
    sizes = {sum(node == other for node in ranks.nodes) for other in ranks.nodes}
    if len(sizes) > 1:
        raise ValueError(
            f"nodes have {sorted(sizes)} ranks; start as many on each (torchrun --nproc-per-node), so that rates "
            "inside of a node and across can be told apart"
        )
    (gpus,) = sizes
    measured = _Measured(collectives, effort or CollectiveEffort.here(ranks.device), tell)
    try:
        across = None
        if ranks.num_nodes > 1:
            across = measured.across(gpus)
            if gpus > 1:
                collectives.divide(ranks.num_nodes)
        inside = across if across is not None and gpus == 1 else measured.inside(gpus)
        beside, copies_beside = measured.beside_copies()
        together = measured.together()
    finally:
        measured.close()
    return Links(
        gpus_per_node=gpus,
        num_nodes=ranks.num_nodes,
        inside=inside[0],
        across=None if across is None else across[0],
        latency_s=inside[1],
        across_latency_s=inside[1] if across is None else across[1],
        beside_copies=beside,
        copies_beside=copies_beside,
        together=together,
        backend=ranks.backend,
    )


def with_links(machine: Machine, links: Links) -> Machine:
    return replace(machine, links=links, source=f"{machine.source}; links over {links.backend}")


class _Measured:
    def __init__(self, collectives: Collectives, effort: CollectiveEffort, tell: Tell) -> None:
        self._collectives, self._effort, self._tell = collectives, effort, tell
        ranks = collectives.ranks
        unit = ranks.world * ALIGN_NUMEL
        self._numel = max(unit, effort.chunk_bytes // 4 // unit * unit)
        self._wholes = [torch.zeros(self._numel, device=ranks.device) for _ in range(2)]
        gpu = ranks.device if ranks.device.type == "cuda" else None
        self._lanes: Lanes = lanes_of(ranks, gpu, in_turn=False)  # measured one beside the other
        copied_bytes = effort.chunk_bytes // ALIGN_BYTES * ALIGN_BYTES
        host_bytes, gpu_bytes = NUM_BUFFERS * copied_bytes + 8 * ALIGN_BYTES, copied_bytes + ALIGN_BYTES
        self._host, self._gpu = stores_of(ranks.device, host_bytes, gpu_bytes)
        self._host.pin()
        self._link = Link(Lane.H2D, self._host, self._gpu, self._lanes.streams, copied_bytes)

    def close(self) -> None:
        self._lanes.close()
        self._gpu.close()
        self._host.close()

    # -- alone

    def inside(self, gpus: int) -> tuple[CollectiveRates, float]:
        share = self._numel * 4 * (gpus - 1) / gpus
        return self._rates(share, share, 2 * share)

    def across(self, gpus: int) -> tuple[CollectiveRates, float]:
        """Of each GPU's part of its node's network."""
        nodes = self._collectives.ranks.num_nodes
        received = self._numel * 4 * (nodes - 1) / nodes / gpus
        return self._rates(received, received, 2 * received)

    def _rates(self, gathered: float, reduced: float, all_reduced: float) -> tuple[CollectiveRates, float]:
        seconds = []
        for name, work in (("gather", self._gather), ("reduce", self._reduce), ("all-reduce", self._reduce_whole)):
            self._tell(f"{name} of {self._numel * 4 >> 20} MiB among {self._collectives.num_shards} ranks")
            seconds.append(self._slowest(self._time(work, self._effort.num_pieces)))
        tiny = Section(0, self._collectives.num_shards * ALIGN_NUMEL)
        latency_s = self._slowest(
            self._time(lambda: self._collectives.gather("next to nothing", self._wholes[0], [tiny]), LATENCIES)
        )
        amounts = (max(1.0, gathered), max(1.0, reduced), max(1.0, all_reduced))
        rates = CollectiveRates(*(amount / one for amount, one in zip(amounts, seconds, strict=True)))
        return rates, latency_s

    def _gather(self) -> None:
        self._collectives.gather("a chunk", self._wholes[0], [Section(0, self._numel)])

    def _reduce(self) -> None:
        self._collectives.reduce("a gradient", self._wholes[1], [Section(0, self._numel)])

    def _reduce_whole(self) -> None:
        self._collectives.reduce_whole("a whole gradient", self._wholes[1])

    def _time(self, work: Callable[[], object], num_pieces: int, lane: Lane = Lane.GATHER) -> float:
        """Of one piece, the middle one; the first, which sets connections up, is not counted."""
        times: list[float] = []

        def all_pieces() -> None:
            for _ in range(num_pieces + 1):
                started_s = time.perf_counter()
                work()
                if (fence := self._lanes.streams.fence()) is not None:
                    fence.synchronize()
                times.append(time.perf_counter() - started_s)

        self._lanes.wait(self._lanes.submit("measured", lane, 0, [], all_pieces), lane)
        return statistics.median(times[1:])

    def _slowest(self, seconds: float) -> float:
        return max(self._of_all(seconds))

    def _of_all(self, value: float) -> list[float]:
        return [float(row) for row in self._collectives.exchange("what was measured", repr(value).encode())]

    # -- beside others

    def beside_copies(self) -> tuple[float, float]:
        """What is left of a collective beside copies to the GPU, and of these beside it: the smaller of what gathers
        and averages leave."""
        both = [self._beside_copies(*one) for one in ((Lane.GATHER, self._gather), (Lane.REDUCE, self._reduce))]
        collective, copies = (min(shares) for shares in zip(*both, strict=True))
        return collective, copies

    def _beside_copies(self, lane: Lane, work: Callable[[], object]) -> tuple[float, float]:
        self._tell(f"{lane} beside copies to the GPU")
        pieces = self._effort.num_pieces
        alone_s = self._slowest(self._time(work, pieces, lane))
        copies_alone = self._copies(lambda: time.sleep(pieces * alone_s))
        found: list[float] = []
        copies_beside = self._copies(lambda: found.append(self._time(work, pieces, lane)))
        left = min(self._of_all(copies_beside / copies_alone))
        return _share(alone_s / self._slowest(found[0])), _share(left)

    def _copies(self, meanwhile: Callable[[], object]) -> float:
        """Bytes per second of copies for as long as something else takes."""
        over, moved = threading.Event(), [0]

        def copy() -> None:
            while not over.is_set():
                moved[0] += self._link()

        started_s = time.perf_counter()
        ticket = self._lanes.submit("copies", Lane.H2D, 0, [], copy)
        try:
            meanwhile()
        finally:
            over.set()
        self._lanes.wait(ticket, Lane.H2D)
        return max(1, moved[0]) / (time.perf_counter() - started_s)

    def together(self) -> float:
        """What is left of a gather beside averages, or of these: the smaller share."""
        self._tell("gathers beside averages")
        pieces = self._effort.num_pieces
        alone = [self._time(self._gather, pieces), self._time(self._reduce, pieces, Lane.REDUCE)]
        both: dict[Lane, float] = {}

        def measure(lane: Lane, work: Callable[[], object]) -> None:
            both[lane] = self._time(work, pieces, lane)

        other = threading.Thread(target=measure, args=(Lane.REDUCE, self._reduce))
        other.start()
        measure(Lane.GATHER, self._gather)
        other.join()
        shares = [before / both[lane] for before, lane in zip(alone, (Lane.GATHER, Lane.REDUCE), strict=True)]
        return _share(min(self._of_all(min(shares))))


def _share(value: float) -> float:
    return min(1.0, max(0.01, value))
