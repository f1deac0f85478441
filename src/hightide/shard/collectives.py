"""The few things that ranks exchange. A whole chunk has up to three sections, ranges of its elements; rank r of R holds
the r-th of R equal parts of each, and those parts, one after the other, are its shard. Where ranks are divided into
groups, R is the size of a group (see [Note: groups with a copy each] in ranks.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from hightide.shard.communicators import ACROSS, CONTROL, GATHER, NCCL, ON_HOST, REDUCE, STEP
from hightide.shard.gloo_lane import GlooLane
from hightide.shard.nccl_lane import NcclLane
from hightide.shard.ranks import Ranks

LENGTH_BYTES = 8
SHORT_BYTES = 4096  # what is not longer goes at once


class Section(NamedTuple):
    """A range of a whole chunk's elements that is divided among the ranks."""

    start: int
    numel: int

    def part(self, rank: int, world: int) -> Section:
        assert self.numel % world == 0, f"{self} cannot be divided among {world} ranks"
        numel = self.numel // world
        return Section(self.start + rank * numel, numel)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.start : self.start + self.numel]


class DeviceLane(Protocol):
    """How tensors travel on one lane. All are contiguous and have one dimension."""

    def gather(self, name: str, whole: torch.Tensor) -> None:
        """Each rank's part, of equal parts, into the whole everywhere."""

    def reduce(self, name: str, whole: torch.Tensor) -> None:
        """Sums, in fp32, of each rank's part stay there."""

    def sum_all(self, name: str, values: torch.Tensor) -> None:
        """A few numbers, everywhere, the same bits."""


class Collectives:
    """On each lane, one thread at a time, and the same calls in the same order on all ranks. `name` says what for. A
    rank that is alone exchanges nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.shard, self.num_shards = ranks.rank, ranks.world  # which of so many this rank has
        self.shard_holders = tuple(range(ranks.world))  # ranks of the first group, by their shards
        self._lanes: dict[str, DeviceLane] = {}
        self._is_open, self._opened = False, set[dist.ProcessGroup]()
        if not ranks.is_alone:
            self._lanes = {lane: self._lane(lane) for lane in (GATHER, REDUCE, STEP)}
            self._on_host = {lane: GlooLane(ranks, lane, torch.device("cpu")) for lane in ON_HOST}

    def _lane(self, lane: str) -> DeviceLane:
        return (
            NcclLane(self.ranks, lane) if self.ranks.backend == NCCL else GlooLane(self.ranks, lane, self.ranks.device)
        )

    def open(self) -> None:
        """See [Note: communicators are made at once] in nccl_lane.py. All ranks call it, in the same order."""
        self._is_open = True
        for made in self._lanes.values():
            if isinstance(made, NcclLane) and made.group not in self._opened:
                self._opened.add(made.group)
                made.open(self.ranks.device)

    def divide(self, replicas: int) -> None:
        """Into groups that have a copy of everything each. All ranks call it, before anything is in shards."""
        groups = self.ranks.divided(replicas)
        self.ranks.divide(replicas)
        self.shard_holders = groups[0]
        inside = next(group for group in groups if self.ranks.rank in group)
        self.shard, self.num_shards = inside.index(self.ranks.rank), len(inside)
        if self._lanes:
            inside_lanes = (GATHER, REDUCE) if self.num_shards > 1 or replicas == 1 else ()
            across_lanes = (ACROSS,) if replicas > 1 else ()
            self._lanes = {lane: self._lane(lane) for lane in (*inside_lanes, *across_lanes, STEP)}
            if self._is_open:
                self.open()

    # ---- chunks

    def gather(
        self, name: str, whole: torch.Tensor, sections: Sequence[Section], shard: torch.Tensor | None = None
    ) -> None:
        """Each rank's parts into the whole, everywhere. This rank's own are there, or come from `shard`."""
        start = 0
        for section in self._divided(sections):
            part = section.part(self.shard, self.num_shards)
            if shard is not None:
                part.of(whole).copy_(shard[start : start + part.numel])
                start += part.numel
            if GATHER in self._lanes:
                self._lanes[GATHER].gather(name, section.of(whole))

    def reduce(
        self, name: str, whole: torch.Tensor, sections: Sequence[Section], out: torch.Tensor | None = None
    ) -> None:
        """The mean over all ranks, of sums in fp32: this rank's parts of it replace those of the whole, and go to
        `out`, a shard. What the rest of the whole holds afterwards is not said."""
        assert whole.dtype is torch.float32, whole.dtype
        start = 0
        for section in self._divided(sections):
            part = section.part(self.shard, self.num_shards)
            mean = part.of(whole)
            if REDUCE in self._lanes:
                self._lanes[REDUCE].reduce(name, section.of(whole))
            if ACROSS in self._lanes:
                self._sum_across(name, mean)
            if self._lanes:
                mean.div_(self.ranks.world)
            if out is not None:
                out[start : start + part.numel].copy_(mean)
                start += part.numel

    def reduce_whole(self, name: str, whole: torch.Tensor) -> None:
        """The mean over all ranks, everywhere: of what every rank has a copy of."""
        self.reduce(name, whole, (Section(0, whole.numel()),))
        if REDUCE in self._lanes:
            self._lanes[REDUCE].gather(name, whole)

    def _sum_across(self, name: str, part: torch.Tensor) -> None:
        """Of the same shard in all groups, the same bits in each: one of them sums, and the others get it."""
        lane, replicas = self._lanes[ACROSS], self.ranks.world // self.num_shards
        even = part[: part.numel() // replicas * replicas]
        if even.numel():
            lane.reduce(name, even)
            lane.gather(name, even)
        if even.numel() < part.numel():
            lane.sum_all(f"{name}, the rest", part[even.numel() :])

    def _divided(self, sections: Sequence[Section]) -> list[Section]:
        return [section for section in sections if section.numel]

    # ---- numbers and bytes

    def sum_all(self, name: str, values: torch.Tensor) -> None:
        """A few numbers, summed in place: the same bits on all ranks."""
        if self._lanes:
            self._lanes[STEP].sum_all(name, values.view(-1))

    def any_true(self, name: str, value: bool) -> bool:
        return b"\1" in self.exchange(name, b"\1" if value else b"\0")

    def exchange(self, name: str, content: bytes, lane: str = CONTROL) -> list[bytes]:
        """What each rank has to say. In the user's thread, or on the lane SAVE in the one that writes a checkpoint."""
        if not self._lanes:
            return [content]
        control = self._on_host[lane]
        first = len(content).to_bytes(LENGTH_BYTES, "little") + content[:SHORT_BYTES].ljust(SHORT_BYTES, b"\0")
        rows = control.exchange(name, first)
        lengths = [int.from_bytes(row[:LENGTH_BYTES], "little") for row in rows]
        rest = [b""] * len(rows)
        if max(lengths) > SHORT_BYTES:
            rest = control.exchange(f"{name}, the rest", content[SHORT_BYTES:].ljust(max(lengths) - SHORT_BYTES, b"\0"))
        whole = [row[LENGTH_BYTES:] + more for row, more in zip(rows, rest, strict=True)]
        return [content[:length] for content, length in zip(whole, lengths, strict=True)]

    def broadcast_bytes(self, name: str, content: bytes | None, source: int = 0) -> bytes:
        """What the source has, which alone passes something."""
        assert (content is not None) == (self.ranks.rank == source)
        return self.exchange(name, content or b"")[source]
