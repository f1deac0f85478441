"""Each planted error is caught, and named."""

from dataclasses import replace

import pytest

from hightide.ir.action import Mode, Op, Place
from hightide.ir.activation import Activation
from hightide.ir.plan import Update
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.layout import pack
from hightide.planner.lower import lower
from hightide.planner.predict.peaks import peaks
from hightide.planner.verify.check_plan import check_plan
from unit.planner.profiles import UNLIMITED, Sketch, build, call, param, plan_with, stack, verify_within

PROFILE = stack(4)
PLAN = plan_with(PROFILE, inputs=Tier.HOST, slot_numel=3200)
SCHEDULE = lower(PROFILE, PLAN, Mode.TRAIN)


def check(schedule, plan=PLAN, profile=PROFILE):
    verify_within(profile, plan, schedule, UNLIMITED, UNLIMITED)


def edit(name, schedule=SCHEDULE, **changes):
    assert name in schedule.by_id
    actions = tuple(replace(a, **changes) if a.id == name else a for a in schedule.actions)
    return replace(schedule, actions=actions)


def drop(name, schedule=SCHEDULE):
    assert name in schedule.by_id
    actions = [a for a in schedule.actions if a.id != name]
    return replace(schedule, actions=tuple(replace(a, after=tuple(i for i in a.after if i != name)) for a in actions))


def forget(waiter, awaited, schedule=SCHEDULE):
    after = schedule.by_id[waiter].after
    assert awaited in after
    return edit(waiter, schedule, after=tuple(name for name in after if name != awaited))


def first(op, kind=None, opens=-1):
    return next(a for a in SCHEDULE.actions if a.op is op and (kind is None or a.kind is kind) and a.opens >= opens)


def test_the_schedule_itself_is_right():
    check(SCHEDULE)


def test_a_missing_fetch():
    with pytest.raises(InfeasiblePlan, match=r"fwd\.2 uses chunk 2, which is not in a slot"):
        check(drop("fetch.param.2@fwd.2"))


def test_a_tick_that_does_not_wait_for_its_fetch():
    with pytest.raises(InfeasiblePlan, match=r"fetch\.param\.2@fwd\.2 may still be running"):
        check(forget("fwd.2", "fetch.param.2@fwd.2"))


def test_a_fetch_into_an_occupied_slot():
    fetch = SCHEDULE.by_id["fetch.param.1@fwd.1"]
    with pytest.raises(InfeasiblePlan, match=r"slot 0, which chunk 0 occupies"):
        check(edit(fetch.id, target=Place(Tier.GPU, 0)))


def test_a_fetch_past_the_last_slot():
    with pytest.raises(InfeasiblePlan, match=r"there are 2 slots"):
        check(edit("fetch.param.1@fwd.1", target=Place(Tier.GPU, PLAN.num_slots)))


def test_a_missing_eviction():
    evict = first(Op.EVICT)
    with pytest.raises(InfeasiblePlan, match=r"occupies"):
        check(drop(evict.id))


def test_an_eviction_before_the_last_use():
    evict = SCHEDULE.by_id["evict.param.1@fwd.3"]
    actions = [a for a in SCHEDULE.actions if a.id != evict.id]
    place = next(i for i, a in enumerate(actions) if a.id == "fwd.1")
    actions.insert(place, replace(evict, opens=0))
    with pytest.raises(InfeasiblePlan, match=r"chunk 1"):
        check(replace(SCHEDULE, actions=tuple(actions)))


def test_a_fetch_that_ignores_the_previous_update():
    with pytest.raises(InfeasiblePlan, match=r"fetches chunk 1 before it is updated .*previous update\.1"):
        check(edit("fetch.param.1@fwd.1", after_prev=()))


def test_a_fetch_that_does_not_wait_for_the_eviction_is_caught_though_listed_right():
    fetch = SCHEDULE.by_id["fetch.param.2@fwd.2"]
    with pytest.raises(InfeasiblePlan, match=r"before chunk 0 has left it"):
        check(edit(fetch.id, after=(), opens=-1))


def test_a_gradient_never_written_back():
    name = [a.id for a in SCHEDULE.actions if a.op is Op.WRITE_BACK][-1]
    with pytest.raises(InfeasiblePlan, match=r"not written back|never written back"):
        check(drop(name))


def test_a_grad_slot_reused_before_the_gradient_left():
    clear = next(a for a in SCHEDULE.actions if a.op is Op.CLEAR and a.after)
    with pytest.raises(InfeasiblePlan, match=r"before chunk .* has left it"):
        check(forget(clear.id, clear.after[0]))


