"""A plan that nobody has searched for, with what follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from hightide.ir.passes import Passes
from hightide.planner import solution
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.solution import Solution
from hightide.planner.verify.precedence import Precedence
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
