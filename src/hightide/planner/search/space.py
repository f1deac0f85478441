"""The plans that there are for a model: what can be decided about it, and the plan that follows from a candidate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hightide.ir.block import BlockSpec, ModelProfile
from hightide.ir.chunk import Layout
from hightide.ir.plan import PLAN_VERSION, BlockPlan, Forecast, GradientDtype, Plan, Sharing, Update
from hightide.ir.tier import Tier
from hightide.planner.chunk_place import Buffer
from hightide.planner.chunk_places import BlockTiers, ChunkPlaces
from hightide.planner.disk_inputs import passing_calls, place_bytes
from hightide.planner.layout import adapters, pack, slot_sizes, tiny_blocks
from hightide.planner.loss_tiles import (
    early_gradient_bytes,
    logit_bytes,
    loss_tile_tokens,
    may_run_in_forward,
    num_rows,
    smaller_tiles,
)
from hightide.planner.mechanism import Mechanism
from hightide.planner.placement import Placement
from hightide.planner.problem import Terms
from hightide.planner.search.candidate import Candidate

MOST_LATE = 12  # `Candidate.late` of all
NEARLY = 1.05  # times as large as another chunk


@dataclass(frozen=True)
class Space:
    """All candidates for a model under some terms."""

    profile: ModelProfile
    terms: Terms

    def build(self, candidate: Candidate) -> Plan:
        """Without a forecast and an explanation."""
        return self.placed(candidate).plan

    def placed(self, candidate: Candidate) -> Placement:
        """Its plan, and where that has everything."""
        plan = Plan(
            version=PLAN_VERSION,
            fingerprint=self.profile.fingerprint,
            num_samples=self.profile.num_samples,
            micro_batch=candidate.micro_batch,
            update=self.terms.update,
            num_slots=0,
            num_grad_slots=0,
            loss_tile_tokens=candidate.loss_tile_tokens or self._loss_tile_tokens,
            gpu_limit_bytes=self.terms.gpu_bytes,
            host_limit_bytes=self.terms.host_bytes,
            blocks=self._block_plans(candidate),
            layout=self.layout(candidate.slot_numel),
            forecast=Forecast(0, 0),
            explanation="",
            gradients=self.terms.gradients,
            accumulate=self.terms.accumulate,
            loss_kept_tokens=0 if self._is_early(candidate) else candidate.loss_kept_tokens,
            loss_in_forward=self._is_early(candidate),
            rounded_on_gpu=self._rounds_on_gpu,
            disk_limit_bytes=self.terms.disk_bytes,
            ranks=self.terms.ranks,
            replicas=self.terms.replicas,
            even_alone=self.terms.even_alone,
            profile=self.profile,
        )
        placement = Placement(plan, self.places(plan.layout.slot_numel))
        slots, grad_slots = placement.widest_tick(self.called)
        rings = placement.buffer_bytes
        counted = replace(
            plan,
            num_slots=candidate.num_slots(slots),
            num_grad_slots=candidate.num_grad_slots(grad_slots, placement.has_leaving),
            num_read_buffers=candidate.read_buffers if rings[Buffer.READ] else 0,
            num_grad_buffers=max(1, candidate.grad_buffers) if rings[Buffer.WRITTEN] else 0,
            num_state_buffers=candidate.state_buffers if rings[Buffer.UPDATED] else 0,
            num_input_buffers=candidate.input_buffers if passing_calls(self.profile, plan) else 0,
        )
        return placement.of(counted)

    def places(self, slot_numel: int) -> ChunkPlaces:
        if slot_numel not in self._places:
            layout = pack(self.profile, slot_numel, self.terms.states, self.terms.num_shards)
            self._places[slot_numel] = ChunkPlaces(layout, *self._kinds_of_gradients)
        return self._places[slot_numel]

    @property
    def updates_in_backward(self) -> bool:
        return self.terms.update is Update.IN_BACKWARD

    @property
    def _rounds_on_gpu(self) -> bool:
        terms = self.terms
        rounds = terms.gradients is GradientDtype.PARAM and terms.accumulate == 1 and not terms.has_collectives
        return rounds and not self.updates_in_backward

    @property
    def _kinds_of_gradients(self) -> tuple[Update, GradientDtype, int, int, int, bool, bool]:
        terms = self.terms
        sharing = terms.ranks, terms.replicas, terms.even_alone
        return terms.update, terms.gradients, terms.accumulate, *sharing, self._rounds_on_gpu

    def tiers_of(self, candidate: Candidate) -> list[BlockTiers]:
        """Of all blocks. All buffers of a ring are as large as the largest: what is far wider than others parks. So
        does what is late: it would hold its buffer until the next forward."""
        parks = not candidate.grad_buffers or not self.updates_in_backward
        all_tiers = [self._tiers(block, candidate, parks) for block in self.profile.blocks]
        if parks:
            return all_tiers
        parking = self.wide | self._late(all_tiers, candidate)
        return [tiers._replace(parks=True) if block in parking else tiers for block, tiers in enumerate(all_tiers)]

    def _tiers(self, block: BlockSpec, candidate: Candidate, parks: bool) -> BlockTiers:
        index, sharing = block.index, self._sharing(block, candidate) if self.is_cut else Sharing.SHARDED
        if index in candidate.looked_up:
            return BlockTiers(Tier.HOST, Tier.HOST, Tier.HOST, Tier.HOST, parks=True)
        if block.loose or index in candidate.whole:
            sums = Tier.GPU if self.is_cut and index in candidate.sums else Tier.HOST
            return BlockTiers(Tier.GPU, Tier.GPU, sums, sharing=sharing)
        params = Tier.DISK if candidate.disk and index not in candidate.host_params else Tier.HOST
        states = Tier.DISK if candidate.disk and index not in candidate.host_states else Tier.HOST
        in_part = Tier.GPU if index in candidate.params else params, Tier.GPU if index in candidate.trained else states
        sums = self._sums(index, in_part[1], candidate)
        settles = candidate.settles and in_part[1] is Tier.HOST
        return BlockTiers(*in_part, sums, parks=parks, sharing=sharing, settles=settles)

    @cached_property
    def is_cut(self) -> bool:
        """Chunks are cut into shards."""
        return self.terms.is_cut

    def _sharing(self, block: BlockSpec, candidate: Candidate) -> Sharing:
        """What is tiny is not worth more than one collective a step: adapters, norms."""
        index = block.index
        is_small = index in (candidate.whole & self._tiny) or index in candidate.trained - candidate.params
        if block.loose or is_small:
            return Sharing.REPLICATED
        whole_params = candidate.params | (candidate.copied & candidate.whole)
        return Sharing.PARAMS_REPLICATED if index in whole_params else Sharing.SHARDED

    @cached_property
    def _tiny(self) -> frozenset[int]:
        return tiny_blocks(self.profile)

    def _sums(self, block: int, states: Tier, candidate: Candidate) -> Tier:
        if block in candidate.sums:
            return Tier.GPU
        on_disk = self.terms.accumulate > 1 and states is Tier.DISK and block not in candidate.host_sums
        return Tier.DISK if on_disk else Tier.HOST

    def _late(self, all_tiers: Sequence[BlockTiers], candidate: Candidate) -> frozenset[int]:
        """Of the blocks with states on disk a share, evenly spread."""
        on_disk = (
            [block for block, tiers in enumerate(all_tiers) if tiers.states is Tier.DISK] if candidate.late else []
        )
        shares = [number * candidate.late // MOST_LATE for number in range(len(on_disk) + 1)]
        return frozenset(block for number, block in enumerate(on_disk) if shares[number + 1] > shares[number])

    @cached_property
    def wide(self) -> frozenset[int]:
        """Blocks that are far wider than the usual one."""
        numels = sorted(self.block_numel(block) for block in self.movable)
        usual = numels[len(numels) // 2] if numels else 0
        return frozenset(block for block in self.movable if self.block_numel(block) > 2 * usual)

    def _block_plans(self, candidate: Candidate) -> tuple[BlockPlan, ...]:
        all_tiers = self.tiers_of(candidate)
        late = self._late(all_tiers, candidate)
        plans = [self._block_plan(*one, candidate) for one in zip(self.profile.blocks, all_tiers, strict=True)]
        return tuple(replace(plan, late=True) if block in late else plan for block, plan in enumerate(plans))

    def _block_plan(self, block: BlockSpec, tiers: BlockTiers, candidate: Candidate) -> BlockPlan:
        return BlockPlan(
            name=block.name,
            params=tiers.params,
            states=tiers.states,
            activation=candidate.activation(block.index),
            inputs=self._inputs(block, candidate),
            held=Tier.HOST if block.index in candidate.swapped else Tier.GPU,
            sums=tiers.sums,
            compute=tiers.compute,
            parks=tiers.parks,
            sharing=tiers.sharing,
            settles=tiers.settles,
        )

    def _inputs(self, block: BlockSpec, candidate: Candidate) -> Tier:
        index = block.index
        if index in candidate.keep or block.loose or index in candidate.near:
            return Tier.GPU
        return Tier.DISK if candidate.inputs is Tier.HOST and index in self.far(candidate) else candidate.inputs

    def far(self, candidate: Candidate) -> frozenset[int]:
        """Blocks whose inputs wait on disk. What a block swaps leaves the GPU with them, to the host."""
        return candidate.far - candidate.swapped - candidate.near - candidate.keep

    def input_bytes(self, candidate: Candidate) -> tuple[int, int]:
        """On the host and on disk, of block inputs that wait there: as in planner/disk_inputs.py."""
        if not candidate.far or candidate.inputs is not Tier.HOST:
            return 0, 0
        far = self.far(candidate)
        sizes = [size for block, size in self._places_of_inputs if block in far]
        stored = sizes[: max(0, len(sizes) - candidate.input_buffers)]
        return candidate.input_buffers * max(sizes, default=0), sum(stored)

    @cached_property
    def _places_of_inputs(self) -> tuple[tuple[int, int], ...]:
        """Of each call, in the order of forward: its block, and the bytes."""
        profile = self.profile
        return tuple(
            (call.block, place_bytes(profile.num_samples, call))
            for call in profile.calls
            if call.needs_backward
            and call.saved_inputs.at(profile.num_samples)
            and not profile.blocks[call.block].loose
        )

    def layout(self, slot_numel: int | None = None) -> Layout:
        return self.places(slot_numel or self.slot_numel).layout

    @property
    def slot_numel(self) -> int:
        return self.slot_sizes[0]

    @cached_property
    def slot_sizes(self) -> tuple[int, ...]:
        """The one that wastes least first."""
        return slot_sizes(self.profile, self.terms.num_shards)

    @cached_property
    def ring_sizes(self) -> tuple[int, ...]:
        """Those by which buffers of rings differ, ascending by their largest chunk, as large as which buffers are; of
        nearly equal ones the one with the fewest chunks. Far wider blocks are left out: they are to be elsewhere."""
        known: list[tuple[int, int, int]] = []
        for size in self.slot_sizes:
            numels = [chunk.numel for chunk in self.layout(size).chunks if chunk.block not in self.wide]
            known.append((max(numels, default=0), len(numels), size))
        found: list[tuple[int, int, int]] = []
        for largest, count, size in sorted(known):
            if found and largest <= NEARLY * found[-1][0]:
                found[-1] = min(found[-1], (largest, count, size), key=lambda one: one[1])
            else:
                found.append((largest, count, size))
        return tuple(size for *_, size in found)

    @cached_property
    def leanest_slot_numel(self) -> int:
        """The size whose slots take least of the GPU."""
        return min(self.slot_sizes, key=self._slots_bytes)

    def _slots_bytes(self, slot_numel: int) -> int:
        placement = self.placed(Candidate(1, spare_slots=0, slot_numel=slot_numel))
        plan, sizes = placement.plan, placement.buffer_bytes
        return plan.num_slots * sizes[Buffer.SLOT] + plan.num_grad_slots * sizes[Buffer.GRAD_SLOT]

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """Called blocks in the order in which they become persistent: tiny ones, then as they run."""
        tiny = tiny_blocks(self.profile)
        blocks = [block.index for block in self.profile.blocks if not block.loose and block.index in self.called]
        return tuple(sorted(blocks, key=lambda block: block not in tiny))

    def block_numel(self, block: int) -> int:
        """Of the chunks that it owns."""
        return self._numels[block]

    @cached_property
    def tables(self) -> tuple[int, ...]:
        """Embeddings that can be looked up on the host: called ones that are not tied. Of tiny ones, or from a disk, it
        is not worth it; of several ranks none has the whole table."""
        if self.terms.has_collectives:
            return ()
        tiny = tiny_blocks(self.profile)
        shared = {user for chunk in self.layout().chunks if len(chunk.users) > 1 for user in chunk.users}
        possible = [b.index for b in self.profile.blocks if b.plain_embedding and b.index in self.called]
        return tuple(block for block in possible if block not in tiny | shared)

    @cached_property
    def adapted(self) -> tuple[int, ...]:
        """Blocks with adapters beside chunks that are frozen, as they run. They cost little and save the way of
        gradients to the host and back."""
        apart = adapters(self.profile)
        frozen = {chunk.block for chunk in self.layout().chunks if not chunk.trainable_numel}
        blocks = [self.profile.blocks[index] for index in sorted(self.called) if index in frozen]
        return tuple(block.index for block in blocks if not apart.isdisjoint(block.params))

    @cached_property
    def summed(self) -> tuple[int, ...]:
        """Blocks with gradients that more passes add to, from the back."""
        if self.terms.accumulate == 1:
            return ()
        trained = {chunk.block for chunk in self.layout().chunks if chunk.trainable_numel}
        return tuple(block for block in sorted(self.movable, reverse=True) if block in trained)

    @cached_property
    def keepable(self) -> tuple[int, ...]:
        """From the back. A lazy head recomputes its logits anyway."""
        blocks = {call.block for call in self.profile.calls if call.needs_backward}
        return tuple(block for block in sorted(blocks, reverse=True) if not self.profile.blocks[block].lazy_head)

    @cached_property
    def selectable(self) -> tuple[int, ...]:
        """Of these, those in which some of what is made is worth more than the rest."""
        found = {call.block for call in self.profile.calls if call.needs_backward and call.selective is not None}
        return tuple(block for block in self.keepable if block in found)

    @cached_property
    def keepable_tokens(self) -> tuple[int, ...]:
        """How many tokens' logits can be kept, tile by tile, ascending. Only of a head that is a plain product. To keep
        all of them saves as much as to make the head's gradients in forward: the one of the two that takes less memory
        is the last, and what takes more is left out."""
        heads = {block.index for block in self.profile.blocks if block.lazy_head and block.plain_linear}
        if not any(call.block in heads and call.needs_backward for call in self.profile.calls):
            return ()
        rows, tile = num_rows(self.profile), self._loss_tile_tokens
        counts = [min(rows, count * tile) for count in range(1, -(-rows // tile) + 1)]
        token_bytes = self.profile.vocabulary * logit_bytes(self.profile)
        if self._early_bytes is None:
            return tuple(counts)
        return (*(count for count in counts[:-1] if count * token_bytes < self._early_bytes), rows)

    @cached_property
    def _early_bytes(self) -> int | None:
        """Of the head's gradients, where they are made in forward. None: they cannot be, or would take more than all
        logits."""
        heads = [call for call in self.profile.calls if self.profile.blocks[call.block].lazy_head]
        if Mechanism.LOSS_IN_FORWARD in self.terms.without or not heads:
            return None
        if not all(may_run_in_forward(self.profile, call) for call in heads):
            return None
        found = sum(early_gradient_bytes(self.profile, call, self.profile.num_samples) for call in heads)
        return found if found < num_rows(self.profile) * self.profile.vocabulary * logit_bytes(self.profile) else None

    def _is_early(self, candidate: Candidate) -> bool:
        return self._early_bytes is not None and candidate.loss_kept_tokens >= num_rows(self.profile)

    @cached_property
    def smaller_tiles(self) -> tuple[int, ...]:
        """For the fused loss, where memory is short: descending."""
        return smaller_tiles(self.profile)

    @cached_property
    def _numels(self) -> Counter[int]:
        numels: Counter[int] = Counter()
        for chunk in self.layout().chunks:
            numels[chunk.block] += chunk.numel
        return numels

    @cached_property
    def _places(self) -> dict[int, ChunkPlaces]:
        return {}

    @cached_property
    def called(self) -> set[int]:
        return {call.block for call in self.profile.calls}

    @cached_property
    def _loss_tile_tokens(self) -> int:
        return loss_tile_tokens(self.profile)
