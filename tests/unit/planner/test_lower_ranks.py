"""Schedules for several ranks: verified, and run by a witness whose ranks are as slow as they like."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hightide.ir.action import Action, ActionKey, Mode, Op, Schedule
from hightide.ir.block import ModelProfile
from hightide.ir.plan import Plan, Sharing, Update
from hightide.ir.tier import COLLECTIVES, Lane, Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower, lower_step, modes_beside
from hightide.planner.placement import Placement
from hightide.planner.verify.check_plan import check_plan
from hightide.planner.verify.precedence import Precedence
from hightide.planner.verify.verify_schedule import verify, verify_step
from unit.planner.profiles import plan_with, profiles, stack
from unit.planner.random_ranks import RandomRanks
from unit.planner.ranked import ranked, ranked_plans

STACK, TIED = stack(3), stack(3, tied=True)


@st.composite
def cases(draw: st.DrawFn, disk: bool) -> tuple[ModelProfile, Plan]:
    profile = draw(profiles())
    return profile, draw(ranked_plans(profile, draw(st.sampled_from(Update)), disk))


def collectives_of(schedule: Schedule) -> dict[Lane, list[tuple[ActionKey, int]]]:
    """What all ranks do together: of each lane what and how many bytes, in its order."""
    return {lane: [(one.id, one.num_bytes) for one in schedule.lane(lane)] for lane in COLLECTIVES}


def check(profile: ModelProfile, plan: Plan, seed: int = 0) -> list[Schedule]:
    check_plan(profile, plan)
    placement = Placement(plan)
    passes = lower_step(profile, plan, placement)
    verify_step(profile, placement, passes)
    beside = [lower(profile, plan, mode, placement) for mode in modes_beside(plan)]
    for schedule in beside:
        verify(profile, placement, schedule)
    schedules = [*passes, *beside]
    for schedule in schedules:
        ended = RandomRanks(plan, [schedule] * plan.ranks, seed).run()
        assert len(ended) == sum(map(len, collectives_of(schedule).values()))
    return schedules


@given(cases(disk=False), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_any_plan_for_several_ranks_is_lowered_rightly(case: tuple[ModelProfile, Plan], seed: int) -> None:
    check(*case, seed)


@given(cases(disk=True), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_with_a_disk_too(case: tuple[ModelProfile, Plan], seed: int) -> None:
    check(*case, seed)


def ids(schedule: Schedule, op: Op) -> list[str]:
    return [action.id for action in schedule.actions if action.op is op]


def test_of_one_rank_nothing_is_gathered_or_reduced() -> None:
    schedule = lower(STACK, plan_with(STACK), Mode.TRAIN)
    assert not any(collectives_of(schedule).values())


def test_a_fetch_brings_a_shard_and_a_gather_the_rest() -> None:
    plan = ranked(STACK, plan_with(STACK), 4, Sharing.SHARDED)
    schedule, *_ = check(STACK, plan)
    chunk = plan.layout.chunks[1]
    fetch, gather = schedule.by_id["fetch.param.1@fwd.1"], schedule.by_id["gather.1@fwd.1"]
    assert fetch.num_bytes * 4 == chunk.param_bytes and gather.num_bytes == 3 * fetch.num_bytes
    assert gather.after == (fetch.id,) and gather.target == fetch.target == gather.source
    assert gather.id in schedule.by_id["fwd.1"].after and fetch.id not in schedule.by_id["fwd.1"].after
    leaves, reduce = schedule.by_id["write_back.1@bwd.1"], schedule.by_id["reduce.1@bwd.1"]
    assert reduce.id in leaves.after and leaves.num_bytes * 4 == chunk.grad_bytes


def test_shards_that_stay_are_gathered_from_there() -> None:
    on_gpu = plan_with(STACK, Tier.GPU, Tier.GPU, slot_numel=4096)
    schedule, *_ = check(STACK, ranked(STACK, on_gpu, 2, Sharing.SHARDED))
    gather = schedule.by_id["gather.2@fwd.2"]
    assert not ids(schedule, Op.FETCH) and gather.source is not None and gather.source.slot is None
    assert str(gather.target).startswith("gpu[") and gather.after_prev == ("update.2",)
    reduce = schedule.by_id["reduce.2@bwd.2"]
    assert str(reduce.source).startswith("gpu[") and str(reduce.target) == "gpu"


def test_whole_parameters_are_gathered_after_their_update() -> None:
    on_gpu = plan_with(STACK, Tier.GPU, Tier.GPU, slot_numel=4096)
    schedule, *_ = check(STACK, ranked(STACK, on_gpu, 2, Sharing.PARAMS_REPLICATED))
    assert ids(schedule, Op.GATHER) == [f"gather.{chunk}" for chunk in range(6)]
    assert schedule.by_id["gather.3"].after == ("update.3",) and "gather.3" in schedule.by_id["fwd.3"].after_prev
    evaluation = lower(STACK, ranked(STACK, on_gpu, 2, Sharing.PARAMS_REPLICATED), Mode.EVAL)
    assert not ids(evaluation, Op.GATHER) and "gather.3" in evaluation.by_id["fwd.3"].after_prev


def test_what_is_whole_on_each_rank_is_only_averaged() -> None:
    plan = ranked(STACK, plan_with(STACK, Tier.GPU, Tier.GPU, slot_numel=4096), 4, Sharing.REPLICATED)
    schedule, *_ = check(STACK, plan)
    assert not ids(schedule, Op.GATHER) and len(ids(schedule, Op.REDUCE)) == 6
    assert schedule.by_id["reduce.1@bwd.1"].num_bytes == 2 * plan.layout.chunks[1].grad_bytes * 3 // 4


def test_parameters_that_stay_are_fetched_in_shards_and_gathered_in_place() -> None:
    schedule, *_ = check(
        STACK, ranked(STACK, plan_with(STACK, Tier.GPU, slot_numel=4096), 2, Sharing.PARAMS_REPLICATED)
    )
    gather = schedule.by_id["gather.2@fwd.2"]
    assert str(gather.target) == "gpu" and gather.after == ("fetch.param.2@fwd.2",)
    assert "gather.2@bwd.2" not in schedule.by_id


def test_sums_that_stay_are_reduced_in_the_last_pass_only() -> None:
    plan = replace(plan_with(STACK, slot_numel=4096), accumulate=3)
    plan = replace(plan, blocks=tuple(replace(block, sums=Tier.GPU) for block in plan.blocks))
    schedules = {one.mode: one for one in check(STACK, ranked(STACK, plan, 2, Sharing.SHARDED))}
    assert not ids(schedules[Mode.FIRST], Op.REDUCE) and not ids(schedules[Mode.MIDDLE], Op.REDUCE)
    assert len(ids(schedules[Mode.LAST], Op.REDUCE)) == len(ids(schedules[Mode.LAST], Op.WRITE_BACK)) == 6
    plan = replace(plan, blocks=tuple(replace(block, sums=Tier.HOST) for block in plan.blocks))
    schedules = {one.mode: one for one in check(STACK, ranked(STACK, plan, 2, Sharing.SHARDED))}
    assert len(ids(schedules[Mode.FIRST], Op.REDUCE)) == 6


def test_frozen_chunks_are_gathered_and_never_reduced() -> None:
    frozen = replace(STACK, params=tuple(replace(spec, trainable=False, group=None) for spec in STACK.params))
    frozen = replace(frozen, calls=tuple(replace(one, needs_backward=False) for one in frozen.calls))
    schedule, *_ = check(frozen, ranked(frozen, plan_with(frozen), 2, Sharing.SHARDED))
    assert ids(schedule, Op.GATHER) and not ids(schedule, Op.REDUCE)


def test_a_tied_gradient_is_reduced_after_each_part() -> None:
    schedule, *_ = check(TIED, ranked(TIED, plan_with(TIED), 2, Sharing.SHARDED))
    assert [one for one in ids(schedule, Op.REDUCE) if one.startswith("reduce.0@")] == [
        "reduce.0@bwd.5",
        "reduce.0@bwd.0",
    ]
    assert "fetch.grad.0@bwd.0" in schedule.by_id


def test_an_update_on_the_gpu_leaves_time_for_the_reduction() -> None:
    """So that compute goes on meanwhile, as far as grad slots allow."""
    in_backward = plan_with(STACK, Tier.GPU, Tier.GPU, update=Update.IN_BACKWARD, spare=2)
    schedule, *_ = check(STACK, ranked(STACK, in_backward, 2, Sharing.SHARDED))
    update, backward = schedule.by_id["update.3"], schedule.by_id["bwd.3"]
    assert backward.tick < update.opens <= backward.tick + 2
    alone = lower(STACK, in_backward, Mode.TRAIN)
    assert alone.by_id["update.3"].opens == alone.by_id["bwd.3"].tick


def test_an_update_on_the_host_begins_when_its_gradient_is_there() -> None:
    """A ring of one buffer for each chunk of a block is emptied before the next block's gradients come."""
    plan = plan_with(STACK, update=Update.IN_BACKWARD, spare=0)
    plan = replace(plan, blocks=tuple(replace(block, parks=False) for block in plan.blocks))
    schedule, *_ = check(STACK, ranked(STACK, plan, 2, Sharing.SHARDED, num_buffers=2))
    homes = [one for one in schedule.actions if one.op is Op.WRITE_BACK]
    assert len(homes) == 9 and all(f"update.{one.chunk}" in homes[at + 2].after for at, one in enumerate(homes[:-2]))
    for home in homes:
        update = schedule.by_id[f"update.{home.chunk}"]
        assert update.lane is Lane.CPU and update.opens == home.opens


