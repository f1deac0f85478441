"""How parameters are packed into chunks."""

from __future__ import annotations

from dataclasses import dataclass

from hightide.ir.block import DTYPE_BYTES

ALIGN_NUMEL = 128  # every parameter starts at a multiple of this many elements: 256 bytes in bf16, 512 in fp32
GRAD_BYTES = 4  # gradients are summed in fp32
# Gradients are rounded, and widened again, so many elements at a time. Those that leave the GPU wait behind compute for
# every kernel: they take one.
LEAVING_NUMEL = 128 * 1024**2
STAGING_NUMEL = 4 * 1024**2
UPDATE_TILE_NUMEL = 32 * 1024**2  # an update on the GPU works in tiles of so many elements, of which it may copy one
REGION_BYTES = 512  # stores give space in multiples of this
STATE_BYTES = 4  # master copies and moments are fp32
REMAINDER_BYTES = 2  # what a bf16 parameter lacks of its master


def aligned(numel: int) -> int:
    return -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL


@dataclass(frozen=True)
class ParamRange:
    """Where one parameter lies inside its chunk."""

    param: str
    offset_numel: int
    numel: int

    @property
    def end_numel(self) -> int:
        return self.offset_numel + aligned(self.numel)


@dataclass(frozen=True)
class ChunkSpec:
    """Parameters of one block and one dtype, packed. Optimised parameters come first (group by group), then trainable
    ones that no optimizer owns, then frozen ones: GRAD and STATE are prefixes of the element range."""

    index: int
    block: int  # the owner: the first block in execution order that uses it
    users: tuple[int, ...]  # all blocks that use it; more than one for tied parameters
    dtype: str
    numel: int  # whole chunk, padded
    trainable_numel: int
    optimised_numel: int
    params: tuple[ParamRange, ...]
    num_states: int  # of each optimised element: moments, and a master where dtype is not fp32
    num_backwards: int  # how many blocks' backwards add to its gradient in one pass; 0 also where autograd does

    @property
    def param_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def grad_bytes(self) -> int:
        """Of the fp32 sum on the GPU."""
        return self.trainable_numel * GRAD_BYTES

    @property
    def moment_bytes(self) -> int:
        return self.optimised_numel * STATE_BYTES * (self.num_states - self.has_master)

    @property
    def state_bytes(self) -> int:
        """Moments, then the master or what the parameter lacks of it."""
        master = REMAINDER_BYTES if self.has_remainder else STATE_BYTES
        return self.moment_bytes + (self.optimised_numel * master if self.has_master else 0)

    @property
    def has_remainder(self) -> bool:
        """Its master is the parameter plus 16 more bits. See [Note: masters in two parts] in runtime/remainder.py."""
        return self.dtype == "bfloat16"

    @property
    def has_master(self) -> bool:
        return self.dtype != "float32"


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
