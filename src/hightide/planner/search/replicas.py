"""Into how many groups the ranks are divided that have a copy of everything.

Shards over all ranks take least memory, and all that is gathered and reduced crosses the network between nodes. Shards
inside each node, with replicas across, leave only the mean of shards to the network, and take as many times the memory
as there are nodes. Which is faster depends on the whole plan: both are searched."""

from __future__ import annotations

from collections.abc import Callable

from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.problem import Problem
from hightide.planner.solution import Searched


def search_groups(problem: Problem, search: Callable[[Problem], Searched]) -> Searched:
    """The faster, by `search`. Raises InfeasiblePlan if nothing fits: for shards over all ranks, which need least."""
    over_all = problem.with_terms(replicas=1)
    nodes = 1 if problem.machine.links is None else problem.machine.links.num_nodes
    if problem.terms.ranks == 1 or nodes == 1:
        return search(over_all)
    try:
        inside = search(problem.with_terms(replicas=nodes))
    except InfeasiblePlan:
        return search(over_all)
    found = search(over_all)
    return inside if inside.step.step_s < found.step.step_s else found
