"""Where all bytes of a model live under one plan. It is worked out once per plan and read by all."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property

from hightide.ir.plan import BlockPlan, Plan
from hightide.ir.tier import Tier
from hightide.planner.chunk_place import BUFFER_TIERS, RING_COUNTS, STAGING, Buffer, ChunkPlace
from hightide.planner.chunk_places import BlockTiers, ChunkPlaces


class Placement:
    """Of all chunks under one plan."""

    def __init__(self, plan: Plan, places: ChunkPlaces | None = None) -> None:
        """`places`: those of the plan's layout, for those who ask about many plans."""
        places = places or ChunkPlaces(
            plan.layout,
            plan.update,
            plan.gradients,
            plan.accumulate,
            plan.ranks,
            plan.replicas,
            plan.even_alone,
            plan.rounded_on_gpu,
        )
        tiers = [
            BlockTiers(block.params, block.states, block.sums, block.compute, block.parks, block.sharing, block.settles)
            for block in plan.blocks
        ]
        self.plan = plan
        self.chunks = tuple(places.at(chunk, tiers[chunk.block]) for chunk in plan.layout.chunks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.plan == other.plan

    def __hash__(self) -> int:
        return hash(self.plan.fingerprint)

    def of(self, plan: Plan) -> Placement:
        """The same decisions under another description."""
        other = copy(self)
        other.plan = plan
        return other

    @cached_property
    def by_block(self) -> tuple[tuple[ChunkPlace, ...], ...]:
        """For each block all chunks that it uses, its own and those it shares."""
        uses: list[list[ChunkPlace]] = [[] for _ in self.plan.blocks]
        for place in self.chunks:
            for user in place.chunk.users:
                uses[user].append(place)
        return tuple(map(tuple, uses))

    @cached_property
    def owners(self) -> tuple[int | None, ...]:
        """By block, the one whose decisions say where its parameters are: itself, or for one that has only tied
        parameters (the head of many language models) the first block that uses them. None: it has no parameters."""
        owners = [[place.chunk.block for place in places] for places in self.by_block]
        return tuple(block if block in found else next(iter(found), None) for block, found in enumerate(owners))

    @cached_property
    def blocks_in_effect(self) -> tuple[BlockPlan, ...]:
        """What is decided about each block, with the tiers of its owner: its own mean nothing."""
        blocks = self.plan.blocks
        owning = [blocks[index if owner is None else owner] for index, owner in enumerate(self.owners)]
        found = zip(blocks, owning, strict=True)
        return tuple(replace(b, params=owner.params, states=owner.states, sums=owner.sums) for b, owner in found)

    @cached_property
    def bytes_on(self) -> Mapping[Tier, int]:
        """Of all chunks, for the whole run; buffers come to it."""
        return {tier: sum(place.bytes_on[tier] for place in self.chunks) for tier in Tier}

    @cached_property
    def buffer_bytes(self) -> Mapping[Buffer, int]:
        """Of one of each."""
        largest = dict.fromkeys(Buffer, 0)
        for place in self.chunks:
            for buffer, num_bytes in place.buffer_bytes.items():
                largest[buffer] = max(largest[buffer], num_bytes)
        return largest

    @property
    def staging_bytes(self) -> int:
        return sum(self.buffer_bytes[buffer] for buffer in STAGING)

    @property
    def num_buffers(self) -> Mapping[Buffer, int]:
        """Of each ring."""
        return {ring: getattr(self.plan, name) for ring, name in RING_COUNTS.items()}

    @property
    def is_resident(self) -> bool:
        """All parameters and states stay on the GPU."""
        return all(place.params is place.states is Tier.GPU for place in self.chunks)

    @property
    def uses_disk(self) -> bool:
        return self.bytes_on[Tier.DISK] > 0

    @property
    def has_leaving(self) -> bool:
        """Gradients go from grad slots to another tier, or to other ranks."""
        return any(place.in_grad_slot and (place.leaves or place.is_reduced) for place in self.chunks)

    def widest_tick(self, called: set[int]) -> tuple[int, int]:
        """Slots and grad slots that the most demanding of the called blocks needs at once."""
        needed = [
            (sum(place.num_slots for place in places), sum(place.num_grad_slots for place in places))
            for block, places in enumerate(self.by_block)
            if block in called
        ]
        return max((slots for slots, _ in needed), default=0), max((grads for _, grads in needed), default=0)

    def base_bytes(self) -> dict[Tier, int]:
        """Of all chunks and buffers, which are there for the whole run."""
        counts = dict.fromkeys(STAGING, 1) | dict(self.num_buffers)
        counts |= {Buffer.SLOT: self.plan.num_slots, Buffer.GRAD_SLOT: self.plan.num_grad_slots}
        found = dict(self.bytes_on)
        for buffer, count in counts.items():
            found[BUFFER_TIERS[buffer]] += count * self.buffer_bytes[buffer]
        return found
