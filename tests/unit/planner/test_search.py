"""The search: near the best of all plans, within the limits, and refusals that say what is missing."""

from __future__ import annotations

import math

import pytest

from hightide.planner.check import check_plan
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.search import Found, equal_parts, search
from unit.planner.problems import SmallProblem, small_problem


def found(problem: SmallProblem) -> Found:
    return search(
        problem.profile,
        problem.costs,
        problem.machine,
        problem.gpu_bytes,
        problem.host_bytes,
        problem.update,
        gradients=problem.gradients,
    )


def check_against_all(problem: SmallProblem) -> None:
    best_s = problem.best_step_s()
    if best_s == math.inf:
        with pytest.raises(InfeasiblePlan):
            found(problem)
        return
    result = found(problem)
    check_plan(problem.profile, result.plan)
    assert result.plan.forecast.gpu_peak_bytes <= problem.gpu_bytes
    assert result.plan.forecast.host_peak_bytes <= problem.host_bytes
    assert result.step.step_s <= 1.01 * best_s


@pytest.mark.parametrize("seed", range(8))
def test_two_blocks_within_a_hundredth_of_the_best_of_all_plans(seed: int) -> None:
    check_against_all(small_problem(seed, num_blocks=2))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 160))
def test_small_models_within_a_hundredth_of_the_best_of_all_plans(seed: int) -> None:
    check_against_all(small_problem(seed, num_blocks=1 + seed % 3))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 204))
@pytest.mark.timeout(1800)
def test_four_blocks_within_a_hundredth_of_the_best_of_all_plans(seed: int) -> None:
    check_against_all(small_problem(seed, num_blocks=4))


def test_micro_batches_are_equal_parts() -> None:
    assert equal_parts(16) == (16, 8, 6, 4, 3, 2, 1)
    assert equal_parts(1) == (1,)
    assert equal_parts(5) == (5, 3, 2, 1)
