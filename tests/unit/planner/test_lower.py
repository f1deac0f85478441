import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hightide.ir.action import Mode, Op, Place
from hightide.ir.activation import Activation
from hightide.ir.plan import Update
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.peaks import peaks
from hightide.planner.verify.check_plan import check_plan
from unit.planner.profiles import (
    UNLIMITED,
    Sketch,
    build,
    call,
    param,
    plan_with,
    plans,
    profiles,
    stack,
    verify_within,
)
from unit.planner.random_lanes import RandomLanes


def of(schedule, op):
    return [action for action in schedule.actions if action.op is op]


def test_ticks_are_forward_backward_step():
    schedule = lower(stack(1), plan_with(stack(1)), Mode.TRAIN)
    assert [tick.id for tick in schedule.ticks] == [
        *("fwd.0", "fwd.1", "fwd.2", "fwd.3"),
        *("bwd.3", "bwd.2", "bwd.1", "bwd.0"),
        "step",
    ]
    assert [tick.tick for tick in schedule.ticks] == list(range(9))


def test_calls_without_backward_have_no_backward_tick():
    profile = build([param("a", 10, trainable=False)], [Sketch("x", ["a"])], [call(0, needs_backward=False), call(0)])
    schedule = lower(profile, plan_with(profile), Mode.TRAIN)
    assert [tick.id for tick in schedule.ticks] == ["fwd.0", "fwd.1", "bwd.1", "step"]


def test_evaluation_moves_parameters_only():
    schedule = lower(stack(), plan_with(stack()), Mode.EVAL)
    assert {action.op for action in schedule.actions} == {Op.FORWARD, Op.FETCH, Op.EVICT}


def test_the_first_fetches_open_at_once_and_later_ones_when_their_slot_is_left():
    profile = stack(4)
    schedule = lower(profile, plan_with(profile, slot_numel=3200), Mode.TRAIN)
    fetches = [action for action in of(schedule, Op.FETCH) if action.kind is ChunkKind.PARAM]
    assert [fetch.id for fetch in fetches[:3]] == ["fetch.param.0@fwd.0", "fetch.param.1@fwd.1", "fetch.param.2@fwd.2"]
    assert [fetch.opens for fetch in fetches[:3]] == [-1, -1, 0]
    assert fetches[2].after == ("evict.param.0@fwd.2",) and fetches[2].target == Place(Tier.GPU, 0)
    assert all(f"update.{fetch.chunk}" in fetch.after_prev for fetch in fetches)


def test_backward_starts_with_what_forward_left_in_the_slots():
    profile = stack(4)
    schedule = lower(profile, plan_with(profile, spare=2), Mode.TRAIN)
    assert not [name for name in schedule.by_id["bwd.6"].after if name.startswith("fetch.param")]
    assert not [name for name in schedule.by_id["bwd.5"].after if name.startswith("fetch.param")]


def test_resident_parameters_updated_on_the_host_are_fetched_once_a_pass():
    profile = stack(2)
    plan = plan_with(profile, params=Tier.GPU)
    for mode in (Mode.TRAIN, Mode.EVAL):
        schedule = lower(profile, plan, mode)
        fetches = [action for action in of(schedule, Op.FETCH) if action.kind is ChunkKind.PARAM]
        assert [fetch.target for fetch in fetches] == [Place(Tier.GPU)] * len(plan.layout.chunks)
        assert {fetch.opens for fetch in fetches} == {-1} and not of(schedule, Op.EVICT)


def test_everything_on_the_gpu_moves_nothing():
    profile = stack(2)
    schedule = lower(profile, plan_with(profile, params=Tier.GPU, states=Tier.GPU), Mode.TRAIN)
    assert {action.lane for action in schedule.actions} == {Lane.COMPUTE}
    assert all(action.tick == schedule.by_id["step"].tick for action in of(schedule, Op.UPDATE))


def test_a_tied_gradient_is_cleared_once_then_continued():
    profile = stack(2, tied=True)
    schedule = lower(profile, plan_with(profile), Mode.TRAIN)
    tied = next(chunk.index for chunk in plan_with(profile).layout.chunks if len(chunk.users) == 2)
    mine = [a.id for a in schedule.actions if a.chunk == tied and a.op in (Op.CLEAR, Op.WRITE_BACK)]
    assert mine == [f"clear.{tied}@bwd.4", f"write_back.{tied}@bwd.4", f"write_back.{tied}@bwd.0"]
    assert f"write_back.{tied}@bwd.4" in schedule.by_id[f"fetch.grad.{tied}@bwd.0"].after
    assert schedule.by_id[f"update.{tied}"].after == ("step", f"write_back.{tied}@bwd.0")