def test_a_write_back_that_does_not_wait_for_its_tick():
    write_back = first(Op.WRITE_BACK)
    with pytest.raises(InfeasiblePlan, match=r"before it is summed"):
        check(edit(write_back.id, after=(), opens=-1))


def test_an_update_before_its_gradient_is_at_home():
    update = SCHEDULE.lane(Lane.CPU)[0]
    home = next(name for name in update.after if name.startswith("write_back"))
    with pytest.raises(InfeasiblePlan, match=r"before it is at home"):
        check(forget(update.id, home))


def test_an_update_before_step():
    update = SCHEDULE.lane(Lane.CPU)[0]
    home = next(name for name in update.after if name.startswith("write_back"))
    with pytest.raises(InfeasiblePlan, match=r"before step\(\)"):
        check(edit(update.id, after=(home,), opens=SCHEDULE.by_id[home].opens))


def test_a_missing_update_and_a_missing_clear():
    with pytest.raises(InfeasiblePlan, match=r"\[3\] .* never updated"):
        check(drop("update.3"))
    with pytest.raises(InfeasiblePlan, match=r"not in a grad slot"):
        check(drop(first(Op.CLEAR).id))


def test_a_tied_gradient_that_is_cleared_again_or_fetched_too_early():
    profile = stack(3, tied=True)
    plan = plan_with(profile)
    schedule = lower(profile, plan, Mode.TRAIN)
    fetch = next(a for a in schedule.actions if a.op is Op.FETCH and a.kind is ChunkKind.GRAD)
    num_bytes = plan.layout.chunks[fetch.chunk].grad_bytes
    clear = replace(fetch, op=Op.CLEAR, lane=Lane.COMPUTE, source=None, num_bytes=num_bytes)
    actions = [action for action in schedule.actions if action is not fetch]
    actions.insert(actions.index(schedule.ticks[fetch.tick]), clear)  # where such an action runs
    with pytest.raises(InfeasiblePlan, match=r"holds sums"):
        check(replace(schedule, actions=tuple(actions)), plan, profile)
    own = next(name for name in fetch.after if name.startswith(f"write_back.{fetch.chunk}@"))
    early = edit(fetch.id, schedule, after=(), opens=schedule.by_id[own].opens - 1)
    with pytest.raises(InfeasiblePlan, match=r"at home|has left it"):
        check(early, plan, profile)


def test_inputs_that_do_not_come_back():
    with pytest.raises(InfeasiblePlan, match=r"bwd\.2 runs before its inputs are back"):
        check(drop("unstash.2"))
    with pytest.raises(InfeasiblePlan, match=r"unstash\.6 moves the inputs of call 6 before"):
        check(edit("unstash.6", after=(), opens=-1))


def test_a_circle_of_waiting_is_found():
    fetch = SCHEDULE.by_id["fetch.param.2@fwd.2"]
    with pytest.raises(InfeasiblePlan, match=r"wait for each other"):
        check(edit(fetch.id, after=(*fetch.after, "fwd.3")))
    with pytest.raises(InfeasiblePlan, match=r"wait for each other"):
        check(edit(fetch.id, opens=4))  # issued after the tick that waits for it


def test_two_fetches_swapped_on_their_lane_lock_it_up():
    actions = list(SCHEDULE.actions)
    fetches = [i for i, a in enumerate(actions) if a.lane is Lane.H2D]
    actions[fetches[2]], actions[fetches[3]] = actions[fetches[3]], actions[fetches[2]]
    with pytest.raises(InfeasiblePlan):
        check(replace(SCHEDULE, actions=tuple(actions)))


def test_unknown_and_repeated_ids():
    with pytest.raises(InfeasiblePlan, match=r"fwd\.1 waits for nobody"):
        check(edit("fwd.1", after=("nobody",)))
    with pytest.raises(InfeasiblePlan, match=r"two actions"):
        check(replace(SCHEDULE, actions=(*SCHEDULE.actions, SCHEDULE.actions[0])))


def test_ticks_of_another_model():
    with pytest.raises(InfeasiblePlan, match=r"do not follow the model's 7 calls"):
        check(edit("bwd.3", call=2))