def test_a_slot_that_was_left_as_a_part_of_a_wide_one_is_entered_later() -> None:
    """The embedding is three slots wide and is gathered from the GPU; of what follows it in its slots, some is gathered
    from there too, and some is fetched on another lane, whose order says nothing."""
    wide = tuple(replace(spec, shape=(9000,)) if spec.name == "embed.weight" else spec for spec in stack(6).params)
    profile = replace(stack(6), params=wide)
    plan = plan_with(profile, slot_numel=3328, spare=0)
    blocks = (replace(b, params=Tier.GPU, states=Tier.GPU) if at < 4 else b for at, b in enumerate(plan.blocks))
    schedule, *_ = check(profile, ranked(profile, replace(plan, blocks=tuple(blocks)), 2, Sharing.SHARDED))
    evict = next(one for one in schedule.actions if one.op is Op.EVICT and one.chunk == 0)
    assert {one.op for one in schedule.actions if evict.id in one.after} == {Op.FETCH, Op.GATHER}


# Planted errors


def without(schedule: Schedule, gone: Action) -> Schedule:
    kept = (one for one in schedule.actions if one is not gone)
    actions = (replace(one, after=tuple(name for name in one.after if name != gone.id)) for one in kept)
    return replace(schedule, actions=tuple(actions))