def test_a_block_called_twice_in_a_row_keeps_its_gradient_in_the_slot():
    profile = build([param("a", 10)], [Sketch("x", ["a"])], [call(0), call(0), call(0)])
    schedule = lower(profile, plan_with(profile), Mode.TRAIN)
    assert [action.id for action in of(schedule, Op.CLEAR)] == ["clear.0@bwd.2"]
    assert [action.id for action in of(schedule, Op.WRITE_BACK)] == ["write_back.0@bwd.0"]


def test_accumulation_fetches_every_gradient_and_clears_none():
    profile = stack(2)
    schedule = lower(profile, plan_with(profile), Mode.ACCUMULATE)
    assert not of(schedule, Op.CLEAR)
    fetches = [action for action in of(schedule, Op.FETCH) if action.kind is ChunkKind.GRAD]
    assert len(fetches) == len(of(schedule, Op.WRITE_BACK)) == 5
    assert all(any(name.startswith(f"write_back.{fetch.chunk}@") for name in fetch.after_prev) for fetch in fetches)


def test_accumulation_and_update_in_backward_exclude_each_other():
    with pytest.raises(ValueError, match=r"deferred"):
        lower(stack(), plan_with(stack(), update=Update.IN_BACKWARD), Mode.ACCUMULATE)


def test_a_grad_slot_is_cleared_only_after_its_last_gradient_left():
    profile = stack(4)
    schedule = lower(profile, plan_with(profile, spare=0), Mode.TRAIN)
    clears = of(schedule, Op.CLEAR)
    assert all(len(clear.after) >= 1 and clear.after[0].startswith("write_back.") for clear in clears[2:])


def test_updates_come_due_in_the_order_of_the_next_forward():
    profile = stack(3)
    schedule = lower(profile, plan_with(profile), Mode.TRAIN)
    updates = schedule.lane(Lane.CPU)
    assert [update.tick - len(schedule.ticks) for update in updates] == [0, 1, 2, 3, 4, 5]
    assert all("step" in update.after and update.opens == schedule.by_id["step"].tick for update in updates)


def test_updates_in_backward_follow_their_gradient():
    profile = stack(3)
    schedule = lower(profile, plan_with(profile, update=Update.IN_BACKWARD), Mode.TRAIN)
    for update in schedule.lane(Lane.CPU):
        (home,) = update.after
        assert schedule.by_id[home].op is Op.WRITE_BACK and update.opens == schedule.by_id[home].opens
    gpu = plan_with(profile, params=Tier.GPU, states=Tier.GPU, update=Update.IN_BACKWARD)
    schedule = lower(profile, gpu, Mode.TRAIN)
    places = {action.id: place for place, action in enumerate(schedule.actions)}
    updates = of(schedule, Op.UPDATE)
    assert updates and all(a.opens == schedule.by_id[a.after[0]].tick and a.runs_when_open for a in updates)
    for update in updates:  # nothing comes between a block and its update
        assert places[update.id] - places[update.after[0]] == 1


def test_chunks_without_a_gradient_are_not_updated():
    specs = [param("a", 10), param("frozen", 10, trainable=False), param("unused", 10)]
    sketches = [Sketch("x", ["a"]), Sketch("y", ["frozen"]), Sketch("z", ["unused"])]
    profile = build(specs, sketches, [call(0), call(1)])
    schedule = lower(profile, plan_with(profile), Mode.TRAIN)
    assert [action.id for action in of(schedule, Op.UPDATE)] == ["update.0"]


def test_the_loose_block_is_updated_at_step_in_both_timings():
    profile = build([param("a", 10), param("l", 10)], [Sketch("x", ["a"]), Sketch("", ["l"], loose=True)], [call(0)])
    for update in Update:
        schedule = lower(profile, plan_with(profile, update=update), Mode.TRAIN)
        action = schedule.by_id["update.1"]
        assert (action.lane, action.tick, action.after) == (Lane.COMPUTE, schedule.by_id["step"].tick, ("bwd.0",))


