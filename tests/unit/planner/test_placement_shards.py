"""What several ranks have together: one copy of everything that is sharded, as many as ranks of what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hightide.ir.block import ModelProfile
from hightide.ir.plan import Plan, Sharing, Update
from hightide.ir.tier import ChunkKind, Tier
from hightide.planner.chunk_place import Buffer
from hightide.planner.placement import Placement
from unit.planner.profiles import plan_with, plans, profiles, stack
from unit.planner.ranked import ranked

STACK = stack(3)


def bytes_of(plan: Plan, kind: ChunkKind, tier: Tier) -> int:
    return sum(place.copies.get((kind, tier), 0) for place in Placement(plan).chunks)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelProfile, Plan, int]:
    profile = draw(profiles())
    return profile, draw(plans(profile, draw(st.sampled_from(Update)), disk=True)), draw(st.integers(2, 4))


@given(cases())
@settings(max_examples=50, deadline=None)
def test_shards_add_up_to_one_copy_with_its_padding(case: tuple[ModelProfile, Plan, int]) -> None:
    profile, plan, ranks = case
    several = ranked(profile, plan, ranks, Sharing.SHARDED)
    alone = replace(several, ranks=1)  # the same padding
    for one, other in zip(Placement(several).chunks, Placement(alone).chunks, strict=True):
        loose = profile.blocks[one.chunk.block].loose
        whole_params = several.blocks[one.chunk.block].sharing is not Sharing.SHARDED
        for (kind, tier), num_bytes in one.copies.items():
            is_whole = loose or (kind is ChunkKind.PARAM and tier is Tier.GPU and whole_params)
            assert num_bytes * (1 if is_whole else ranks) == other.copies[kind, tier], (kind, tier)
        assert one.copies.keys() == other.copies.keys()
        assert one.read_bytes * ranks == other.read_bytes and one.written_bytes * ranks == other.written_bytes
        assert one.update_bytes * (1 if loose else ranks) == other.update_bytes
        for buffer in (Buffer.SLOT, Buffer.GRAD_SLOT):  # whole, whatever the ranks
            assert one.buffer_bytes.get(buffer, 0) >= other.buffer_bytes.get(buffer, 0)


@pytest.mark.parametrize(
    ("sharing", "params", "states"),
    [(Sharing.SHARDED, 1, 1), (Sharing.PARAMS_REPLICATED, 4, 1), (Sharing.REPLICATED, 4, 4)],
)
def test_what_each_way_to_share_costs_on_the_gpu(sharing: Sharing, params: int, states: int) -> None:
    plan = ranked(STACK, plan_with(STACK, Tier.GPU, Tier.GPU), 4, sharing)
    alone = replace(plan, ranks=1)
    for kind, copies in ((ChunkKind.PARAM, params), (ChunkKind.STATE, states), (ChunkKind.GRAD, states)):
        assert 4 * bytes_of(plan, kind, Tier.GPU) == copies * bytes_of(alone, kind, Tier.GPU) > 0
    slots = {place.num_slots > 0 for place in Placement(plan).chunks}
    assert slots == {sharing is Sharing.SHARDED}


def test_groups_of_ranks_have_a_copy_each() -> None:
    plan = ranked(STACK, plan_with(STACK), 4, Sharing.SHARDED, replicas=2)
    alone = replace(plan, ranks=1, replicas=1)
    for kind in ChunkKind:
        assert 2 * bytes_of(plan, kind, Tier.HOST) == bytes_of(alone, kind, Tier.HOST)


def test_gradients_that_stay_are_whole_until_they_are_reduced() -> None:
    plan = replace(ranked(STACK, plan_with(STACK, Tier.GPU, Tier.GPU), 2, Sharing.SHARDED), accumulate=2)
    places = Placement(plan).chunks
    assert all(place.is_reduced_home and place.in_grad_slot for place in places)
    staying = replace(plan, blocks=tuple(replace(block, sums=Tier.GPU) for block in plan.blocks))
    for one, other in zip(Placement(staying).chunks, places, strict=True):
        assert one.stays and not one.leaves and not one.in_grad_slot
        assert one.copies[ChunkKind.GRAD, Tier.GPU] == 2 * other.copies[ChunkKind.GRAD, Tier.GPU]
