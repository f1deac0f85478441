"""Seconds of actions, from costs; costs, from operations; the time of a step, from both."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hightide.ir.action import Action, Mode, Op
from hightide.ir.activation import Activation
from hightide.ir.block import Affine, ModelProfile, Work
from hightide.ir.costs import CallCost, CallPeaks, Costs, Curve, LossCost, Point
from hightide.ir.machine import SIMULATED, Gpu, Machine, MatmulRates
from hightide.ir.plan import GradientDtype, Plan, Update
from hightide.ir.tier import Lane, Tier
from hightide.planner.lookup import SUM_PASSES
from hightide.planner.lower import lower
from hightide.planner.placement import Placement
from hightide.planner.predict.bounds import least_step_s
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.peaks import (
    HOLES_SHARE,
    NUM_STASH_HOLES,
    PAGE_BYTES,
    WORKSPACE_BYTES,
    peaks,
    reserved_bytes,
)
from hightide.planner.predict.step_seconds import GATHER_BYTES_PER_S, ISSUE_FACTOR, seconds_of, with_peaks
from hightide.planner.problem import Problem, Terms
from unit.planner.predict.test_simulator import machine
from unit.planner.profiles import forecast_of, looked_up, plan_with, stack, with_tables


def with_gpu(flop_per_s: float, memory_bytes_per_s: float) -> Machine:
    rates = MatmulRates(bfloat16=2 * flop_per_s, float16=2 * flop_per_s, float32=flop_per_s, tf32=None)
    return replace(machine(alone=1e6, shared=0.7), gpu=Gpu("test", 2**30, memory_bytes_per_s, rates))


GPU = with_gpu(1e9, 1e9)


def curve(**values: float) -> Curve:
    return Curve(tuple(Point(int(size[1:]), value) for size, value in values.items()))


LAYER = CallCost(curve(n1=1.0, n4=2.5), curve(n1=1.2, n4=2.8), curve(n1=0.5, n4=2.0), curve(n1=2.0, n4=5.0))
OTHER = CallCost(curve(n6=0.25), curve(n6=0.25), Curve(()), curve(n6=0.5))
NO_PEAKS = CallPeaks(Curve(()), Curve(()), Curve(()))
LOSS = LossCost(24, 3.0, 4.0, 1.0)
COSTS = Costs("test", stack().fingerprint, (OTHER, LAYER, OTHER, OTHER), LOSS, 1e6, 5e5, glue_s=0.125)


def seconds(profile: ModelProfile, plan: Plan, costs: Costs = COSTS) -> dict[str, float]:
    of = seconds_of(profile, plan, costs)
    return {action.id: of(action) for action in lower(profile, plan, Mode.TRAIN).lane(Lane.COMPUTE)}


def test_micro_batches_run_one_after_the_other_and_are_gathered() -> None:
    profile = stack()
    plan = replace(plan_with(profile, micro_batch=4, update=Update.IN_BACKWARD), num_samples=6)
    found = seconds(profile, plan)
    gathered = 2 * profile.calls[1].outputs.at(6) / 1e6
    assert found["fwd.1"] == pytest.approx(2.5 + 1.5 + gathered)
    assert found["bwd.1"] == pytest.approx((2.0 + 5.0) + (1.0 + 3.0) + gathered)  # recomputed
    assert found["fwd.0"] == pytest.approx(0.25)  # unsplit
    assert found["step"] == 0.125


def test_a_kept_block_does_not_recompute() -> None:
    profile = stack()
    plan = plan_with(profile, micro_batch=6, update=Update.IN_BACKWARD, activation=Activation.KEEP)
    found = seconds(profile, plan)
    assert found["fwd.1"] == pytest.approx(2.8 * 6 / 4)
    assert found["bwd.1"] == pytest.approx(5.0 * 6 / 4)


def test_blocks_take_as_much_longer_as_they_did_under_load_and_nothing_else_does() -> None:
    profile = stack()
    plan = plan_with(profile, micro_batch=6, update=Update.IN_BACKWARD)
    timed, loaded = seconds(profile, plan), seconds(profile, plan, replace(COSTS, load_factor=1.5))
    blocks = {name for name in timed if name.startswith(("fwd", "bwd"))}
    assert blocks and all(loaded[name] == pytest.approx(1.5 * timed[name]) for name in blocks)
    assert all(loaded[name] == timed[name] for name in timed.keys() - blocks)


def test_the_loss_goes_by_tiles_and_kept_logits_are_not_projected_again() -> None:
    profile = stack()
    head = len(profile.calls) - 1
    plan = plan_with(profile, update=Update.IN_BACKWARD)  # 6 samples of 8 tokens: two tiles of 24
    found, kept = seconds(profile, plan), seconds(profile, replace(plan, loss_kept_tokens=24))
    assert found[f"fwd.{head}"] == kept[f"fwd.{head}"] == pytest.approx(6.0)
    assert found[f"bwd.{head}"] == pytest.approx(2 * (4.0 + 1.0))
    assert kept[f"bwd.{head}"] == pytest.approx(2 * 4.0 + 1.0)


def test_gradients_are_cleared_measured_and_rounded() -> None:
    profile = stack(dtype="bfloat16")
    plan = plan_with(profile, micro_batch=6, update=Update.IN_BACKWARD)
    numel = plan.layout.chunks[1].trainable_numel
    plain = seconds(profile, plan)
    assert plain["clear.1@bwd.1"] == pytest.approx(4 * numel / 1e6)
    deferred = seconds(profile, replace(plan, update=Update.DEFERRED))
    assert deferred["bwd.1"] - plain["bwd.1"] == pytest.approx(4 * numel / 1e6)  # norms
    leaving = seconds(profile, replace(plan, gradients=GradientDtype.PARAM))
    assert leaving["bwd.1"] - plain["bwd.1"] == pytest.approx(6 * numel / 1e6)
    whole = plan_with(profile, Tier.GPU, Tier.GPU, micro_batch=6, update=Update.IN_BACKWARD)
    staying = seconds(profile, replace(whole, gradients=GradientDtype.PARAM))
    assert staying["bwd.1"] - plain["bwd.1"] == pytest.approx(12 * numel / 1e6)
    assert staying["update.1"] == pytest.approx((4 + 2 + 10) * numel / 5e5)  # of the master only what bf16 lacks


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            replace(COSTS, fingerprint="feed"),
            "of another model: they have the fingerprint feed, the model has 0123.*again",
        ),
        (replace(COSTS, calls=(OTHER,)), "costs of 1 kinds of calls, but the model has 4.*again"),
        (replace(COSTS, calls=(*COSTS.calls, OTHER)), "costs of 5 kinds of calls, but the model has 4.*again"),
        (replace(COSTS, peaks=(NO_PEAKS,)), "peaks of 1 kinds of calls, but the model has 4.*again"),
        (replace(COSTS, loss=None), "know no loss, but the head of this model is fused with one.*again"),
    ],
)
def test_costs_of_another_model_are_refused(costs: Costs, message: str) -> None:
    profile = stack()
    plan = plan_with(profile)
    with pytest.raises(ValueError, match=message):
        seconds_of(profile, plan, costs)
    with pytest.raises(ValueError, match=message):
        forecast_of(profile, plan, costs, machine())


def test_only_the_compute_lane_has_seconds() -> None:
    with pytest.raises(AssertionError, match="of the lane h2d"):
        seconds_of(stack(), plan_with(stack()), COSTS)(Action("fetch", Op.FETCH, Lane.H2D, tick=0))


def test_measured_bytes_take_the_place_of_forecast_ones() -> None:
    profile = stack()
    measured = CallPeaks(curve(n1=20, n4=60, n6=100), curve(n1=3, n6=13), curve(n6=60))
    layer = with_peaks(profile, replace(COSTS, peaks=(NO_PEAKS, measured, NO_PEAKS, NO_PEAKS))).calls[1]
    assert (layer.forward_peak.at(1), layer.forward_peak.at(6)) == (20, 100)
    assert layer.forward_peak.at(4) >= 60, "a peak is convex"
    assert (layer.kept.at(1), layer.kept.at(6)) == (3, 13)
    assert layer.backward_peak == Affine(0, 10)
    assert with_peaks(profile, COSTS) is profile


def test_what_lasts_is_measured_with_what_is_kept_and_counted_once() -> None:
    """By a graph that holds all of it, or none: compiled blocks may not even make it."""
    profile = stack()
    calls = tuple(replace(call, lasting=Affine(2, 1)) for call in profile.calls)
    for kept, left in ((curve(n1=13, n6=38), (10, 30)), (curve(n1=1, n6=6), (0, 0))):
        measured = CallPeaks(curve(n1=20, n6=100), kept, curve(n6=60))
        costs = replace(COSTS, peaks=(NO_PEAKS, measured, NO_PEAKS, NO_PEAKS))
        layer = with_peaks(replace(profile, calls=calls), costs).calls[1]
        assert (layer.kept.at(1), layer.kept.at(6)) == left and layer.lasting == Affine(2, 1)


def test_a_gpu_reserves_more_than_tensors_need() -> None:
    profile = stack()
    fixed = WORKSPACE_BYTES + 2 * PAGE_BYTES
    for inputs in (Tier.GPU, Tier.HOST):
        schedule = lower(profile, plan_with(profile, inputs=inputs), Mode.TRAIN)
        peak = peaks(schedule).gpu_peak_bytes
        stashed = max((action.gpu_gives for action in schedule.actions if action.op is Op.STASH), default=0)
        assert (stashed > 0) == (inputs is Tier.HOST)
        holes = HOLES_SHARE * (peak - schedule.gpu_base_bytes) + NUM_STASH_HOLES * stashed
        assert 0 <= reserved_bytes(schedule) - (fixed + peak + holes) <= 1


def test_a_thread_that_cannot_keep_up_is_the_step() -> None:
    profile = stack()
    plan = plan_with(profile, Tier.GPU, Tier.GPU, micro_batch=2)
    fast = forecast_of(profile, plan, COSTS, machine())
    assert fast.step_s == fast.simulated.step_s > fast.issue_s
    slow = replace(COSTS, calls=tuple(replace(cost, issue_s=100.0) for cost in COSTS.calls))
    # Six samples in three micro-batches, except for the embedding.
    assert forecast_of(profile, plan, slow, machine()).step_s == pytest.approx(
        ISSUE_FACTOR * 100.0 * (1 + 3 * 6) + 0.125
    )


@given(
    st.integers(0, 10**12),
    st.integers(0, 10**9),
    st.integers(0, 10**12),
    st.integers(0, 10**9),
    st.floats(1.0, 10.0),
)
def test_an_estimate_grows_with_the_work_and_falls_with_the_rates(
    flop: int, touched: int, more_flop: int, more_touched: int, faster: float
) -> None:
    def layer(flop: int, touched: int, rates: Machine) -> CallCost:
        profile = stack()
        work = Work(Affine(0, flop), Affine(0, touched))
        calls = tuple(replace(call, forward=work) if call.kind == 1 else call for call in profile.calls)
        return estimate(replace(profile, calls=calls), rates).calls[1]

    costs = layer(flop, touched, GPU)
    assert costs.forward_s.values == sorted(costs.forward_s.values)
    larger = layer(flop + more_flop, touched + more_touched, GPU)
    if flop:  # without any product a block is not compiled
        assert all(one <= other for one, other in zip(costs.forward_s.values, larger.forward_s.values, strict=True))
    slower = zip(
        layer(flop, touched, with_gpu(1e9 * faster, 1e9 * faster)).forward_s.values, costs.forward_s.values, strict=True
    )
    assert all(one <= other for one, other in slower)


@pytest.mark.parametrize(("dtype", "moved_bytes"), [("float32", 28), ("float16", 28 + 6), ("bfloat16", 8 + 28 + 8)])
def test_an_estimated_update_moves_what_was_counted(dtype: str, moved_bytes: int) -> None:
    profile = stack(dtype=dtype)
    plan = plan_with(profile, Tier.GPU, Tier.GPU, update=Update.IN_BACKWARD)
    numel = plan.layout.chunks[1].optimised_numel
    assert seconds(profile, plan, estimate(profile, GPU))["update.1"] == pytest.approx(moved_bytes * numel / 1e9)


def test_a_processor_is_full_at_once() -> None:
    """4e6 operations at 1 GFLOP/s are milliseconds; as many as half fill a GPU would be 20 s."""
    profile, work = stack(), Work(Affine(4_000_000, 0), Affine())
    calls = tuple(replace(call, forward=work) if call.kind == 1 else call for call in profile.calls)
    assert GPU.gpu is not None
    processor = replace(GPU, gpu=replace(GPU.gpu, name=SIMULATED))
    assert 0.001 < max(estimate(replace(profile, calls=calls), processor).calls[1].forward_s.values) < 0.01


def test_a_machine_without_a_gpu_cannot_be_estimated() -> None:
    with pytest.raises(ValueError, match="'test' says nothing about its GPU"):
        estimate(stack(), machine())


def test_an_estimate_is_what_was_measured_once() -> None:
    """W1: the layer and the tiles of llama-3.2-3b on an H200; see docs/log.md. Within a tenth."""
    works = [
        Work(Affine(0, int(number * 1e12 / 16)), Affine(0, int(touched * 1e9 / 16))) for number, touched in W1_LAYER
    ]
    profile = stack(num_samples=16, dtype="bfloat16")
    calls = [
        replace(call, forward=works[0], recompute=works[1], backward=works[2]) if call.kind == 1 else call
        for call in profile.calls
    ]
    cost = estimate(replace(profile, calls=tuple(calls)), with_gpu(403e12, 4.0e12)).calls[1]
    assert cost.forward_s.at(16) == pytest.approx(11.6e-3, rel=0.1)
    assert cost.recompute_s.at(16) + cost.backward_s.at(16) == pytest.approx(33.5e-3, rel=0.1)
    assert cost.forward_s.at(4) == pytest.approx(2.65e-3, rel=0.1)


W1_LAYER = [(7.009, 18.1), (5.360, 16.7), (14.22, 41.3)]  # teraflop and gigabytes for 16 samples, by the profiler


def test_a_forecast_of_96_blocks_takes_milliseconds() -> None:
    profile = stack(96, dtype="bfloat16")
    plan = plan_with(profile, inputs=Tier.HOST, update=Update.IN_BACKWARD)
    costs = estimate(profile, GPU)
    started_s = time.process_time()
    forecast_of(profile, plan, costs, GPU)
    assert time.process_time() - started_s < 1.0  # 0.15 s on an idle machine


def test_a_lookup_on_the_host_costs_rows_and_no_table() -> None:
    """Of compute the gathering and one copy; of the links the rows; of the host their sum, and the update as ever."""
    profile = with_tables(stack(), 0)
    plan = plan_with(profile)
    there = looked_up(profile, plan)
    rows = profile.calls[0].outputs.at(profile.num_samples)
    found = seconds(profile, there)
    assert found["fwd.0"] == 2 * rows / GATHER_BYTES_PER_S
    assert found["bwd.0"] == 2 * rows / COSTS.memory_bytes_per_s
    moved = {}
    for name, one in (("gpu", plan), ("host", there)):
        schedule = lower(profile, one, Mode.TRAIN)
        moved[name] = {lane: sum(a.num_bytes for a in schedule.lane(lane) if a.block == 0) for lane in Lane}
    table = profile.param("embed.weight").numel * 4
    assert moved["host"][Lane.H2D] == moved["host"][Lane.D2H] == rows
    assert moved["gpu"][Lane.H2D] == 2 * table and moved["gpu"][Lane.D2H] == table
    assert moved["host"][Lane.CPU] == moved["gpu"][Lane.CPU] + SUM_PASSES * 2 * rows
    assert least_step_s(Problem(profile, COSTS, machine(1e6, 0.7), Terms.of(there)), Placement(there)) <= (
        forecast_of(profile, there, COSTS, machine(1e6, 0.7)).step_s
    )


def test_a_lookup_waits_for_the_update_of_its_table_alone() -> None:
    profile = with_tables(stack(), 0)
    schedule = lower(profile, looked_up(profile, plan_with(profile)), Mode.TRAIN)
    rows = schedule.by_id["look_up.0"]
    assert rows.after_prev == ("update.0",) and rows.after == () and schedule.lane(Lane.H2D)[0] is rows
    assert schedule.by_id["fwd.0"].after == ("look_up.0",)
    assert schedule.by_id["sum.0@bwd.0"].after == ("write_back.0@bwd.0",)
    assert "sum.0@bwd.0" in schedule.by_id["update.0"].after
