"""Plans of one rank, made into plans for several."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from hightide.ir.block import ModelProfile
from hightide.ir.plan import Plan, Sharing, Update
from hightide.ir.tier import Tier
from hightide.planner.chunk_place import RING_COUNTS
from hightide.planner.layout import pack
from hightide.planner.placement import Placement
from unit.planner.profiles import plans


def ranked(
    profile: ModelProfile,
    plan: Plan,
    ranks: int,
    sharing: Sharing,
    *more: Sharing,
    replicas: int = 1,
    num_buffers: int = 2,
) -> Plan:
    """`sharing`, and more, are of the blocks in turn, as far as they may be. `num_buffers`: of each ring."""
    layout = pack(profile, plan.layout.slot_numel, num_shards=ranks // replicas)
    trained = {chunk.block for chunk in layout.chunks if chunk.optimised_numel}
    blocks, ways = [], (sharing, *more)
    for index, (spec, block) in enumerate(zip(profile.blocks, plan.blocks, strict=True)):
        way = ways[index % len(ways)]
        if block.params is Tier.GPU is not block.states and index in trained:
            way = Sharing.PARAMS_REPLICATED
        blocks.append(replace(block, sharing=Sharing.REPLICATED if spec.loose else way, compute=Tier.GPU))
    made = replace(plan, layout=layout, blocks=tuple(blocks), ranks=ranks, replicas=replicas)
    before = Placement(plan).widest_tick({call.block for call in profile.calls})
    placement = Placement(made)
    slots, grad_slots = placement.widest_tick({call.block for call in profile.calls})
    rings = {name: num_buffers if placement.buffer_bytes[ring] else 0 for ring, name in RING_COUNTS.items()}
    spare, spare_grad = plan.num_slots - before[0], plan.num_grad_slots - before[1]
    return replace(made, num_slots=slots + spare, num_grad_slots=grad_slots + spare_grad, **rings)


@st.composite
def ranked_plans(draw: st.DrawFn, profile: ModelProfile, update: Update, disk: bool = False) -> Plan:
    """Any legal plan for 2 to 4 ranks, in one group or several."""
    ranks, replicas = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (4, 2), (2, 2)]))
    plan = replace(draw(plans(profile, update, disk)), rounded_on_gpu=False)  # of one rank only
    sharings = draw(st.lists(st.sampled_from(Sharing), min_size=1, max_size=3))
    made = ranked(profile, plan, ranks, *sharings, replicas=replicas)
    accumulate = draw(st.sampled_from([1, 1, 3]))
    sums = draw(st.sampled_from([Tier.GPU, Tier.HOST]))
    if accumulate == 1:
        return made
    blocks = tuple(block if block.states is Tier.DISK else replace(block, sums=sums) for block in made.blocks)
    made = replace(made, accumulate=accumulate, blocks=blocks)
    placement = Placement(made)
    slots, grad_slots = placement.widest_tick({call.block for call in profile.calls})
    rings = {name: 2 if placement.buffer_bytes[ring] else 0 for ring, name in RING_COUNTS.items()}
    return replace(made, num_slots=slots + 1, num_grad_slots=grad_slots + 1, **rings)
