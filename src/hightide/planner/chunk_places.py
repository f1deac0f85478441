"""The records of a plan's chunks: how each follows from what the plan says of its block.

[Note: shards] Of several ranks each has a shard of every chunk (`ChunkSpec.shard`): parameters at home, states,
gradients at home, and what passes through the host's buffers are of shards. Slots and grad slots hold whole chunks,
since compute uses them: a GATHER fills the rest of a slot, a REDUCE leaves in a grad slot this rank's shard of the mean
over all ranks, in its own ranges. Only on the GPU may more be there, as `BlockPlan.sharing` says: whole parameters, or
whole states too. A gradient whose states are sharded on the GPU is summed in a grad slot, and reduced into a place for
its shard, so that no whole gradient waits for the step.

[Note: gradients that wait on the GPU] One that is updated there at the step is summed at a place of its own, in fp32,
and rounded where it is. With `Plan.rounded_on_gpu` it is summed in a grad slot instead, as one that leaves the GPU is,
and what is rounded waits at a place of half the bytes; in between nobody reads it. That takes no more than before, also
if all are updated on the GPU and there would be no grad slot otherwise: blocks for which grad slots would have to be
wider than what they save stay out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hightide.ir.block import DTYPE_BYTES
from hightide.ir.chunk import (
    GRAD_BYTES,
    LEAVING_NUMEL,
    STAGING_NUMEL,
    ChunkSpec,
    Layout,
    on_disk_bytes,
    region_bytes,
)
from hightide.ir.plan import GradientDtype, Sharing, Update
from hightide.ir.tier import ChunkKind, Tier
from hightide.planner.chunk_place import (
    FROM_SLOT,
    LEAVING,
    READ_IN_FP32,
    RINGS,
    SUM_DTYPE,
    Buffer,
    ChunkPlace,
    Route,
)

SLOTS_FOR_ROUNDED = 3  # as wide as its widest block: so many grad slots must be worth what waits rounded on the GPU


class BlockTiers(NamedTuple):
    """What a plan says about the bytes of a block's chunks."""

    params: Tier
    states: Tier
    sums: Tier  # of gradients, between the passes of a step. HOST where the states are there, whatever it says
    compute: Tier = Tier.GPU
    parks: bool = True
    sharing: Sharing = Sharing.SHARDED
    settles: bool = False

    @property
    def is_table(self) -> bool:
        """It never leaves the host: rows are looked up there."""
        return self.compute is Tier.HOST


