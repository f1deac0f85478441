"""What waits on the GPU for the step, rounded: never more than in fp32, and only where nothing is added later."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hightide.ir.block import ModelProfile
from hightide.ir.plan import GradientDtype, Plan, Update
from hightide.ir.tier import ChunkKind, Tier
from hightide.planner import chunk_places
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.placement import Placement
from hightide.planner.verify.check_plan import check_plan
from unit.planner.profiles import plan_with, profiles, rounded_on_gpu, stack

G = Tier.GPU


def in_bf16(profile: ModelProfile) -> ModelProfile:
    return replace(profile, params=tuple(replace(spec, dtype="bfloat16") for spec in profile.params))


def both_ways(profile: ModelProfile, slot_numel: int | None = None) -> tuple[Plan, Plan]:
    """All on the GPU: rounded there, and in fp32."""
    plan = plan_with(profile, params=G, states=G, spare=0, slot_numel=slot_numel)
    return rounded_on_gpu(profile, plan, spare=0), replace(plan, gradients=GradientDtype.PARAM)


def waiting(plan: Plan) -> list[ChunkPlace]:
    return [place for place in Placement(plan).chunks if place.is_rounded_home]


@given(profiles(), st.sampled_from([128, 256, 1024, 4096]), st.sampled_from([1, 3]))
@settings(max_examples=80, deadline=None)
def test_it_never_takes_more_than_fp32(profile: ModelProfile, slot_numel: int, slots: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_places, "SLOTS_FOR_ROUNDED", slots)
        rounded, in_fp32 = both_ways(in_bf16(profile), slot_numel)
        check_bytes(rounded, in_fp32)


def check_bytes(rounded: Plan, in_fp32: Plan) -> None:
    padding = 512 * len(rounded.layout.chunks)
    assert Placement(rounded).base_bytes()[G] <= Placement(in_fp32).base_bytes()[G] + padding
    for place in waiting(rounded):
        assert place.chunk.num_backwards == 1 and not place.rounds_in_place
        assert place.copies[ChunkKind.GRAD, G] == 2 * place.chunk.trainable_numel


def test_equal_layers_wait_and_what_is_wider_than_most_does_not() -> None:
    profile = stack(8, dtype="bfloat16")
    wide = replace(profile.params[0], shape=(64 * 1024,))
    profile = replace(profile, params=(wide, *profile.params[1:]))
    rounded, in_fp32 = both_ways(profile)
    found = {place.chunk.block for place in waiting(rounded)}
    assert set(range(1, 9)) <= found and 0 not in found
    layers = sum(place.chunk.grad_bytes for place in Placement(rounded).chunks if place.chunk.block in range(1, 9))
    saved = Placement(in_fp32).base_bytes()[G] - Placement(rounded).base_bytes()[G]
    assert saved >= layers // 2 - layers // 8 > 0
    assert not waiting(replace(rounded, rounded_on_gpu=False))


@pytest.mark.parametrize("num_layers", [1, 3])
def test_few_layers_are_not_worth_slots(num_layers: int) -> None:
    profile = stack(num_layers, tied=True, dtype="bfloat16")
    assert not waiting(both_ways(profile)[0])


@pytest.mark.parametrize("change", [{"update": Update.IN_BACKWARD}, {"accumulate": 2}, {"even_alone": True}])
def test_what_is_added_to_later_is_refused(change: dict[str, object]) -> None:
    profile = stack(4, dtype="bfloat16")
    plan = replace(both_ways(profile)[0], **change)  # type: ignore[arg-type]
    assert not waiting(plan)
    with pytest.raises(InfeasiblePlan, match=r"rounded_on_gpu is true.*use rounded_on_gpu=false"):
        check_plan(profile, plan)