def swapped(schedule: Schedule, one: Action, other: Action) -> Schedule:
    """On their lane: each where the other was."""
    places = {one.id: other, other.id: one}
    return replace(schedule, actions=tuple(places.get(action.id, action) for action in schedule.actions))


WAYS = {
    "streamed": plan_with(STACK),
    "streamed, in backward": plan_with(STACK, update=Update.IN_BACKWARD),
    "on the GPU": plan_with(STACK, Tier.GPU, Tier.GPU),
    "on the GPU, in backward": plan_with(STACK, Tier.GPU, Tier.GPU, update=Update.IN_BACKWARD),
    "parameters on the GPU": plan_with(STACK, Tier.GPU),
    "disk": plan_with(STACK, Tier.DISK, Tier.DISK),
}


@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("way", WAYS)
def test_no_collective_may_be_missing_or_wait_for_nothing(way: str, sharing: Sharing) -> None:
    plan = ranked(STACK, WAYS[way], 2, sharing)
    placement = Placement(plan)
    schedule = lower(STACK, plan, Mode.TRAIN, placement)
    verify(STACK, placement, schedule)
    collectives = [action for action in schedule.actions if action.lane in COLLECTIVES]
    assert collectives
    for action in collectives:
        with pytest.raises(InfeasiblePlan):
            verify(STACK, placement, without(schedule, action))
        for changes in ({"after": ()}, {"num_bytes": action.num_bytes + 512}, {"lane": Lane.D2H}):
            edited = replace(action, **changes)  # type: ignore[arg-type]
            mutant = replace(schedule, actions=tuple(edited if one is action else one for one in schedule.actions))
            if changes == {"after": ()}:  # a tick or its lane may order it all the same
                order = Precedence(mutant)
                if all(order.before(name, action.id) for name in action.after):
                    continue
            with pytest.raises(InfeasiblePlan):
                verify(STACK, placement, mutant)


