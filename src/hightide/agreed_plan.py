"""One plan for all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from hightide.ir import codec
from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.machine import Machine
from hightide.ir.plan import Plan
from hightide.planner.predict.estimate import estimate
from hightide.planner.problem import Problem, Terms
from hightide.planner.slowest import slowest_problem
from hightide.planner.solution import Searched
from hightide.profiler.model.batch_sizes import BatchSizes
from hightide.shard.agreement import from_first, least, of_each
from hightide.shard.collectives import Collectives


def largest_example(
    collectives: Collectives, profile: ModelProfile, sizes: BatchSizes
) -> tuple[ModelProfile, BatchSizes]:
    """A plan is made for one batch: for that of a rank whose example is nowhere smaller than any other's, or for the
    first one's. What it does not hold is planned for when it comes."""
    rows = collectives.exchange("sizes of example batches", json.dumps(sizes.plain()).encode())
    found = [BatchSizes.from_plain(json.loads(row)) for row in rows]
    if all(one == found[0] for one in found):
        return profile, sizes
    source = next((rank for rank, one in enumerate(found) if all(map(one.holds, found))), 0)
    own = json.dumps(codec.to_json(profile)).encode() if collectives.ranks.rank == source else None
    text = collectives.broadcast_bytes("the profile of an example batch", own, source)
    return codec.from_json(ModelProfile, json.loads(text)), found[source]


def plan_of_all(
    collectives: Collectives,
    profile: ModelProfile,
    terms: Terms,
    posed: Callable[[Terms], Problem],
    planned: Callable[[Problem], Searched],
) -> Searched:
    """The first rank makes it, for the least that any of them may have, and the slowest that any of
    them has measured."""
    own = {"gpu_bytes": terms.gpu_bytes, "host_bytes": terms.host_bytes, "disk_bytes": terms.disk_bytes}
    found = {name: int(value or 0) for name, value in least(collectives, own).items()}
    of_all = replace(
        terms,
        gpu_bytes=found["gpu_bytes"],
        host_bytes=found["host_bytes"],
        disk_bytes=found["disk_bytes"],
        ranks=collectives.ranks.world,
        even_alone=collectives.ranks.world == 1,
    )
    problem = posed(of_all)
    own_facts = json.dumps([codec.to_json(problem.costs), codec.to_json(problem.machine)]).encode()
    facts = [json.loads(row) for row in collectives.exchange("costs and machines", own_facts)]
    measured = [(codec.from_json(Costs, costs), codec.from_json(Machine, machine)) for costs, machine in facts]
    problem = slowest_problem(problem, profile, measured)

    def made() -> str:
        searched = planned(problem)
        return json.dumps([codec.to_json(searched.plan), codec.to_json(searched.problem.costs)])

    plan_text, costs_text = json.loads(from_first(collectives, "a plan", made))
    plan = codec.from_json(Plan, plan_text)
    problem = replace(problem, profile=plan.profile or problem.profile, costs=codec.from_json(Costs, costs_text))
    solution = Searched.elsewhere(problem, plan)
    solution.verify()
    return solution


def problem_of_all(
    collectives: Collectives, terms: Terms, fits: Callable[[], None], posed: Callable[[], Problem]
) -> Problem:
    """The first rank's, of a run that has its plan already. It must fit on each rank: a ValueError of one is one for
    all."""

    def its_own() -> bytes:
        fits()
        return b""

    of_each(collectives, "the plan of before", its_own)
    made: list[Problem] = []

    def of_first() -> str:
        made.append(posed())
        return json.dumps([codec.to_json(made[0].profile), codec.to_json(made[0].machine), made[0].quick])

    profile_text, machine_text, quick = json.loads(from_first(collectives, "the problem of before", of_first))
    profile, machine = codec.from_json(ModelProfile, profile_text), codec.from_json(Machine, machine_text)
    return Problem(profile, estimate(profile, machine), machine, terms, quick=quick)
