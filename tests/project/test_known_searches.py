"""What the tests use instead of a search is what the search says."""

from __future__ import annotations

import pytest

from hightide.doctor.known import load_machine
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.estimate import estimate
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.search import search
from hightide.planner.solution import Searched
from known_searches import KnownSearches
from unit.planner.profiles import UNLIMITED, stack


def problem(gpu_bytes: int) -> Problem:
    profile, machine = stack(2), load_machine("rtx-3090")
    return Problem(profile, estimate(profile, machine), machine, Terms(gpu_bytes, UNLIMITED), quick=True)


def test_an_equal_problem_is_asked_once_and_another_one_itself() -> None:
    asked: list[Problem] = []

    def counted(one: Problem) -> Searched:
        asked.append(one)
        return search(one)

    known = KnownSearches(counted)
    first, again, other = known(problem(UNLIMITED)), known(problem(UNLIMITED)), known(problem(UNLIMITED // 2))
    assert asked == [problem(UNLIMITED), problem(UNLIMITED // 2)]
    assert first.plan == again.plan == search(problem(UNLIMITED)).plan and other.plan != first.plan


def test_a_refusal_is_the_same_each_time_and_nobody_elses() -> None:
    known, caught = KnownSearches(search), []
    for _ in range(2):
        with pytest.raises(InfeasiblePlan) as refused:
            known(problem(1))
        caught.append(refused.value)
    with pytest.raises(InfeasiblePlan) as expected:
        search(problem(1))
    assert caught[0] is not caught[1]
    assert all(str(one) == str(expected.value) and vars(one) == vars(expected.value) for one in caught)