def test_capacity_names_moment_tier_and_bytes():
    peak = peaks(SCHEDULE)
    verify_within(PROFILE, PLAN, SCHEDULE, peak.gpu_peak_bytes, peak.host_peak_bytes)
    with pytest.raises(InfeasiblePlan, match=rf"{peak.gpu_peak_bytes} bytes .* gpu .*: 1 bytes too many") as caught:
        verify_within(PROFILE, PLAN, SCHEDULE, peak.gpu_peak_bytes - 1, UNLIMITED)
    error = caught.value
    assert (error.moment, error.tier, error.num_bytes) == (peak.gpu_peak_at, Tier.GPU, peak.gpu_peak_bytes)
    with pytest.raises(InfeasiblePlan, match=r"host"):
        verify_within(PROFILE, PLAN, SCHEDULE, UNLIMITED, peak.host_peak_bytes - 1)


def test_new_values_of_persistent_parameters_must_arrive():
    plan = plan_with(PROFILE, params=Tier.GPU)
    schedule = lower(PROFILE, plan, Mode.EVAL)
    check(schedule, plan)
    with pytest.raises(InfeasiblePlan, match=r"new values"):
        check(drop("fetch.param.2@fwd.2", schedule), plan)


def test_a_gradient_on_the_gpu_must_be_cleared():
    plan = plan_with(PROFILE, params=Tier.GPU, states=Tier.GPU)
    schedule = lower(PROFILE, plan, Mode.TRAIN)
    with pytest.raises(InfeasiblePlan, match=r"was not cleared"):
        check(drop("clear.2@bwd.2", schedule), plan)


def test_every_single_dependency_between_lanes_matters():
    """No edge of a lowered schedule is there for nothing: without it verify must object, or the order or peak must
    still be enforced by another way. Counted, so that a verifier that accepts everything cannot pass."""
    objections = 0
    for action in SCHEDULE.actions:
        for name in action.after:
            try:
                check(forget(action.id, name))
            except InfeasiblePlan:
                objections += 1
    assert objections > 20


def with_block(plan, index, **changes):
    blocks = tuple(replace(b, **changes) if i == index else b for i, b in enumerate(plan.blocks))
    return replace(plan, blocks=blocks)


def test_a_plan_for_another_model_names_both_fingerprints_and_the_remedy():
    with pytest.raises(ValueError, match=r"another model.*feed.*0123456789abcdef.*hightide\.plan"):
        check_plan(PROFILE, replace(PLAN, fingerprint="feed"))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, version=99), "version 99"),
        (replace(PLAN, blocks=PLAN.blocks[1:]), "lists 6 blocks, the model has 7"),
        (with_block(PLAN, 2, name="other"), "'layers.1' the plan has 'other'"),
        (with_block(PLAN, 2, states=Tier.GPU), "'layers.1' has states on the gpu but params on the host"),
        (with_block(PLAN, 2, params=Tier.DISK), "disk"),
        (with_block(PLAN, 2, activation=Activation.KEEP), "use inputs=gpu"),
        (replace(PLAN, micro_batch=0), "micro_batch is 0; it must be from 1 to num_samples=6"),
        (replace(PLAN, micro_batch=7), "micro_batch is 7"),
        (replace(PLAN, num_samples=5), "up to 5 samples, this batch has 6"),
        (replace(PLAN, num_slots=0), "has 0 slots .* needs 1 and 1"),
        (replace(PLAN, num_grad_slots=0), "0 grad slots"),
        (replace(PLAN, loss_tile_tokens=0), "loss_tile_tokens is 0"),
        (replace(PLAN, num_state_buffers=-3), r"num_state_buffers is -3; it must be 0 \(nothing\) or more"),
        (replace(PLAN, layout=replace(PLAN.layout, chunks=PLAN.layout.chunks[1:])), "each parameter"),
    ],
)
def test_a_bad_edit_of_a_plan_is_refused(plan, message):
    check_plan(PROFILE, PLAN)
    with pytest.raises(InfeasiblePlan, match=message):
        check_plan(PROFILE, plan)


def test_states_on_the_disk_of_an_optimizer_that_keeps_none_are_refused():
    """SGD without momentum: in backward nothing of an update is there."""
    stateless = replace(PLAN, layout=pack(PROFILE, 3200, states=()), update=Update.IN_BACKWARD, num_grad_buffers=1)
    check_plan(PROFILE, stateless)
    with pytest.raises(InfeasiblePlan, match=r"'layers\.1' has states on the disk.*0 bytes there.*use states=host"):
        check_plan(PROFILE, with_block(stateless, 2, states=Tier.DISK))


def test_loose_parameters_cannot_leave_the_gpu():
    profile = build([param("a", 9), param("l", 9)], [Sketch("x", ["a"]), Sketch("", ["l"], loose=True)], [call(0)])
    with pytest.raises(InfeasiblePlan, match=r"outside of blocks"):
        check_plan(profile, with_block(plan_with(profile), 1, states=Tier.HOST))
