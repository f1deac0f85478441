"""Bytes that are there during a whole run, for many candidates at once: chunks, slots, buffers.

Searches ask thousands of times. What a chunk takes depends on nothing but where its block's parameters and states live,
so each chunk is asked about each of these tiers once, and equal blocks are added up by multiplication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from hightide.ir.chunk import ChunkSpec, Layout, region_bytes
from hightide.ir.tier import Tier
from hightide.planner.chunk_place import RINGS, STAGING, Buffer, ChunkPlace
from hightide.planner.chunk_places import BlockTiers
from hightide.planner.lookup import standing_bytes
from hightide.planner.search.candidate import Candidate
from hightide.planner.search.space import Space
from hightide.planner.waiting import left_bytes


@dataclass(frozen=True)
class Needs:
    """Bytes on each tier."""

    gpu_bytes: int
    host_bytes: int
    disk_bytes: int

    @property
    def by_tier(self) -> dict[Tier, int]:
        return {Tier.GPU: self.gpu_bytes, Tier.HOST: self.host_bytes, Tier.DISK: self.disk_bytes}


@dataclass(frozen=True)
class StandingNeeds(Needs):
    """Of chunks, slots and buffers."""

    parked_bytes: tuple[int, ...]  # by block: of gradients, from backward to the next forward at most; empty: of none


@dataclass(frozen=True, eq=False)
class _Share:
    """Of one block's chunks: what adds up, what all blocks share (the largest counts), and how wide its ticks are.
    Equal blocks have the same one, so that counting them needs no look inside."""

    added: tuple[int, ...]  # by tier
    largest: tuple[int, ...]  # by buffer
    has_leaving: bool  # gradients that leave the GPU, or go to other ranks
    widths: tuple[int, int]  # in slots and grad slots, of the chunks that it owns and uses
    parked_bytes: int  # of gradients


class StandingBytes:
    def __init__(self, space: Space) -> None:
        self._space = space
        self._layouts: dict[int, _LayoutShares] = {}

    def of(self, candidate: Candidate) -> StandingNeeds:
        return self._layout(candidate.slot_numel or self._space.slot_numel).base(candidate)

    def least_bytes(self, tiers: Sequence[Tier]) -> int:
        """Of chunks on these tiers together, wherever each block lives; slots are not counted."""
        return self._layout(self._space.slot_numel).least_bytes(tiers)

    def _layout(self, slot_numel: int) -> _LayoutShares:
        if slot_numel not in self._layouts:
            self._layouts[slot_numel] = _LayoutShares(self._space, self._space.layout(slot_numel))
        return self._layouts[slot_numel]


class _LayoutShares:
    def __init__(self, space: Space, layout: Layout) -> None:
        self._space, self._layout = space, layout
        self._owned: list[list[ChunkSpec]] = [[] for _ in space.profile.blocks]
        for chunk in layout.chunks:
            self._owned[chunk.block].append(chunk)
        self._shared = [chunk for chunk in layout.chunks if len(chunk.users) > 1]
        self._shares: dict[BlockTiers, list[_Share]] = {}

    def base(self, candidate: Candidate) -> StandingNeeds:
        space, profile = self._space, self._space.profile
        all_tiers = space.tiers_of(candidate)
        by_tiers = {tiers: self._shares_in(tiers) for tiers in set(all_tiers)}
        shares = [by_tiers[tiers][block] for block, tiers in enumerate(all_tiers)]
        counts = Counter(shares)
        gpu, host, disk = (
            sum(share.added[tier] * count for share, count in counts.items()) for tier, _ in enumerate(Tier)
        )
        largest = (max(sizes) for sizes in zip(*(share.largest for share in counts), strict=True))
        buffers = dict(zip(Buffer, largest, strict=True))
        slots, grad_slots = self._widest(all_tiers, shares)
        num_slots = candidate.num_slots(slots)
        num_grad_slots = candidate.num_grad_slots(grad_slots, any(share.has_leaving for share in counts))
        gpu += num_slots * buffers[Buffer.SLOT] + num_grad_slots * buffers[Buffer.GRAD_SLOT]
        gpu += sum(buffers[one] for one in STAGING) + profile.batch_bytes + profile.buffer_bytes
        gpu += left_bytes(profile, candidate.micro_batch)
        if candidate.looked_up:
            rows = standing_bytes(profile, space.build(candidate))
            gpu, host = gpu + rows[Tier.GPU], host + rows[Tier.HOST]
        rings = candidate.read_buffers, max(1, candidate.grad_buffers), candidate.state_buffers
        host += sum(count * buffers[one] for count, one in zip(rings, RINGS, strict=True))
        parks = any(share.parked_bytes for share in counts)
        return StandingNeeds(gpu, host, disk, tuple(share.parked_bytes for share in shares) if parks else ())

    def least_bytes(self, tiers: Sequence[Tier]) -> int:
        shares_in = [self._shares_in(BlockTiers(*pair, Tier.HOST)) for pair in product(tiers, tiers)]
        return sum(min(sum(share.added) for share in shares) for shares in zip(*shares_in, strict=True))

    def _widest(self, all_tiers: list[BlockTiers], shares: list[_Share]) -> tuple[int, int]:
        """As Placement.widest_tick."""
        called = self._space.called
        widths = {share.widths for block, share in enumerate(shares) if block in called}
        slots = max((width[0] for width in widths), default=0)
        grad_slots = max((width[1] for width in widths), default=0)
        for user in {user for chunk in self._shared for user in chunk.users if user in called}:
            used = [chunk for chunk in self._shared if user in chunk.users and chunk.block != user]
            more = [self._place(all_tiers[chunk.block], chunk) for chunk in used]
            slots = max(slots, shares[user].widths[0] + sum(place.num_slots for place in more))
            grad_slots = max(grad_slots, shares[user].widths[1] + sum(place.num_grad_slots for place in more))
        return slots, grad_slots

    def _shares_in(self, tiers: BlockTiers) -> list[_Share]:
        """By block."""
        if tiers not in self._shares:
            same: dict[object, _Share] = {}
            shares = [self._made(tiers, index, chunks) for index, chunks in enumerate(self._owned)]
            self._shares[tiers] = [same.setdefault(tuple(vars(share).values()), share) for share in shares]
        return self._shares[tiers]

    def _made(self, tiers: BlockTiers, block: int, chunks: list[ChunkSpec]) -> _Share:
        places = [self._place(tiers, chunk) for chunk in chunks]
        own = [place for place in places if block in place.chunk.users]
        return _Share(
            added=tuple(sum(place.bytes_on[tier] for place in places) for tier in Tier),
            largest=tuple(max((place.buffer_bytes.get(b, 0) for place in places), default=0) for b in Buffer),
            has_leaving=any(place.in_grad_slot and (place.leaves or place.is_reduced) for place in places),
            widths=(sum(place.num_slots for place in own), sum(place.num_grad_slots for place in own)),
            parked_bytes=sum(region_bytes(place.grad_bytes) for place in places if place.parks),
        )

    def _place(self, tiers: BlockTiers, chunk: ChunkSpec) -> ChunkPlace:
        return self._space.places(self._layout.slot_numel).at(chunk, tiers)
