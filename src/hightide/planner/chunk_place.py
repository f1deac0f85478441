"""Where the bytes of one chunk live under a plan, and through which shared buffers they pass: the record by which the
runtime allocates, and the passes count and move. How it follows from a plan: chunk_places.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from hightide.ir.action import ActionKey, Op
from hightide.ir.chunk import ChunkSpec, on_disk_bytes
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


class Route(StrEnum):
    """The way of a gradient from where it is summed to where its update finds it."""

    NONE = "none"  # nothing is trained
    TABLE = "table"  # summed on the host, where its table is
    PLACE = "place"  # summed at a place of its own on the GPU, where it waits
    # On the GPU, from its grad slot:
    ROUNDED_HOME = "rounded home"  # to a place in its own dtype. See [Note: gradients that wait on the GPU]
    REDUCED_HOME = "reduced home"  # to the place of its shard, where later passes add to it
    USED_UP = "used up"  # nowhere: its update is right afterwards, and the last to read it
    # From the GPU, where it is summed in a grad slot, or at a place of its own if it `stays`:
    LEAVES = "leaves"  # to the host or the disk, where it waits
    PARKS = "parks"  # to a place on the host that it takes when it comes, and gives back after its update
    RING = "ring"  # to a ring's buffer, where its update reads it


FROM_SLOT = (Route.ROUNDED_HOME, Route.REDUCED_HOME, Route.USED_UP)
LEAVING = (Route.LEAVES, Route.PARKS, Route.RING)
READ_IN_FP32 = (Route.PLACE, Route.REDUCED_HOME, Route.USED_UP)  # by an update on the GPU
SUM_DTYPE = "float32"  # of sums of gradients
STAGING = (Buffer.LEAVING, Buffer.ARRIVING, Buffer.ROUNDING)
RING_COUNTS = {  # the field of a plan that says how many buffers there are
    Buffer.READ: "num_read_buffers",
    Buffer.WRITTEN: "num_grad_buffers",
    Buffer.UPDATED: "num_state_buffers",
}
RINGS = tuple(RING_COUNTS)
BUFFER_TIERS = {buffer: Tier.HOST if buffer in RINGS else Tier.GPU for buffer in Buffer}


@dataclass(frozen=True, eq=False)
class ChunkPlace:
    """Where one chunk's parameters, gradient and states are, and through which buffers they pass."""

    chunk: ChunkSpec
    shard: ChunkSpec  # what one rank has of it at home (the first one: sizes are equal). Of one rank the chunk itself
    params: Tier  # where compute finds the values. GPU: persistent. Else they are fetched from there into slots
    home: Tier  # where an update leaves the values. Not `params` where a persistent chunk is updated elsewhere
    route: Route  # of its gradient
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
    ranks: int = 1
    replicas: int = 1  # groups of them that have a copy of everything
    # Into a slot before each use, or where it stays after each update or fetch
    is_gathered: bool = False
    is_averaged: bool = False  # what is trained of it, over several ranks
    is_cut: bool = False  # a rank has a shard of it, which of one rank that talks to itself is all of it
    settle_bytes: int = 0  # the same, of the second part of its update; 0: its update is one

    @cached_property
    def settles(self) -> bool:
        """Its states are written after its parameters."""
        return self.settle_bytes > 0

    @property
    def last_of_update(self) -> ActionKey:
        """What reads its gradient last."""
        return ActionKey(Op.SETTLE if self.settles else Op.UPDATE, self.chunk.index)

    @cached_property
    def is_streamed(self) -> bool:
        """Its values are not on the GPU, or only a shard of them, but for the time of their use."""
        return self.params is not Tier.GPU or self.num_slots > 0

    @cached_property
    def is_refreshed(self) -> bool:
        """Used on the GPU, updated elsewhere: each pass begins by fetching the new values into the persistent place."""
        return self.params is Tier.GPU is not self.home

    @cached_property
    def is_gathered_after_update(self) -> bool:
        """Its update on the GPU changes a shard of parameters that are whole there."""
        return self.is_gathered and not self.is_streamed and not self.is_refreshed and self.chunk.optimised_numel > 0

    @cached_property
    def is_reduced(self) -> bool:
        """Its gradient is averaged over several ranks."""
        return self.is_averaged and self.chunk.trainable_numel > 0

    @cached_property
    def is_reduced_home(self) -> bool:
        return self.route is Route.REDUCED_HOME

    @cached_property
    def is_rounded_home(self) -> bool:
        return self.route is Route.ROUNDED_HOME

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

    @cached_property
    def in_grad_slot(self) -> bool:
        """Its gradient is summed in a slot."""
        return self.num_grad_slots > 0

    @cached_property
    def leaves(self) -> bool:
        """Its gradient goes from the GPU to another tier."""
        return self.route in LEAVING

    @cached_property
    def parks(self) -> bool:
        """Its gradient takes host memory from its write-back to its update, and at no other time."""
        return self.route is Route.PARKS

    @cached_property
    def passes_ring(self) -> bool:
        """Its gradient leaves the GPU into a ring's buffer: its update follows from there, or a write to disk."""
        return self.leaves and self.grad is not Tier.HOST

    @cached_property
    def is_narrow(self) -> bool:
        """Its gradient is rounded on its way home."""
        return self.grad_dtype != SUM_DTYPE

    @cached_property
    def is_used_up(self) -> bool:
        return self.route is Route.USED_UP

    @cached_property
    def is_updated_on_gpu(self) -> bool:
        """By compute, in its turn. Else on the host, by a lane of its own."""
        return self.states is Tier.GPU

    @cached_property
    def is_home_on_gpu(self) -> bool:
        """What an update leaves is there, all of it or a shard: nothing is fetched."""
        return self.home is Tier.GPU

    @property
    def has_states_on_disk(self) -> bool:
        return self.states is Tier.DISK

    @property
    def sums_wait_on_gpu(self) -> bool:
        """A finished gradient waits there for its update."""
        return self.grad is Tier.GPU

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
