"""What was seen of a run, in the place of what was forecast for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.plan import Plan
from hightide.planner.advice.correct import MemoryShortage, Widths, expected_bytes, forward_needs, with_more_memory
from hightide.planner.predict.estimate import estimate
from hightide.planner.problem import Problem, Terms
from hightide.planner.solution import Solution
from unit.planner.predict.test_step_seconds import GPU
from unit.planner.profiles import plan_with, stack

LAYERS = (1, 2, 3, 4)  # calls of one kind, beside an embedding, a norm and a head
KIND = 1


@pytest.fixture(scope="module")
def problem() -> Problem:
    profile = stack(len(LAYERS))
    machine = replace(GPU, gpu=None)  # peaks are those of tensors
    return Problem(profile, estimate(profile, GPU), machine, Terms(2**40, 2**40))


def forecast_bytes(profile: ModelProfile, plan: Plan) -> int:
    return Solution.of(profile, plan).peaks.gpu_peak_bytes


def test_of_equal_calls_the_middle_one_counts(problem: Problem) -> None:
    plan = plan_with(problem.profile, activation=Activation.KEEP)
    solution = Solution.of(problem.profile, plan)
    needs, widths = forward_needs(solution), Widths(solution, 1)
    for call in LAYERS:
        need = needs[call]
        workspace_bytes = 9 * need.inside_bytes if call == LAYERS[0] else 0
        widths.see(call, need.peak_bytes + workspace_bytes, need.left_bytes)
    assert not widths.above(1.0)
    widths.clear()
    for call in LAYERS:
        widths.see(call, needs[call].peak_bytes + needs[call].inside_bytes, needs[call].left_bytes)
    assert widths.above(1.05) == {KIND: 2.0}


def test_only_the_kinds_that_took_more_are_corrected(problem: Problem) -> None:
    plan = plan_with(problem.profile, activation=Activation.KEEP)
    expected = expected_bytes(problem, plan, {KIND: 2.0}, 2**40)
    assert expected > forecast_bytes(problem.profile, plan)
    corrected = with_more_memory(problem, plan, MemoryShortage(expected, 100, {KIND: 2.0}))
    assert not corrected.kept_free_bytes and corrected.problem.terms == problem.terms
    for before, after in zip(problem.profile.calls, corrected.problem.profile.calls, strict=True):
        assert (after == before) == (before.kind != KIND)


def test_what_the_forward_has_not_taken_backward_will_not_take(problem: Problem) -> None:
    """A forecast is an upper bound, and may be too high by more than one block is wider."""
    plan = plan_with(problem.profile, activation=Activation.KEEP)
    most, least = (expected_bytes(problem, plan, {KIND: 2.0}, left_bytes) for left_bytes in (2**40, 0))
    forecast_left_bytes = most - least
    assert expected_bytes(problem, plan, {KIND: 2.0}, forecast_left_bytes - 300) == most - 300
    assert expected_bytes(problem, plan, {KIND: 2.0}, forecast_left_bytes + 300) == most


def test_what_blocks_do_not_explain_is_kept_free(problem: Problem) -> None:
    plan = plan_with(problem.profile, activation=Activation.KEEP)
    needed = 100 * forecast_bytes(problem.profile, plan)
    corrected = with_more_memory(problem, plan, MemoryShortage(needed, 100))
    assert corrected.kept_free_bytes > 0 and corrected.problem.terms == problem.terms
    assert forecast_bytes(corrected.problem.profile, plan) >= needed
