"""Embeddings whose table stays on the host (BlockPlan.compute): how much crosses the link instead of it, through which
buffers, and what the host does for it.

[Note: looking up on the host] Forward: when the table is up to date, the thread that runs the model gathers the rows
into a buffer on the host (LOOK_UP takes them to the GPU). Backward: the gradient of the rows is copied into a buffer on
the GPU, from where WRITE_BACK takes it to another one on the host; SUM adds it there to the table's gradient, on the
cpu lane, and the update follows as that of any chunk. Buffers are as large as the largest call needs, and there for the
whole run: so nothing has to outlive a copy that is under way. What is larger (an evaluation) goes through in parts."""

from __future__ import annotations

from hightide.ir.block import DTYPE_BYTES, CallSpec, ModelProfile
from hightide.ir.chunk import GRAD_BYTES, region_bytes
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier

SUM_PASSES = 5  # over what a SUM touches: on one core it does 3.5 GB/s, where an update does 18


def is_looked_up(plan: Plan, call: CallSpec) -> bool:
    return plan.blocks[call.block].compute is Tier.HOST


def rows_bytes(plan: Plan, call: CallSpec) -> int:
    """Of what a call returns, and of its gradient."""
    return call.outputs.at(plan.num_samples)


def buffer_bytes(profile: ModelProfile, plan: Plan, block: int) -> tuple[int, int]:
    """Of one buffer for rows, and of each of the two for their gradients, on the GPU and on the host."""
    calls = [call for call in profile.calls if call.block == block]
    rows = max((rows_bytes(plan, call) for call in calls), default=0)
    gradients = max((rows_bytes(plan, call) for call in calls if call.needs_backward), default=0)
    return rows, gradients


def standing_bytes(profile: ModelProfile, plan: Plan) -> dict[Tier, int]:
    """Of all these buffers."""
    found = dict.fromkeys(Tier, 0)
    for index, block in enumerate(plan.blocks):
        if block.compute is Tier.HOST:
            rows, gradients = map(region_bytes, buffer_bytes(profile, plan, index))
            found[Tier.HOST] += rows + gradients
            found[Tier.GPU] += gradients
    return found


def sum_bytes(profile: ModelProfile, plan: Plan, call: CallSpec) -> int:
    """The cpu lane's work of a SUM, in bytes that an update would touch in the same time: it touches the gradients of
    rows, and at most as many rows of the table's, in fp32."""
    (key,) = profile.blocks[call.block].params
    num_bytes = rows_bytes(plan, call)
    return SUM_PASSES * (num_bytes + num_bytes // DTYPE_BYTES[profile.param(key).dtype] * GRAD_BYTES)
