"""Into how many calls a step is cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest

from hightide.cli.workload import load_workload
from hightide.doctor.known import load_machine
from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.plan import GradientDtype
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower import lower_step
from hightide.planner.placement import Placement
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.step_seconds import forecast
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.calls import in_calls, numbers_of_calls, search_calls
from hightide.planner.search.search import quick_step_s, search
from hightide.planner.search.trials import Trials
from unit.planner.profiles import UNLIMITED, stack
from unit.planner.test_lower_disk import GPU, MACHINE

GIB = 2**30


@cache
def profiled(model: str, sequences: int, length: int) -> ModelProfile:
    return load_workload(model, sequences, length, None, None).profile()


def preset_problem(model: str, sequences: int, length: int, gpu_bytes: int, host_bytes: int) -> Problem:
    profile, machine = profiled(model, sequences, length), load_machine("h200")
    return Problem(profile, estimate(profile, machine), machine, Terms(gpu_bytes, host_bytes))


def problem(num_samples: int, gpu_bytes: int = UNLIMITED) -> Problem:
    profile, machine = stack(4, num_samples=num_samples), load_machine("rtx-3090")
    return Problem(profile, estimate(profile, machine), machine, Terms(gpu_bytes, UNLIMITED))


def test_numbers_divide_the_samples_and_are_few() -> None:
    assert numbers_of_calls(problem(16)) == [1, 2, 4, 8, 16]
    assert numbers_of_calls(problem(12)) == [1, 2, 4, 6, 12]
    assert numbers_of_calls(problem(7)) == [1, 7]
    assert len(numbers_of_calls(problem(4096))) == 10
    assert numbers_of_calls(problem(16).with_terms(disk_bytes=GIB)) == [1, 2, 4, 8, 16]
    with pytest.raises(ValueError, match="12 samples cannot be cut into 5 equal calls; into 1, 2, 3, 4, 6, 12"):
        in_calls(problem(12), 5)


def test_a_call_has_its_part_of_the_samples() -> None:
    cut = in_calls(problem(12), 3)
    assert (cut.profile.num_samples, cut.terms.accumulate) == (4, 3)
    found = search(cut)
    assert (found.plan.num_samples, found.plan.accumulate, found.passes.number) == (4, 3, 3)


def test_many_calls_where_activations_are_what_does_not_fit() -> None:
    """Everything else fits: fewer samples at once, and nothing is repeated."""
    whole = preset_problem("llama-3.2-1b", sequences=64, length=1024, gpu_bytes=40 * GIB, host_bytes=64 * GIB)
    found, one = search_calls(whole), search(whole)
    assert found.plan.accumulate > 1 and found.step.step_s < 0.97 * one.step.step_s
    layers = [block for block in found.plan.blocks if ".layers." in block.name]
    assert all(block.activation is not Activation.RECOMPUTE for block in layers)
    found.verify()


def test_one_call_where_parameters_stream() -> None:
    """Each call would fetch them all again."""
    whole = preset_problem("llama-3.2-1b", sequences=4, length=8192, gpu_bytes=6 * GIB, host_bytes=64 * GIB)
    assert search_calls(whole).plan.accumulate == 1


def test_of_what_surely_takes_too_long_a_look_says_only_whether_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is simulated."""
    streamed = preset_problem("llama-3.2-1b", sequences=4, length=8192, gpu_bytes=6 * GIB, host_bytes=64 * GIB)
    found_s = quick_step_s(streamed)
    assert quick_step_s(streamed, below_s=1.01 * found_s) == found_s
    with monkeypatch.context() as patch:
        patch.setattr(Trials, "_simulate", None)
        assert quick_step_s(streamed, below_s=found_s / 1000) == math.inf
        with pytest.raises(InfeasiblePlan, match="no plan fits"):
            quick_step_s(streamed.with_terms(host_bytes=GIB), below_s=found_s / 1000)


def test_what_fits_only_in_many_calls() -> None:
    whole = preset_problem("llama-3.2-1b", sequences=16, length=8192, gpu_bytes=8 * GIB, host_bytes=24 * GIB)
    with pytest.raises(InfeasiblePlan):
        search(whole)
    found = search_calls(whole)
    assert found.plan.accumulate > 1
    found.verify()


