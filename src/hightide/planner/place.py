"""Where the bytes of each chunk live under a plan. The runtime allocates by these answers, the passes count by them."""

from __future__ import annotations

from dataclasses import replace

from hightide.ir.block import DTYPE_BYTES
from hightide.ir.chunk import (
    GRAD_BYTES,
    LEAVING_NUMEL,
    REGION_BYTES,
    STAGING_NUMEL,
    ChunkSpec,
    Layout,
)
from hightide.ir.plan import BlockPlan, GradientDtype, Plan, Update
from hightide.ir.tier import Tier


def owners(plan: Plan) -> tuple[int | None, ...]:
    """By block, the one whose decisions say where its parameters are: itself, or for one that has only tied parameters
    (the head of many language models) the first block that uses them. None: it has no parameters."""
    found: dict[int, int] = {}
    for chunk in plan.layout.chunks:
        for user in chunk.users:
            found.setdefault(user, chunk.block)
    found.update({chunk.block: chunk.block for chunk in plan.layout.chunks})
    return tuple(found.get(block) for block in range(len(plan.blocks)))


def blocks_in_effect(plan: Plan) -> tuple[BlockPlan, ...]:
    """What is decided about each block, with the tiers of its owner: its own mean nothing."""
    homes = [plan.blocks[block if owner is None else owner] for block, owner in enumerate(owners(plan))]
    return tuple(
        replace(block, params=home.params, states=home.states) for block, home in zip(plan.blocks, homes, strict=True)
    )


def params_on_gpu(plan: Plan, chunk: ChunkSpec) -> bool:
    """Its parameters are persistent: they have a place of their own and no slot. In a block whose frozen parameters
    stream, those that are trained are persistent where their states are."""
    block = plan.blocks[chunk.block]
    return block.params is Tier.GPU or (block.states is Tier.GPU and chunk.trainable_numel > 0)


def states_on_gpu(plan: Plan, chunk: ChunkSpec) -> bool:
    return plan.blocks[chunk.block].states is Tier.GPU


def is_resident(plan: Plan) -> bool:
    """All parameters and states stay on the GPU."""
    return all(params_on_gpu(plan, chunk) and states_on_gpu(plan, chunk) for chunk in plan.layout.chunks)


def is_refreshed(plan: Plan, chunk: ChunkSpec) -> bool:
    """Used on the GPU, updated on the host: each pass begins by fetching the new values into the persistent place."""
    return params_on_gpu(plan, chunk) and not states_on_gpu(plan, chunk) and chunk.optimised_numel > 0


def params_on_disk(plan: Plan, chunk: ChunkSpec) -> bool:
    return plan.blocks[chunk.block].params is Tier.DISK and not params_on_gpu(plan, chunk)


def has_host_params(plan: Plan, chunk: ChunkSpec) -> bool:
    return is_refreshed(plan, chunk) or not (params_on_gpu(plan, chunk) or params_on_disk(plan, chunk))


def params_home(plan: Plan, chunk: ChunkSpec) -> Tier:
    """Where an update leaves them."""
    if has_host_params(plan, chunk):
        return Tier.HOST
    return Tier.DISK if params_on_disk(plan, chunk) else Tier.GPU


def states_on_disk(plan: Plan, chunk: ChunkSpec) -> bool:
    return plan.blocks[chunk.block].states is Tier.DISK and chunk.trainable_numel > 0


def grad_on_disk(plan: Plan, chunk: ChunkSpec) -> bool:
    """Its finished gradient waits there for the update. One that its update reads right away stays in its buffer."""
    return states_on_disk(plan, chunk) and not (plan.update is Update.IN_BACKWARD and _is_summed_once(chunk))


def uses_disk(plan: Plan) -> bool:
    return any(params_on_disk(plan, chunk) or states_on_disk(plan, chunk) for chunk in plan.layout.chunks)


def is_used_up(plan: Plan, chunk: ChunkSpec) -> bool:
    """Its gradient is summed in a grad slot, and its update, right afterwards on the GPU, is the last to read it: so it
    needs no place of its own."""
    return states_on_gpu(plan, chunk) and plan.update is Update.IN_BACKWARD and _is_summed_once(chunk)


