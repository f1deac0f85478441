"""How parameters are packed into chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from hightide.ir.block import DTYPE_BYTES
from hightide.ir.state_spec import MASTER, REMAINDER, StateSpec, StateSpecs
from hightide.ir.tier import Tier

ALIGN_NUMEL = 128  # every parameter starts at a multiple of this many elements: 256 bytes in bf16, 512 in fp32
GRAD_BYTES = 4  # gradients are summed in fp32
# Gradients are rounded, and widened again, so many elements at a time. Those that leave the GPU wait behind compute for
# every kernel: they take one.
LEAVING_NUMEL = 128 * 1024**2
STAGING_NUMEL = 4 * 1024**2
UPDATE_TILE_NUMEL = 32 * 1024**2  # an update on the GPU works in tiles of so many elements, of which it may copy one
REGION_BYTES = 512  # stores give space in multiples of this,
DISK_REGION_BYTES = 4096  # and a disk in multiples of this, which direct transfers ask for
STATE_ALIGN_BYTES = 256  # in a chunk's states each array starts at a multiple of this


def aligned(numel: int) -> int:
    """An empty parameter takes room too: no chunk is empty, and no two parameters lie at the same place."""
    return max(1, -(-numel // ALIGN_NUMEL)) * ALIGN_NUMEL


def region_bytes(num_bytes: int, tier: Tier | None = None) -> int:
    """What a store sets aside for so many bytes. The tier is asked for because a disk sets aside in larger units."""
    unit_bytes = DISK_REGION_BYTES if tier is Tier.DISK else REGION_BYTES
    return -(-num_bytes // unit_bytes) * unit_bytes


def on_disk_bytes(num_bytes: int) -> int:
    """The same on a disk, and in the buffers that its bytes pass through: both begin and end where direct transfers
    may."""
    return region_bytes(num_bytes, Tier.DISK)


@dataclass(frozen=True)
class ParamRange:
    """Where one parameter lies inside its chunk."""

    param: str
    offset_numel: int
    numel: int
    start_numel: int = 0  # in a shard: so many elements of the parameter lie in the shards of ranks before it

    @cached_property
    def end_numel(self) -> int:
        return self.offset_numel + aligned(self.numel)

    def within(self, per_numel: int = 1) -> slice:
        """Its part of an array that has one element for so many of the chunk."""
        start = self.offset_numel // per_numel
        return slice(start, start + -(-self.numel // per_numel))


@dataclass(frozen=True)
class ChunkSpec:
    """Parameters of one block and one dtype, packed. Optimised parameters come first (group by group), then trainable
    ones that no optimizer owns, then frozen ones: GRAD and STATE are prefixes of the element range. For several ranks
    each of these sections is padded so that it can be cut into equal shards."""

    index: int
    block: int  # the owner: the first block in execution order that uses it
    users: tuple[int, ...]  # all blocks that use it; more than one for tied parameters
    dtype: str
    numel: int  # whole chunk, padded
    trainable_numel: int
    optimised_numel: int
    params: tuple[ParamRange, ...]
    states: StateSpecs  # of the optimised elements: the update rule's own, then a master where dtype is not fp32
    num_backwards: int  # how many blocks' backwards add to its gradient in one pass; 0 also where autograd does

    def __post_init__(self) -> None:
        for state in self.states:
            if ALIGN_NUMEL % state.per_numel:
                raise ValueError(
                    f"{state}: parameters are packed, and updates cut, at multiples of {ALIGN_NUMEL} elements; "
                    f"{state.per_numel} must divide that"
                )

    @property
    def sections(self) -> tuple[range, ...]:
        """Elements that are optimised, otherwise trainable, and frozen."""
        ends = 0, self.optimised_numel, self.trainable_numel, self.numel
        return tuple(range(start, end) for start, end in pairwise(ends))

    def own_ranges(self, rank: int, num_shards: int) -> tuple[range, ...]:
        """Elements that belong to a rank: its part of each section, in the order in which they lie in its shard."""
        parts = ((section.start, len(section) // num_shards) for section in self.sections)
        return tuple(range(start + rank * numel, start + (rank + 1) * numel) for start, numel in parts)

    def shard(self, rank: int, num_shards: int) -> ChunkSpec:
        """What a rank has of it, as a chunk with the same sections, each so many times shorter. Sizes are the same on
        all ranks; one may hold nothing but padding."""
        if num_shards == 1:
            return self
        odd = [len(section) for section in self.sections if len(section) % (num_shards * ALIGN_NUMEL)]
        assert not odd, f"sections of {odd} elements are not padded for {num_shards} shards"
        params, end = [], 0
        for own in self.own_ranges(rank, num_shards):
            for place in self.params:
                first = max(place.offset_numel, own.start)
                # An empty parameter has a place too, and one owner.
                last = min(place.offset_numel + place.numel, own.stop)
                if first < last or (not place.numel and place.offset_numel in own):
                    start = place.start_numel + first - place.offset_numel
                    params.append(ParamRange(place.param, end + first - own.start, max(0, last - first), start))
            end += len(own)
        numels = {name: getattr(self, name) // num_shards for name in ("numel", "trainable_numel", "optimised_numel")}
        return replace(self, params=tuple(params), **numels)

    @cached_property
    def param_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def grad_bytes(self) -> int:
        """Of the fp32 sum on the GPU."""
        return self.trainable_numel * GRAD_BYTES

    @cached_property
    def state_offsets(self) -> dict[StateSpec, int]:
        """In bytes. The arrays lie one after the other."""
        offsets, end = {}, 0
        for state in self.states:
            offsets[state] = end
            end += -(-state.num_bytes(self.optimised_numel) // STATE_ALIGN_BYTES) * STATE_ALIGN_BYTES
        return offsets

    @cached_property
    def state_bytes(self) -> int:
        if not self.states:
            return 0
        last = self.states[-1]
        return self.state_offsets[last] + last.num_bytes(self.optimised_numel)

    @property
    def rule_states(self) -> StateSpecs:
        """Without what is kept for the sake of the dtype."""
        return tuple(state for state in self.states if state not in (MASTER, REMAINDER))

    @property
    def has_remainder(self) -> bool:
        """Its master is the parameter plus 16 more bits. See [Note: masters in two parts] in
        runtime/chunks/remainder.py."""
        return REMAINDER in self.states

    @property
    def has_master(self) -> bool:
        return self.has_remainder or MASTER in self.states


@dataclass(frozen=True)
class Layout:
    """All chunks, and the slot size in elements. A chunk larger than a slot occupies consecutive slots."""

    slot_numel: int
    chunks: tuple[ChunkSpec, ...]

    def num_slots(self, chunk: ChunkSpec) -> int:
        return max(1, -(-chunk.numel // self.slot_numel))

    def num_grad_slots(self, chunk: ChunkSpec) -> int:
        """That its gradient takes: only its trainable prefix has one."""
        return max(1, -(-chunk.trainable_numel // self.slot_numel))
