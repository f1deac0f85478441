"""A plan with what follows from it: each is lowered once, and one that cannot end is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hightide.ir.passes import Passes
from hightide.planner import solution
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.search.search import search
from hightide.planner.solution import Searched, Solution
from hightide.planner.verify.precedence import Precedence
from unit.planner.problems import small_problem
from unit.planner.profiles import plan_with, stack


def test_a_schedule_that_cannot_end_is_refused_with_what_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one ring buffer for gradients of several ranks that cannot park may make it."""
    profile = stack()

    def stuck(passes: Passes) -> Any:
        precedence = Precedence(passes.last)
        return precedence._run([[(place + 1) % 2] if place < 2 else [] for place in range(len(passes.last.actions))])

    monkeypatch.setattr(solution, "step_peaks", stuck)
    with pytest.raises(InfeasiblePlan, match=r"cannot run: actions wait for each other, 2 in all.* num_grad_buffers"):
        Solution.of(profile, plan_with(profile))


def test_what_was_verified_is_not_lowered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is told of it afterwards: a run takes the schedules that were verified."""
    problem, profile = small_problem(1, 4).asked, stack()
    found = search(problem)
    brought, known = Solution.of(profile, plan_with(profile)), Solution.of(problem.profile, found.plan)
    for one in (found, brought, known):
        one.verify()
    simulated = Searched.elsewhere(problem, found.plan)

    def lowered(*args: Any) -> Any:
        raise AssertionError("lowered again")

    for name in ("lower", "lower_step"):
        monkeypatch.setattr(solution, name, lowered)
    others = [
        (found, found.moving_in((), 0, 0)),
        (brought, brought.described()),
        (known, again := Searched.simulated(problem, known)),
    ]
    for verified, other in others:
        assert other.schedules is verified.schedules and len(other.schedules) > 1
    assert (again.step, again.save, again.passes, again.peaks) == (
        simulated.step,
        simulated.save,
        simulated.passes,
        simulated.peaks,
    )
