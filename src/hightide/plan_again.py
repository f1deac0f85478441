"""The plan of a run that goes on: that of its checkpoint, if it can still be used."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

from hightide.agreed_plan import problem_of_all
from hightide.asked import Asked
from hightide.free_memory import check_still_fits
from hightide.ir.plan import Plan
from hightide.ir.units import counted
from hightide.planner.problem import Problem, Terms
from hightide.planner.solution import Searched, Solution
from hightide.planner.verify.check_plan import check_plan, check_states
from hightide.posing import Profiled, estimated_problem, rehearsed_profile, verified
from hightide.shard.collectives import Collectives


def plan_again(before: Plan, asked: Asked, profiled: Profiled, collectives: Collectives | None) -> Searched | None:
    """The plan of `before`, for this model. None, on all ranks: it cannot be used, which the first one tells."""
    ranks = None if collectives is None else collectives.ranks
    world, nodes = (1, None) if ranks is None else (ranks.world, ranks.nodes)
    terms = replace(Terms.of(before), micro_batch=asked.micro_batch)

    def check() -> None:
        if (before.ranks, before.even_alone) != (world, ranks is not None and world == 1):
            raise ValueError(f"it is for {counted(before.ranks, 'rank')}, and there are {world}")
        num_samples, most = profiled[0].num_samples, before.num_samples * before.accumulate
        if asked.cuts and num_samples > most:
            raise ValueError(f"it holds steps of {most} samples, and a step has {num_samples}")
        check_still_fits(before, asked.bounds, asked.device, asked.model, asked.optimizer, asked.ranks_on_node)

    def posed() -> tuple[Problem, Solution]:
        problem = estimated_problem(profiled[0], asked.device, terms, asked.disks, nodes)
        if asked.cuts:
            problem = problem.with_samples(before.num_samples)
        check_plan(problem.profile, before)
        check_states(before, asked.rule.states)
        sized = (problem.profile, *profiled[1:])
        about = (asked.optimizer, asked.device, asked.compile, before.gpu_limit_bytes)
        rehearsed = partial(rehearsed_profile, sized, *about)
        solution = verified(Solution.of(problem.profile, before), rehearsed)
        return replace(problem, profile=solution.profile), solution

    try:
        if collectives is None:
            check()
            return Searched.simulated(*posed())
        problem = problem_of_all(collectives, terms, check, lambda: posed()[0])
        solution = Searched.elsewhere(problem, before)
        solution.verify()
        return solution
    except ValueError as error:
        if ranks is None or ranks.rank == 0:
            told = str(error).splitlines()[0]
            warnings.warn(f"the plan that the run had cannot be used, another is made: {told}", stacklevel=5)
        return None