@pytest.mark.long  # of tiny models: parity/test_passes_from_disk.py, and test_plan_command.py pins the calls
def test_what_fits_only_from_a_disk_and_in_several_calls() -> None:
    """Block inputs of all samples are too many. The less the host has, the more is on disk: states, which cross once a
    step, before sums of gradients, which cross with every call, and these before parameters, which cross twice."""
    profile, homes = stack(12, num_samples=32, dtype="bfloat16"), {}
    for host_bytes in (150_000, 450_000):
        terms = Terms(100_000, host_bytes, disk_bytes=UNLIMITED)
        whole = Problem(profile, estimate(profile, GPU), MACHINE, terms)
        with pytest.raises(InfeasiblePlan):
            search(whole)
        found = search_calls(whole)
        found.verify()
        assert found.plan.accumulate > 1
        places = found.placement.chunks
        homes[host_bytes] = [
            sum(tier is Tier.DISK for tier in tiers)
            for tiers in zip(*((place.states, place.grad, place.home) for place in places), strict=True)
        ]
    states, sums, params = homes[150_000]
    assert states == sums > params > 0
    states, sums, params = homes[450_000]
    assert states > sums == params == 0


@pytest.mark.parametrize(
    ("gradients", "gpu_bytes", "host_bytes", "num_calls"),
    [
        (GradientDtype.PARAM, 4 * GIB, 8 * GIB, 1),  # sums between calls would be twice as wide
        (GradientDtype.FLOAT32, GIB, 64 * GIB, 8),  # activations of all samples are too many
    ],
)
def test_a_refusal_names_what_is_enough_in_the_calls_that_need_least(
    gradients: GradientDtype, gpu_bytes: int, host_bytes: int, num_calls: int
) -> None:
    whole = preset_problem("llama-3.2-1b", sequences=8, length=1024, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    whole = whole.with_terms(gradients=gradients)
    with pytest.raises(InfeasiblePlan) as caught:
        search_calls(whole)
    assert caught.value.num_calls == num_calls
    # Quick: whether anything fits is found out alike in a whole search.
    raised = [replace(with_limits(whole, limits), quick=True) for limits in caught.value.enough]
    assert raised and all(search_calls(more).plan.num_samples for more in raised)
    for number in {1, 8} - {num_calls}:
        with pytest.raises(InfeasiblePlan):
            search(in_calls(raised[0], number))


def with_limits(step: Problem, limits: Mapping[Tier, int]) -> Problem:
    for tier, num_bytes in limits.items():
        step = step.with_limit(tier, num_bytes)
    return step


def test_more_memory_for_sums_is_used_where_it_gains() -> None:
    """Small calls: sums that go home and back each time would take longer than computing."""
    whole = preset_problem("llama-3.2-1b", sequences=32, length=128, gpu_bytes=12 * GIB, host_bytes=64 * GIB)
    found = search(in_calls(whole, 32))
    staying = [place for place in found.placement.chunks if place.stays]
    assert staying, "no sums stay; change the problem"
    blocks = tuple(replace(block, sums=Tier.HOST) for block in found.plan.blocks)
    away = Placement(replace(found.plan, blocks=blocks))
    grad_slots = away.widest_tick({call.block for call in found.profile.calls})[1] + 1
    away = Placement(replace(away.plan, num_grad_slots=grad_slots))
    away_s = forecast(found.problem, away, lower_step(found.profile, away.plan)).step_s
    assert away_s > 1.1 * found.step.step_s


def test_a_host_that_cannot_hold_all_leaves_every_micro_batch_to_choose_from() -> None:
    """Sums of all gradients in fp32 are more than the host has left: what is too much for it goes to the GPU, and not
    only the smallest micro-batch is tried."""
    whole = preset_problem("qwen2.5-7b", sequences=64, length=1024, gpu_bytes=80 * GIB, host_bytes=110 * GIB)
    calls = tuple(replace(call, issue_s=4e-3) for call in whole.costs.calls)  # small micro-batches are not for nothing
    cut = in_calls(replace(whole, costs=replace(whole.costs, calls=calls)), 4)
    found = search(cut)
    assert found.plan.micro_batch >= 8 and found.step.issue_s < 0.5 * found.step.step_s
