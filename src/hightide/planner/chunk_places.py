"""Where the bytes of each chunk live under a plan, and through which buffers they pass: records by which the runtime
allocates, and the passes count and move.

[Note: shards] Of several ranks each has a shard of every chunk (`ChunkSpec.shard`): parameters at home, states,
gradients at home, and what passes through the host's buffers are of shards. Slots and grad slots hold whole chunks,
since compute uses them: a GATHER fills the rest of a slot, a REDUCE leaves in a grad slot this rank's shard of the mean
over all ranks, in its own ranges. Only on the GPU may more be there, as `BlockPlan.sharing` says: whole parameters, or
whole states too. A gradient whose states are sharded on the GPU is summed in a grad slot, and reduced into a place for
its shard, so that no whole gradient waits for the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from hightide.ir.action import ActionKey, Op
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


class Buffer(StrEnum):
    """Space that chunks share, one after the other: each is as large as the largest of them needs."""

    SLOT = "slot"  # of streamed parameters, whatever their dtype
    GRAD_SLOT = "grad slot"  # of gradients while they are summed: where most is frozen, far less than a slot
    LEAVING = "leaving"  # rounded gradients on the GPU: those that leave,
    ARRIVING = "arriving"  # that come back,
    ROUNDING = "rounding"  # and that are rounded where they are. Each belongs to one stream, whose order is enough
    READ = "read"  # on the host: parameters and gradients on their way from the disk to the GPU,
    WRITTEN = "written"  # gradients on their way to the disk or to their update,
    UPDATED = "updated"  # what an update from disk works on. See [Note: rings of buffers] in lower/pass_through_disk.py


SUM_DTYPE = "float32"  # of sums of gradients
STAGING = (Buffer.LEAVING, Buffer.ARRIVING, Buffer.ROUNDING)
RING_COUNTS = {  # the field of a plan that says how many buffers there are
    Buffer.READ: "num_read_buffers",
    Buffer.WRITTEN: "num_grad_buffers",
    Buffer.UPDATED: "num_state_buffers",
}
RINGS = tuple(RING_COUNTS)
BUFFER_TIERS = {buffer: Tier.HOST if buffer in RINGS else Tier.GPU for buffer in Buffer}


class Home(NamedTuple):
    """What a plan says about the bytes of a block's chunks."""

    params: Tier
    states: Tier
    sums: Tier  # of gradients, between the passes of a step. HOST where the states are there, whatever it says
    compute: Tier = Tier.GPU
    parks: bool = True
    sharing: Sharing = Sharing.SHARDED
    settles: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class ChunkPlace:
    """Where one chunk's parameters, gradient and states are, and through which buffers they pass."""

    chunk: ChunkSpec
    shard: ChunkSpec  # what one rank has of it at home (the first one: sizes are equal). Of one rank the chunk itself
    params: Tier  # where compute finds the values. GPU: persistent. Else they are fetched from there into slots
    home: Tier  # where an update leaves the values. Not `params` where a persistent chunk is updated elsewhere
    grad: Tier | None  # where a finished gradient waits. None: the update reads it from its slot or buffer, or none is
    states: Tier
    stays: bool  # its sum has a place of its own on the GPU from the first pass of a step to the last, then it leaves
    grad_dtype: str  # of a gradient at home. Its sum on the GPU is fp32
    grad_bytes: int  # of a gradient on the link and at home
    rounds_to: str | None  # the dtype to which a finished gradient is rounded
    rounds_in_place: bool  # where it is summed: nobody else would do it, or more is added later
    # That an update touches, each array once. Where it `settles`, such a part of them as its first part moves
    update_bytes: int
    num_slots: int  # that its parameters take at once
    num_grad_slots: int  # 0: there is no gradient, or it is summed at a place of its own on the GPU
    copies: Mapping[tuple[ChunkKind, Tier], int]  # what is there for the whole run, in bytes
    bytes_on: Mapping[Tier, int]  # that stores set aside for these
    buffer_bytes: Mapping[Buffer, int]
    read_bytes: int  # from disk, before an update
    is_looked_up: bool = False  # a table that never leaves the host: neither it nor its gradient has a slot
    parks: bool = False  # its gradient takes host memory from its write-back to its update, and at no other time
    ranks: int = 1
    replicas: int = 1  # groups of them that have a copy of everything
    # Into a slot before each use, or where it stays after each update or fetch
    is_gathered: bool = False
    is_averaged: bool = False  # what is trained of it, over several ranks
    is_cut: bool = False  # a rank has a shard of it, which of one rank that talks to itself is all of it
    settle_bytes: int = 0  # the same, of the second part of its update; 0: its update is one

    @property
    def settles(self) -> bool:
        """Its states are written after its parameters."""
        return self.settle_bytes > 0

    @property
    def last_of_update(self) -> ActionKey:
        """What reads its gradient last."""
        return ActionKey(Op.SETTLE if self.settles else Op.UPDATE, self.chunk.index)

    @property
    def is_streamed(self) -> bool:
        """Its values are not on the GPU, or only a shard of them, but for the time of their use."""
        return self.params is not Tier.GPU or self.num_slots > 0

    @property
    def is_refreshed(self) -> bool:
        """Used on the GPU, updated elsewhere: each pass begins by fetching the new values into the persistent place."""
        return self.params is Tier.GPU is not self.home

    @property
    def is_gathered_after_update(self) -> bool:
        """Its update on the GPU changes a shard of parameters that are whole there."""
        return self.is_gathered and not self.is_streamed and not self.is_refreshed and self.chunk.optimised_numel > 0

    @property
    def is_reduced(self) -> bool:
        """Its gradient is averaged over several ranks."""
        return self.is_averaged and self.chunk.trainable_numel > 0

    @property
    def is_reduced_home(self) -> bool:
        """From its grad slot to the place of its shard on the GPU, where later passes add to it."""
        return self.num_grad_slots > 0 and self.grad is Tier.GPU

    @property
    def gathered_bytes(self) -> int:
        """That a rank receives when it is gathered."""
        return self.chunk.param_bytes - self.shard.param_bytes if self.is_gathered else 0

    @property
    def reduced_bytes(self) -> int:
        """That a rank receives when its gradient is reduced: all but its own of the whole sum, and if all ranks keep
        the whole mean, that too. Of groups with a copy each, the mean of their shards."""
        if not self.is_reduced:
            return 0
        if self.is_averaged_whole:
            return 2 * self.chunk.grad_bytes * (self.ranks - 1) // self.ranks
        across_bytes = 2 * self.shard.grad_bytes * (self.replicas - 1) // self.replicas
        return self.chunk.grad_bytes - self.shard.grad_bytes + across_bytes

    @property
    def is_averaged_whole(self) -> bool:
        """All ranks keep all of the mean."""
        return self.is_reduced and not self.is_cut

    @property
    def in_grad_slot(self) -> bool:
        """Its gradient is summed in a slot."""
        return self.num_grad_slots > 0

    @property
    def leaves(self) -> bool:
        """Its gradient goes from the GPU to another tier."""
        return self.states is not Tier.GPU and (self.stays or self.num_grad_slots > 0)

    @property
    def passes_ring(self) -> bool:
        """Its gradient leaves the GPU into a ring's buffer: its update follows from there, or a write to disk."""
        return self.leaves and self.grad is not Tier.HOST

    @property
    def is_narrow(self) -> bool:
        """Its gradient is rounded on its way home."""
        return self.grad_dtype != SUM_DTYPE

    @property
    def is_used_up(self) -> bool:
        """Its gradient is summed in a grad slot, and its update, right afterwards on the GPU, is the last to read it:
        so it needs no place of its own."""
        return self.num_grad_slots > 0 and self.states is Tier.GPU is not self.grad

    @property
    def is_updated_on_gpu(self) -> bool:
        """By compute, in its turn. Else on the host, by a lane of its own."""
        return self.states is Tier.GPU

    def tier_of(self, kind: ChunkKind) -> Tier | None:
        """Between its uses."""
        return {ChunkKind.PARAM: self.home, ChunkKind.GRAD: self.grad, ChunkKind.STATE: self.states}[kind]

    @property
    def update_offsets(self) -> dict[ChunkKind, int]:
        """Where each kind that lives on disk begins in a buffer for updates, in bytes."""
        offsets, end = {}, 0
        for kind in ChunkKind:
            if num_bytes := self.copies.get((kind, Tier.DISK), 0):
                offsets[kind] = end
                end += on_disk_bytes(num_bytes)
        return offsets

    @property
    def written_bytes(self) -> int:
        """To disk, after an update: its parameters too, where they live there."""
        return self.read_bytes - self.copies.get((ChunkKind.GRAD, Tier.DISK), 0)


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
    ) -> None:
        self.layout, self._update, self._gradients, self._accumulate = layout, update, gradients, accumulate
        self._ranks, self._replicas, self._num_shards = ranks, replicas, ranks // replicas
        self._is_averaged = ranks > 1 or even_alone
        self._cuts = self._num_shards > 1 or even_alone
        self._made: dict[tuple[int, Home], ChunkPlace] = {}

    def at(self, chunk: ChunkSpec, home: Home) -> ChunkPlace:
        key = (chunk.index, home)
        if key not in self._made:
            self._made[key] = self._place(chunk, *home)
        return self._made[key]

    def _place(
        self,
        chunk: ChunkSpec,
        params: Tier,
        states: Tier,
        sums: Tier,
        compute: Tier,
        may_park: bool,
        sharing: Sharing,
        may_settle: bool,
    ) -> ChunkPlace:
        trained, layout = chunk.trainable_numel > 0, self.layout
        on_host = compute is Tier.HOST
        if states is Tier.GPU and trained:  # what is frozen in the block may stream
            params = Tier.GPU
        is_updated_elsewhere = params is Tier.GPU is not states and chunk.optimised_numel > 0
        home = Tier.HOST if is_updated_elsewhere else params
        # See [Note: shards]. `shard`: what a rank has of parameters at home, of states and of a gradient at home.
        is_whole = sharing is Sharing.REPLICATED and params is Tier.GPU
        shard = chunk if is_whole else chunk.shard(0, self._num_shards)
        is_cut = self._cuts and not is_whole
        has_whole_params = params is Tier.GPU and not (is_cut and sharing is Sharing.SHARDED)
        # Parameters that stay whole and change nowhere, or not by this run, are never gathered.
        is_gathered = is_cut and not (has_whole_params and not chunk.optimised_numel)
        several, leaves = self._accumulate > 1, states is not Tier.GPU
        stays = several and trained and (leaves or is_cut) and sums is Tier.GPU and not on_host
        # It leaves where it is summed once a step, and one update reads all of it right away.
        leaves_once = (stays or (not several and chunk.num_backwards == 1)) and not on_host
        is_used_at_once = leaves_once and trained and chunk.optimised_numel == chunk.trainable_numel
        ends_where_it_stays = stays and not leaves
        is_read_at_once = self._update is Update.IN_BACKWARD and is_used_at_once and not ends_where_it_stays
        parks = is_read_at_once and may_park and leaves
        # Between the passes of a step a sum from disk may wait on the host.
        at_rest = Tier.HOST if several and not stays and states is Tier.DISK and sums is Tier.HOST else states
        grad = at_rest if trained and not is_read_at_once else Tier.HOST if parks else None
        # A dtype that is wider than the sum would only repeat zeros.
        rounds = trained and self._gradients is GradientDtype.PARAM and DTYPE_BYTES[chunk.dtype] < GRAD_BYTES
        # At home a sum to which other passes add is not rounded yet.
        narrow = rounds and (stays or not several)
        grad_dtype = chunk.dtype if narrow else SUM_DTYPE
        grad_bytes = shard.trainable_numel * DTYPE_BYTES[grad_dtype]

        copies = {(ChunkKind.PARAM, params): (chunk if has_whole_params else shard).param_bytes}
        copies.setdefault((ChunkKind.PARAM, home), shard.param_bytes)
        if grad is not None and not parks:
            copies[ChunkKind.GRAD, grad] = shard.grad_bytes if grad is Tier.GPU else grad_bytes
        if stays:
            copies[ChunkKind.GRAD, Tier.GPU] = chunk.grad_bytes
        if shard.state_bytes:
            copies[ChunkKind.STATE, states] = shard.state_bytes
        bytes_on = dict.fromkeys(Tier, 0)
        for (_, tier), num_bytes in copies.items():
            bytes_on[tier] += region_bytes(num_bytes, tier)

        num_slots = 0 if has_whole_params or on_host else layout.num_slots(chunk)
        is_loose = not chunk.num_backwards  # plain autograd makes its gradient
        is_reduced_home = grad is Tier.GPU and is_cut and not is_loose
        has_grad_slot = trained and (grad is not Tier.GPU or is_reduced_home) and not stays and not on_host
        num_grad_slots = layout.num_grad_slots(chunk) if has_grad_slot else 0
        again = not leaves or (chunk.num_backwards > 1 and not several)  # where it is summed, or more is added
        rounds_in_place = rounds and (not narrow or (again and not on_host))
        passes_gpu = narrow and leaves and not on_host
        on_disk = {kind: num_bytes for (kind, tier), num_bytes in copies.items() if tier is Tier.DISK}
        buffers = {
            Buffer.SLOT: -(-chunk.param_bytes // num_slots) if num_slots else 0,
            Buffer.GRAD_SLOT: -(-chunk.grad_bytes // num_grad_slots) if num_grad_slots else 0,
            Buffer.LEAVING: _staged_bytes(shard, LEAVING_NUMEL) if passes_gpu else 0,
            Buffer.ARRIVING: _staged_bytes(shard, STAGING_NUMEL) if passes_gpu else 0,
            Buffer.ROUNDING: _staged_bytes(shard, STAGING_NUMEL) if rounds and not on_host else 0,
            # Sums go on, in tied chunks and where gradients are accumulated: those on disk come back too.
            Buffer.READ: max(on_disk.get(ChunkKind.PARAM, 0), 0 if stays else on_disk.get(ChunkKind.GRAD, 0)),
            Buffer.WRITTEN: grad_bytes if (has_grad_slot or stays) and leaves and grad is not Tier.HOST else 0,
            Buffer.UPDATED: sum(map(on_disk_bytes, on_disk.values())) if states is Tier.DISK and trained else 0,
        }
        read_grad_bytes = DTYPE_BYTES[grad_dtype] if leaves else GRAD_BYTES
        update_bytes = shard.optimised_numel * (read_grad_bytes + DTYPE_BYTES[chunk.dtype]) + shard.state_bytes
        has_states = shard.optimised_numel > 0 and len(shard.rule_states) > 0
        is_later = may_settle and self._update is Update.DEFERRED and states is grad is Tier.HOST and not on_host
        parts = update_bytes, 0
        if is_later and has_states:
            parts = _in_parts(shard, read_grad_bytes, update_bytes)
        return ChunkPlace(
            chunk,
            shard,
            params,
            home,
            grad,
            states,
            stays,
            grad_dtype,
            grad_bytes,
            rounds_to=chunk.dtype if rounds else None,
            rounds_in_place=rounds_in_place,
            update_bytes=parts[0],
            num_slots=num_slots,
            num_grad_slots=num_grad_slots,
            copies=copies,
            bytes_on=bytes_on,
            buffer_bytes={
                buffer: (on_disk_bytes if buffer in RINGS else region_bytes)(num_bytes)
                for buffer, num_bytes in buffers.items()
                if num_bytes
            },
            read_bytes=sum(on_disk.values()),
            is_looked_up=on_host,
            parks=parks,
            ranks=self._ranks,
            replicas=self._replicas,
            is_gathered=is_gathered,
            is_averaged=self._is_averaged,
            is_cut=is_cut,
            settle_bytes=parts[1],
        )


def _in_parts(shard: ChunkSpec, grad_bytes: int, update_bytes: int) -> tuple[int, int]:
    """Bytes of the two parts of an update, as fractions of those that it touches as a whole. That reads the gradient,
    and reads and writes the rest; the first part only reads the rule's own states, and the second reads the gradient
    again, and reads and writes these states."""
    grads = shard.optimised_numel * grad_bytes
    states = sum(state.num_bytes(shard.optimised_numel) for state in shard.rule_states)
    whole = 2 * update_bytes - grads
    return update_bytes * (whole - states) // whole, update_bytes * (grads + 2 * states) // whole


def _staged_bytes(chunk: ChunkSpec, most_numel: int) -> int:
    return min(chunk.trainable_numel, most_numel) * DTYPE_BYTES[chunk.dtype]
