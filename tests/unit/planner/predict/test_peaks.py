from dataclasses import replace

from hightide.ir.action import Action, Mode, Op, Schedule
from hightide.ir.activation import Activation
from hightide.ir.tier import Lane, Tier
from hightide.planner.lower import lower
from hightide.planner.predict.peaks import Peaks, peaks
from unit.planner.profiles import plan_with, stack


def tick(index, name, **effects):
    op = Op.STEP if name == "step" else Op.FORWARD
    return Action(name, op, Lane.COMPUTE, tick=index, opens=index - 1, call=index, **effects)


def test_takes_at_the_start_transient_during_gives_at_the_end():
    actions = (
        tick(0, "a", gpu_takes=10, gpu_transient=5, gpu_gives=4),
        tick(1, "b", gpu_takes=6, gpu_transient=1, gpu_gives=6),
    )
    assert peaks(Schedule(Mode.EVAL, 100, 7, actions)) == Peaks(115, "a", 7, "")


def test_a_transfer_gives_only_when_a_tick_has_waited_for_it():
    stash = Action("s", Op.STASH, Lane.D2H, tick=2, opens=0, after=("a",), gpu_gives=10, host_takes=10)
    calm = tick(1, "b", gpu_takes=1)
    waits = tick(2, "c", gpu_takes=10, after=("s",))
    careless = tick(2, "c", gpu_takes=10)
    first = tick(0, "a", gpu_takes=10)
    assert peaks(Schedule(Mode.EVAL, 0, 0, (first, stash, calm, waits))) == Peaks(11, "b", 10, "s")
    assert peaks(Schedule(Mode.EVAL, 0, 0, (first, stash, calm, careless))) == Peaks(21, "c", 10, "s")


def test_what_is_parked_is_there_until_the_next_pass_uses_its_chunk():
    """An input comes before that, or only then."""
    parked = Action("w", Op.WRITE_BACK, Lane.D2H, tick=2, opens=2, host_takes=50)
    update = Action("u", Op.UPDATE, Lane.CPU, tick=3 + 1, opens=2, after=("w",), host_gives=50)
    back = Action("back", Op.UNSTASH, Lane.H2D, tick=2, opens=1, after=("s",), host_gives=100)
    ticks = [tick(0, "a"), tick(1, "b"), tick(2, "step", after=("back",))]
    for opens, most in ((0, 150), (1, 100)):
        stash = Action("s", Op.STASH, Lane.D2H, tick=2, opens=opens, host_takes=100)
        order = [*ticks[: opens + 1], stash, *ticks[opens + 1 : 2], back, ticks[2], parked, update]
        assert peaks(Schedule(Mode.TRAIN, 0, 0, tuple(order))).host_peak_bytes == most


def test_keeping_costs_gpu_and_stashing_saves_it():
    profile = stack(8)
    lean = peaks(lower(profile, plan_with(profile), Mode.TRAIN))
    keep = peaks(lower(profile, plan_with(profile, activation=Activation.KEEP), Mode.TRAIN))
    stash = peaks(lower(profile, plan_with(profile, inputs=Tier.HOST), Mode.TRAIN))
    assert stash.gpu_peak_bytes < lean.gpu_peak_bytes < keep.gpu_peak_bytes
    assert stash.host_peak_bytes > lean.host_peak_bytes


def test_a_smaller_micro_batch_has_a_smaller_peak():
    profile = stack(4)
    blocks = tuple(replace(block, lazy_head=False) for block in profile.blocks)
    profile = replace(profile, blocks=blocks, vocabulary=0)  # the fused loss has tiles of its own
    sizes = [peaks(lower(profile, plan_with(profile, micro_batch=m), Mode.TRAIN)).gpu_peak_bytes for m in (1, 2, 3, 6)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
