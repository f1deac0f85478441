"""Answers of searches that an earlier test has asked for: tests wrap the same tiny model many times over.

A search is a function of its problem. Few are kept, because each holds its schedules: a question comes again soon
or not at all. Tests of the search itself ask it themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache

from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.problem import Problem
from hightide.planner.solution import Searched

NUM_KEPT = 64


class KnownSearches:
    """Stands for `hightide.posing.search`."""

    def __init__(self, search: Callable[[Problem], Searched]) -> None:
        @lru_cache(maxsize=NUM_KEPT)
        def asked(problem: Problem) -> Searched | InfeasiblePlan:
            try:
                return search(problem)
            except InfeasiblePlan as refused:
                return refused.with_traceback(None)

        self._asked = asked

    def __call__(self, problem: Problem) -> Searched:
        found = self._asked(problem)
        if isinstance(found, InfeasiblePlan):
            raise copy.copy(found)  # whoever catches it has it alone
        return found