def _is_summed_once(chunk: ChunkSpec) -> bool:
    """One backward makes its gradient, and one update reads all of it."""
    return chunk.num_backwards == 1 and chunk.optimised_numel == chunk.trainable_numel > 0


def in_grad_slot(plan: Plan, chunk: ChunkSpec) -> bool:
    """Where its gradient is summed: else at a place of its own on the GPU."""
    return chunk.trainable_numel > 0 and (not states_on_gpu(plan, chunk) or is_used_up(plan, chunk))


def grad_dtype(plan: Plan, chunk: ChunkSpec) -> str:
    """Of a finished gradient, wherever it is. A dtype that is wider than the sum would only repeat zeros."""
    if plan.gradients is GradientDtype.PARAM and DTYPE_BYTES[chunk.dtype] < GRAD_BYTES:
        return chunk.dtype
    return "float32"


def rounds_gradient(plan: Plan, chunk: ChunkSpec) -> bool:
    return grad_dtype(plan, chunk) != "float32" and chunk.trainable_numel > 0


def rounds_in_place(plan: Plan, chunk: ChunkSpec) -> bool:
    """Its gradient is rounded where it is summed: nobody else would do it, or more is added later."""
    return rounds_gradient(plan, chunk) and (states_on_gpu(plan, chunk) or chunk.num_backwards > 1)


def host_grad_bytes(plan: Plan, chunk: ChunkSpec) -> int:
    """On the link, and at home."""
    return chunk.trainable_numel * DTYPE_BYTES[grad_dtype(plan, chunk)]


def update_bytes(plan: Plan, chunk: ChunkSpec) -> int:
    """That an update touches, each array once."""
    grad = GRAD_BYTES if states_on_gpu(plan, chunk) else DTYPE_BYTES[grad_dtype(plan, chunk)]
    return chunk.optimised_numel * (grad + DTYPE_BYTES[chunk.dtype]) + chunk.state_bytes


def staging_bytes(plan: Plan) -> tuple[int, int, int]:
    """Buffers on the GPU through which rounded gradients pass: those that leave, that come back, and that are rounded
    where they are. Each belongs to one stream, whose order makes it enough."""
    rounded = [chunk for chunk in plan.layout.chunks if rounds_gradient(plan, chunk)]

    def size(chunks: list[ChunkSpec], most_numel: int) -> int:
        sizes = [min(chunk.trainable_numel, most_numel) * DTYPE_BYTES[grad_dtype(plan, chunk)] for chunk in chunks]
        return max(sizes, default=0)

    leaving = [chunk for chunk in rounded if not states_on_gpu(plan, chunk)]
    return size(leaving, LEAVING_NUMEL), size(leaving, STAGING_NUMEL), size(rounded, STAGING_NUMEL)


def gpu_staging_bytes(plan: Plan) -> int:
    return sum(region_bytes(num_bytes) for num_bytes in staging_bytes(plan))


def gpu_chunk_bytes(plan: Plan, chunk: ChunkSpec) -> int:
    """Bytes on the GPU for the whole run."""
    params = region_bytes(chunk.param_bytes) if params_on_gpu(plan, chunk) else 0
    if not states_on_gpu(plan, chunk):
        return params
    gradient = 0 if is_used_up(plan, chunk) else region_bytes(chunk.grad_bytes)
    return params + gradient + region_bytes(chunk.state_bytes)


def host_chunk_bytes(plan: Plan, chunk: ChunkSpec) -> int:
    """Bytes on the host for the whole run."""
    params = region_bytes(chunk.param_bytes) if has_host_params(plan, chunk) else 0
    training = region_bytes(host_grad_bytes(plan, chunk)) + region_bytes(chunk.state_bytes)
    return params + (training if plan.blocks[chunk.block].states is Tier.HOST else 0)