def test_stashed_inputs_leave_within_two_ticks_and_return_two_ahead():
    profile = stack(4)
    schedule = lower(profile, plan_with(profile, inputs=Tier.HOST), Mode.TRAIN)
    assert "stash.1" in schedule.by_id["fwd.3"].after and schedule.by_id["stash.1"].opens == 1
    unstash = schedule.by_id["unstash.1"]
    assert unstash.after == ("stash.1",) and unstash.opens == unstash.tick - 2
    assert "unstash.1" in schedule.by_id["bwd.1"].after
    assert schedule.by_id["unstash.6"].opens == 6  # the last forward tick


def test_all_memory_taken_in_a_pass_is_given_back():
    for activation, inputs in [(Activation.KEEP, Tier.GPU), (Activation.RECOMPUTE, Tier.HOST)]:
        plan = plan_with(stack(), activation=activation, inputs=inputs)
        actions = lower(stack(), plan, Mode.TRAIN).actions
        assert sum(a.gpu_takes for a in actions) == sum(a.gpu_gives for a in actions) > 0
        assert sum(a.host_takes for a in actions) == sum(a.host_gives for a in actions)


def test_what_is_kept_counts_for_all_micro_batches_with_an_odd_last_one():
    profile = stack(1, num_samples=5)
    lean = lower(profile, plan_with(profile, micro_batch=2), Mode.TRAIN)
    kept = lower(profile, plan_with(profile, micro_batch=2, activation=Activation.KEEP), Mode.TRAIN)
    extra = kept.by_id["fwd.1"].gpu_takes - lean.by_id["fwd.1"].gpu_takes
    assert extra == 3 * 32 + 5 * (5 * 4 * 64)  # fixed bytes of three graphs, and five samples


def test_the_base_holds_slots_persistent_chunks_batch_and_buffers():
    profile = stack(2)
    streamed = plan_with(profile, slot_numel=3200)
    schedule = lower(profile, streamed, Mode.TRAIN)
    assert schedule.gpu_base_bytes == (streamed.num_slots + streamed.num_grad_slots) * 3200 * 4 + 512 + 256
    chunks = streamed.layout.chunks
    assert schedule.host_base_bytes == sum(chunk.numel * 4 * 4 for chunk in chunks)  # param, grad, two moments
    whole = plan_with(profile, params=Tier.GPU, states=Tier.GPU, spare=0)
    assert lower(profile, whole, Mode.TRAIN).host_base_bytes == 0
    assert lower(profile, whole, Mode.TRAIN).gpu_base_bytes == schedule.host_base_bytes + 512 + 256


@st.composite
def cases(draw):
    profile = draw(profiles())
    update = draw(st.sampled_from(list(Update)))
    modes = [Mode.TRAIN, Mode.EVAL] + ([Mode.ACCUMULATE] if update is Update.DEFERRED else [])
    plan = draw(plans(profile, update, disk=draw(st.booleans())))
    return profile, plan, draw(st.sampled_from(modes)), draw(st.integers(0, 2**16))


def _check(case) -> None:
    profile, plan, mode, seed = case
    check_plan(profile, plan)
    schedule = lower(profile, plan, mode)
    verify_within(profile, plan, schedule, UNLIMITED, UNLIMITED)
    run = RandomLanes(plan, schedule, seed).run()
    forecast = peaks(schedule)
    assert run.gpu_peak_bytes <= forecast.gpu_peak_bytes and run.host_peak_bytes <= forecast.host_peak_bytes
    for lane in (Lane.H2D, Lane.D2H):
        opens = [action.opens for action in schedule.lane(lane)]
        assert opens == sorted(opens)


@given(cases())
@settings(max_examples=50, deadline=None)
def test_any_plan_lowers_to_a_schedule_that_is_right_at_any_speed_of_the_lanes(case):
    _check(case)


@pytest.mark.long
@pytest.mark.timeout(1800)
@given(cases())
@settings(max_examples=2000, deadline=None, derandomize=False, print_blob=True)
def test_any_plan_lowers_to_a_right_schedule_at_length(case):
    _check(case)


def test_fetches_have_the_right_bytes():
    profile = stack(2, dtype="bfloat16")
    plan = plan_with(profile)
    schedule = lower(profile, plan, Mode.TRAIN)
    for action in of(schedule, Op.FETCH):
        chunk = plan.layout.chunks[action.chunk]
        assert Placement(plan).chunks[chunk.index].is_streamed and action.num_bytes == chunk.numel * 2
    assert all(a.num_bytes == plan.layout.chunks[a.chunk].trainable_numel * 4 for a in of(schedule, Op.WRITE_BACK))