@pytest.mark.parametrize("way", ["streamed", "on the GPU", "parameters on the GPU"])
def test_swapped_collectives_are_refused_or_wait_for_nobody(way: str) -> None:
    """Two that are neighbours on their lane may change places where neither is late for it; but all ranks must do it:
    one that does it alone meets others in the wrong one, which the witness sees."""
    plan = ranked(STACK, WAYS[way], 2, Sharing.SHARDED)
    placement = Placement(plan)
    schedule = lower(STACK, plan, Mode.TRAIN, placement)
    refused = 0
    for lane in COLLECTIVES:
        order = schedule.lane(lane)
        for one, other in pairwise(order):
            mutant = swapped(schedule, one, other)
            assert collectives_of(mutant) != collectives_of(schedule)
            try:
                verify(STACK, placement, mutant)
            except InfeasiblePlan:
                refused += 1
                continue
            with pytest.raises(AssertionError, match=r"different ones meet|all wait"):
                RandomRanks(plan, [schedule, mutant], 0).run()
    assert refused


@given(cases(disk=False))
@settings(max_examples=20, deadline=None)
def test_collectives_follow_from_plan_and_profile(case: tuple[ModelProfile, Plan]) -> None:
    """Which rank it is, how fast it is and what was lowered before do not come into it."""
    profile, plan = case
    first = [collectives_of(one) for one in lower_step(profile, plan)]
    lower_step(profile, replace(plan, gpu_limit_bytes=1, host_limit_bytes=2, explanation="another rank"))
    assert first == [collectives_of(one) for one in lower_step(profile, plan)]
    assert all(lane.is_in_order for lane in COLLECTIVES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": Tier.GPU}, "use sharing=params_replicated"),
        ({"compute": Tier.HOST}, "has a part of its table only"),
    ],
)
def test_plans_that_several_ranks_cannot_follow_are_refused(change: dict[str, Tier], message: str) -> None:
    plan = ranked(STACK, plan_with(STACK), 2, Sharing.SHARDED)
    blocks = (replace(plan.blocks[0], **change), *plan.blocks[1:])  # type: ignore[arg-type]
    with pytest.raises(InfeasiblePlan, match=message):
        check_plan(STACK, replace(plan, blocks=blocks))


@pytest.mark.parametrize(("ranks", "replicas"), [(0, 1), (3, 2), (2, 0), (10**6, 1)])
def test_groups_of_unequal_size_are_refused(ranks: int, replicas: int) -> None:
    with pytest.raises(InfeasiblePlan, match="ranks in"):
        check_plan(STACK, replace(plan_with(STACK), ranks=ranks, replicas=replicas))


def test_a_layout_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(InfeasiblePlan, match="chunk 0 of the plan's layout has"):
        check_plan(STACK, replace(ranked(STACK, plan_with(STACK), 4, Sharing.SHARDED), ranks=3))