def disk_chunk_bytes(plan: Plan, chunk: ChunkSpec) -> int:
    """Bytes on disk for the whole run."""
    params = region_bytes(chunk.param_bytes) if params_on_disk(plan, chunk) else 0
    gradient = region_bytes(host_grad_bytes(plan, chunk)) if grad_on_disk(plan, chunk) else 0
    return params + gradient + (region_bytes(chunk.state_bytes) if states_on_disk(plan, chunk) else 0)


def written_state_bytes(plan: Plan, chunk: ChunkSpec) -> int:
    """To disk, after an update there: its parameters too, where they live there."""
    return chunk.state_bytes + (chunk.param_bytes if params_on_disk(plan, chunk) else 0)


def read_state_bytes(plan: Plan, chunk: ChunkSpec) -> int:
    """From disk, before an update."""
    gradient = host_grad_bytes(plan, chunk) if grad_on_disk(plan, chunk) else 0
    return written_state_bytes(plan, chunk) + gradient


def disk_buffer_bytes(plan: Plan) -> tuple[int, int, int]:
    """Of one buffer on the host for what lives on disk: for parameters and gradients on their way to the GPU, for
    gradients on their way back, and for updates."""
    up = down = state = 0
    for chunk in plan.layout.chunks:
        if params_on_disk(plan, chunk):
            up = max(up, chunk.param_bytes)
        if states_on_disk(plan, chunk):
            down = max(down, host_grad_bytes(plan, chunk))
            state = max(state, read_state_bytes(plan, chunk))
        if grad_on_disk(plan, chunk):  # sums go on, in tied chunks and where gradients are accumulated
            up = max(up, host_grad_bytes(plan, chunk))
    return region_bytes(up), region_bytes(down), region_bytes(state)


def region_bytes(num_bytes: int) -> int:
    """What a store sets aside for so many bytes."""
    return -(-num_bytes // REGION_BYTES) * REGION_BYTES


def slot_bytes(plan: Plan) -> int:
    """All streamed chunks share the slots, whatever their dtype, so each holds the largest."""
    streamed = [chunk for chunk in plan.layout.chunks if not params_on_gpu(plan, chunk)]
    return max((_share_bytes(chunk.param_bytes, plan.layout.num_slots(chunk)) for chunk in streamed), default=0)


def grad_slot_bytes(plan: Plan) -> int:
    """Of what is trained: where most is frozen, far less than a slot."""
    passing = [chunk for chunk in plan.layout.chunks if in_grad_slot(plan, chunk)]
    return max((_share_bytes(chunk.grad_bytes, grad_width(plan.layout, chunk)) for chunk in passing), default=0)


def _share_bytes(num_bytes: int, num_slots: int) -> int:
    return region_bytes(-(-num_bytes // num_slots))


def grad_width(layout: Layout, chunk: ChunkSpec) -> int:
    """Grad slots that the chunk's gradient takes: only its trainable prefix has one."""
    return max(1, -(-chunk.trainable_numel // layout.slot_numel))


def chunks_by_block(layout: Layout, num_blocks: int) -> tuple[tuple[ChunkSpec, ...], ...]:
    """For each block all chunks that it uses, its own and those it shares."""
    uses: list[list[ChunkSpec]] = [[] for _ in range(num_blocks)]
    for chunk in layout.chunks:
        for user in chunk.users:
            uses[user].append(chunk)
    return tuple(tuple(chunks) for chunks in uses)


def widest_tick(plan: Plan, called: set[int]) -> tuple[int, int]:
    """Slots and grad slots that the most demanding of the called blocks needs at once."""
    params = grads = 0
    for block, chunks in enumerate(chunks_by_block(plan.layout, len(plan.blocks))):
        if block not in called:
            continue
        streamed = [chunk for chunk in chunks if not params_on_gpu(plan, chunk)]
        passing = [chunk for chunk in chunks if in_grad_slot(plan, chunk)]
        params = max(params, sum(plan.layout.num_slots(chunk) for chunk in streamed))
        grads = max(grads, sum(grad_width(plan.layout, chunk) for chunk in passing))
    return params, grads