class ChunkPlaces:
    """The records of one layout's chunks, each made once. Searches ask about thousands of plans, but a chunk's record
    depends on nothing but its block's `Home`."""

    def __init__(
        self,
        layout: Layout,
        update: Update,
        gradients: GradientDtype,
        accumulate: int = 1,
        ranks: int = 1,
        replicas: int = 1,
        even_alone: bool = False,
        rounded_on_gpu: bool = False,
    ) -> None:
        self.layout, self._update, self._gradients, self._accumulate = layout, update, gradients, accumulate
        self._ranks, self._replicas, self._num_shards = ranks, replicas, ranks // replicas
        self._is_averaged = ranks > 1 or even_alone
        self._cuts = self._num_shards > 1 or even_alone
        # Else nothing is rounded, more is added to what is, or no gradient waits for the step.
        is_made_at_once = update is Update.DEFERRED and accumulate == 1 and not self._is_averaged
        waits_rounded = rounded_on_gpu and is_made_at_once and gradients is GradientDtype.PARAM
        self._rounded = rounded_blocks(layout) if waits_rounded else frozenset()
        self._made: dict[tuple[int, BlockTiers], ChunkPlace] = {}

    def at(self, chunk: ChunkSpec, tiers: BlockTiers) -> ChunkPlace:
        key = (chunk.index, tiers)
        if key not in self._made:
            self._made[key] = self._place(chunk, tiers)
        return self._made[key]

    def _place(self, chunk: ChunkSpec, tiers: BlockTiers) -> ChunkPlace:
        params = self._params(chunk, tiers)
        gradient = self._gradient(chunk, tiers, params)
        copies = self._copies(chunk, tiers, params, gradient)
        bytes_on = dict.fromkeys(Tier, 0)
        for (_, tier), num_bytes in copies.items():
            bytes_on[tier] += region_bytes(num_bytes, tier)
        on_disk = {kind: num_bytes for (kind, tier), num_bytes in copies.items() if tier is Tier.DISK}
        update_bytes, settle_bytes = self._update_bytes(chunk, tiers, params, gradient)
        return ChunkPlace(
            chunk=chunk,
            shard=params.shard,
            params=params.tier,
            home=params.home,
            route=gradient.route,
            grad=gradient.tier,
            states=tiers.states,
            stays=gradient.stays,
            grad_dtype=gradient.dtype,
            grad_bytes=gradient.num_bytes,
            rounds_to=chunk.dtype if gradient.rounds else None,
            rounds_in_place=gradient.rounds_in_place,
            update_bytes=update_bytes,
            num_slots=params.num_slots,
            num_grad_slots=gradient.num_slots,
            copies=copies,
            bytes_on=bytes_on,
            buffer_bytes=self._buffer_bytes(chunk, tiers, params, gradient, on_disk),
            read_bytes=sum(on_disk.values()),
            is_looked_up=tiers.is_table,
            ranks=self._ranks,
            replicas=self._replicas,
            is_gathered=params.is_gathered,
            is_averaged=self._is_averaged,
            is_cut=params.is_cut,
            settle_bytes=settle_bytes,
        )

    def _params(self, chunk: ChunkSpec, tiers: BlockTiers) -> _Params:
        # What is frozen in a block with states on the GPU may stream.
        tier = Tier.GPU if tiers.states is Tier.GPU and chunk.trainable_numel else tiers.params
        is_updated_elsewhere = tier is Tier.GPU is not tiers.states and chunk.optimised_numel > 0
        is_whole = tiers.sharing is Sharing.REPLICATED and tier is Tier.GPU
        is_cut = self._cuts and not is_whole
        stays_whole = tier is Tier.GPU and not (is_cut and tiers.sharing is Sharing.SHARDED)
        return _Params(
            tier=tier,
            home=Tier.HOST if is_updated_elsewhere else tier,
            shard=chunk if is_whole else chunk.shard(0, self._num_shards),
            is_cut=is_cut,
            stays_whole=stays_whole,
            # Parameters that stay whole and change nowhere, or not by this run, are never gathered.
            is_gathered=is_cut and not (stays_whole and not chunk.optimised_numel),
            num_slots=0 if stays_whole or tiers.is_table else self.layout.num_slots(chunk),
        )

    def _gradient(self, chunk: ChunkSpec, tiers: BlockTiers, params: _Params) -> _Gradient:
        several, is_elsewhere = self._accumulate > 1, tiers.states is not Tier.GPU or params.is_cut
        is_summed_on_gpu = chunk.trainable_numel > 0 and not tiers.is_table
        stays = several and is_summed_on_gpu and is_elsewhere and tiers.sums is Tier.GPU
        route = self._route(chunk, tiers, params, stays)
        # A dtype that is wider than the sum would only repeat zeros.
        is_narrower = self._gradients is GradientDtype.PARAM and DTYPE_BYTES[chunk.dtype] < GRAD_BYTES
        rounds = is_narrower and route is not Route.NONE
        # At home a sum to which other passes add is not rounded yet, and one that the same pass adds to is again.
        grows_later = several and not stays
        grows_again = route in LEAVING and not several and chunk.num_backwards > 1
        is_narrow = rounds and not grows_later
        dtype = chunk.dtype if is_narrow else SUM_DTYPE
        has_slot = route in FROM_SLOT or (route in LEAVING and not stays)
        return _Gradient(
            route=route,
            tier=self._tier(route, tiers, stays),
            stays=stays,
            rounds=rounds,
            rounds_in_place=rounds and (route in READ_IN_FP32 or grows_later or grows_again),
            is_narrow=is_narrow,
            dtype=dtype,
            num_bytes=params.shard.trainable_numel * DTYPE_BYTES[dtype],
            num_slots=self.layout.num_grad_slots(chunk) if has_slot else 0,
        )

    def _route(self, chunk: ChunkSpec, tiers: BlockTiers, params: _Params, stays: bool) -> Route:
        if not chunk.trainable_numel:
            return Route.NONE
        if tiers.is_table:
            return Route.TABLE
        # It leaves where it is summed once a step, and one update reads all of it right away.
        leaves_once = stays or (self._accumulate == 1 and chunk.num_backwards == 1)
        is_read_whole = chunk.optimised_numel == chunk.trainable_numel
        is_read_at_once = self._update is Update.IN_BACKWARD and leaves_once and is_read_whole
        if tiers.states is not Tier.GPU:
            parks_or_ring = Route.PARKS if tiers.parks else Route.RING
            return parks_or_ring if is_read_at_once else Route.LEAVES
        if stays or not chunk.num_backwards:  # without a backward of a block plain autograd makes it
            return Route.PLACE
        if is_read_at_once:
            return Route.USED_UP
        if chunk.block in self._rounded and _may_wait(chunk):
            return Route.ROUNDED_HOME
        return Route.REDUCED_HOME if params.is_cut else Route.PLACE

    def _tier(self, route: Route, tiers: BlockTiers, stays: bool) -> Tier | None:
        """Where a finished gradient waits."""
        if route in (Route.NONE, Route.USED_UP, Route.RING):
            return None
        # Between the passes of a step a sum from disk may wait on the host.
        rests_on_host = self._accumulate > 1 and not stays and tiers.sums is Tier.HOST
        is_on_host = route is Route.PARKS or (tiers.states is Tier.DISK and rests_on_host)
        return Tier.HOST if is_on_host else tiers.states

    def _copies(
        self, chunk: ChunkSpec, tiers: BlockTiers, params: _Params, gradient: _Gradient
    ) -> dict[tuple[ChunkKind, Tier], int]:
        """What is there for the whole run."""
        shard, grad = params.shard, gradient.tier
        copies = {(ChunkKind.PARAM, params.tier): (chunk if params.stays_whole else shard).param_bytes}
        copies.setdefault((ChunkKind.PARAM, params.home), shard.param_bytes)
        if grad is not None and gradient.route is not Route.PARKS:
            is_fp32 = gradient.route in (Route.PLACE, Route.REDUCED_HOME)
            copies[ChunkKind.GRAD, grad] = shard.grad_bytes if is_fp32 else gradient.num_bytes
        if gradient.stays:
            copies[ChunkKind.GRAD, Tier.GPU] = chunk.grad_bytes
        if shard.state_bytes:
            copies[ChunkKind.STATE, tiers.states] = shard.state_bytes
        return copies

    def _buffer_bytes(
        self,
        chunk: ChunkSpec,
        tiers: BlockTiers,
        params: _Params,
        gradient: _Gradient,
        on_disk: Mapping[ChunkKind, int],
    ) -> dict[Buffer, int]:
        """What it takes of buffers that chunks share. `on_disk`: its copies there."""
        shard, on_host = params.shard, tiers.is_table
        leaves = gradient.route in LEAVING
        is_staged = leaves and gradient.is_narrow
        # Sums go on, in tied chunks and where gradients are accumulated: those on disk come back too.
        comes_back = 0 if gradient.stays else on_disk.get(ChunkKind.GRAD, 0)
        is_updated_from_disk = tiers.states is Tier.DISK and chunk.trainable_numel > 0
        buffers = {
            Buffer.SLOT: -(-chunk.param_bytes // params.num_slots) if params.num_slots else 0,
            Buffer.GRAD_SLOT: -(-chunk.grad_bytes // gradient.num_slots) if gradient.num_slots else 0,
            Buffer.LEAVING: _staged_bytes(shard, LEAVING_NUMEL) if is_staged else 0,
            Buffer.ARRIVING: _staged_bytes(shard, STAGING_NUMEL) if is_staged else 0,
            Buffer.ROUNDING: _staged_bytes(shard, STAGING_NUMEL) if gradient.rounds and not on_host else 0,
            Buffer.READ: max(on_disk.get(ChunkKind.PARAM, 0), comes_back),
            Buffer.WRITTEN: gradient.num_bytes if leaves and gradient.tier is not Tier.HOST else 0,
            Buffer.UPDATED: sum(map(on_disk_bytes, on_disk.values())) if is_updated_from_disk else 0,
        }
        return {
            buffer: (on_disk_bytes if buffer in RINGS else region_bytes)(num_bytes)
            for buffer, num_bytes in buffers.items()
            if num_bytes
        }

    def _update_bytes(
        self, chunk: ChunkSpec, tiers: BlockTiers, params: _Params, gradient: _Gradient
    ) -> tuple[int, int]:
        """Of its update, or of its two parts where states are written later."""
        shard = params.shard
        read_bytes = GRAD_BYTES if gradient.route in READ_IN_FP32 else DTYPE_BYTES[gradient.dtype]
        whole = shard.optimised_numel * (read_bytes + DTYPE_BYTES[chunk.dtype]) + shard.state_bytes
        has_states = shard.optimised_numel > 0 and len(shard.rule_states) > 0
        on_host = tiers.states is gradient.tier is Tier.HOST and not tiers.is_table
        if tiers.settles and self._update is Update.DEFERRED and on_host and has_states:
            return _in_parts(shard, read_bytes, whole)
        return whole, 0


class _Params(NamedTuple):
    """Of one chunk. See [Note: shards]."""

    tier: Tier  # where compute finds them
    home: Tier  # where an update leaves them
    shard: ChunkSpec  # what a rank has of parameters at home, of states and of a gradient at home
    is_cut: bool
    stays_whole: bool  # on the GPU
    is_gathered: bool
    num_slots: int


class _Gradient(NamedTuple):
    """Of one chunk; what its fields mean: ChunkPlace."""

    route: Route
    tier: Tier | None
    stays: bool
    rounds: bool
    rounds_in_place: bool
    is_narrow: bool  # at home
    dtype: str  # at home
    num_bytes: int  # at home
    num_slots: int


def _in_parts(shard: ChunkSpec, grad_bytes: int, update_bytes: int) -> tuple[int, int]:
    """Bytes of the two parts of an update, as fractions of those that it touches as a whole. That reads the gradient,
    and reads and writes the rest; the first part only reads the rule's own states, and the second reads the gradient
    again, and reads and writes these states."""
    grads = shard.optimised_numel * grad_bytes
    states = sum(state.num_bytes(shard.optimised_numel) for state in shard.rule_states)
    whole = 2 * update_bytes - grads
    return update_bytes * (whole - states) // whole, update_bytes * (grads + 2 * states) // whole


def rounded_blocks(layout: Layout) -> frozenset[int]:
    """Those whose gradients are worth grad slots: see [Note: gradients that wait on the GPU]."""
    chunks: dict[int, list[ChunkSpec]] = {}
    for chunk in layout.chunks:
        if _may_wait(chunk):
            chunks.setdefault(chunk.block, []).append(chunk)
    found: list[int] = []
    best: tuple[int, list[int]] = (0, found)
    sums_bytes = widest = slot_bytes = 0
    for block in sorted(chunks, key=lambda block: sum(chunk.grad_bytes for chunk in chunks[block])):
        found = [*found, block]
        widths = [layout.num_grad_slots(chunk) for chunk in chunks[block]]
        widest = max(widest, sum(widths))
        for chunk, width in zip(chunks[block], widths, strict=True):
            slot_bytes = max(slot_bytes, -(-chunk.grad_bytes // width))
            sums_bytes += chunk.grad_bytes
        best = max(best, (sums_bytes // 2 - SLOTS_FOR_ROUNDED * widest * slot_bytes, found))
    return frozenset(best[1])


def _may_wait(chunk: ChunkSpec) -> bool:
    """In the dtype to which it is rounded: its sum is made in one go, and nothing is added later."""
    return chunk.num_backwards == 1 and chunk.trainable_numel > 0 and DTYPE_BYTES[chunk.dtype] < GRAD_BYTES


def _staged_bytes(chunk: ChunkSpec, most_numel: int) -> int:
    return min(chunk.trainable_numel, most_numel) * DTYPE_BYTES[chunk.dtype]
