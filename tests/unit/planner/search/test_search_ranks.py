"""The search for several ranks: legal plans within one rank's limits, and the choices that a person would make."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hightide.doctor.known import load_machine
from hightide.ir.block import ModelProfile
from hightide.ir.machine import CollectiveRates, Links, Machine
from hightide.ir.plan import GradientDtype, Sharing, Update
from hightide.ir.tier import Lane, Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.lower.count_effects import base_bytes
from hightide.planner.placement import Placement
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.floor import floors
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.replicas import search_groups
from hightide.planner.search.search import search
from hightide.planner.search.space import Space
from hightide.planner.search.standing_bytes import Needs, StandingBytes
from hightide.planner.solution import Searched
from hightide.planner.verify.check_plan import check_plan
from hightide.this_machine import simulated_machine
from unit.planner.profiles import UNLIMITED, profiles, stack
from unit.planner.search.test_standing_bytes import choices

STACK = stack(6, dtype="bfloat16")


def linked(gpus: int, nodes: int = 1, rate: float = 1e9, network: float = 1e9) -> Machine:
    rates = CollectiveRates(rate, rate, rate)
    across = CollectiveRates(network, network, network) if nodes > 1 else None
    links = Links(gpus, nodes, rates, across, 1e-7, 1e-7, 1.0, 1.0, 0.5)
    return replace(simulated_machine(), links=links)


def problem(profile: ModelProfile, machine: Machine, gpu: int = UNLIMITED, host: int = UNLIMITED) -> Problem:
    assert machine.links is not None
    terms = Terms(gpu, host, ranks=machine.links.gpus_per_node * machine.links.num_nodes)
    return Problem(profile, estimate(profile, machine), machine, terms)


def checked(found: Searched) -> Searched:
    check_plan(found.profile, found.plan)
    found.verify()
    assert found.peaks.gpu_peak_bytes <= found.plan.gpu_limit_bytes
    assert found.peaks.host_peak_bytes <= found.plan.host_limit_bytes
    return found


@given(st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_small_model_gets_a_legal_plan(data: st.DataObject) -> None:
    profile = data.draw(profiles().filter(lambda one: one.params))
    asked = problem(profile, linked(data.draw(st.integers(2, 4))))
    asked = asked.with_terms(
        update=data.draw(st.sampled_from(Update)), gradients=data.draw(st.sampled_from(GradientDtype))
    )
    least = checked(search(replace(asked, quick=True))).plan.forecast.gpu_peak_bytes
    limit = int(least * data.draw(st.sampled_from([0.5, 0.7, 0.9])))
    try:
        found = search(replace(asked.with_limit(Tier.GPU, limit), quick=True))
    except InfeasiblePlan:
        assume(False)
    checked(found)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_bytes_for_many_choices_are_those_of_the_plans(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    ranks, replicas = data.draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (4, 2)]))
    terms = Terms(UNLIMITED, UNLIMITED, data.draw(st.sampled_from(Update)), disk_bytes=UNLIMITED)
    terms = replace(terms, ranks=ranks, replicas=replicas, accumulate=data.draw(st.sampled_from([1, 3])))
    space = Space(profile, terms)
    candidate = data.draw(choices(space))
    candidate = replace(candidate, copied=candidate.whole & frozenset(data.draw(st.sets(st.integers(0, 6)))))
    found = StandingBytes(space).of(candidate)
    expected = Needs(*base_bytes(profile, Placement(space.build(candidate))).values())
    assert Needs(found.gpu_bytes, found.host_bytes, found.disk_bytes) == expected


def test_ranks_hold_together_what_one_cannot() -> None:
    limits = 150_000, 100_000
    with pytest.raises(InfeasiblePlan):
        search(Problem(STACK, estimate(STACK, simulated_machine()), simulated_machine(), Terms(*limits)))
    found = checked(search(problem(STACK, linked(4), *limits)))
    assert found.plan.ranks == 4 and found.plan.num_shards == 4


def test_everything_on_the_gpu_has_whole_parameters_where_they_fit() -> None:
    found = checked(search(problem(STACK, linked(4))))
    assert {block.sharing for block in found.plan.blocks[1:7]} == {Sharing.PARAMS_REPLICATED}
    assert found.plan.num_slots == 0
    tight = checked(search(problem(STACK, linked(4), gpu=220_000, host=1)))
    assert Sharing.SHARDED in {block.sharing for block in tight.plan.blocks[1:7]} and tight.plan.num_slots


def test_what_is_tiny_is_whole_on_each_rank() -> None:
    found = search(problem(STACK, linked(2)))
    norm = next(block for block in found.plan.blocks if block.name == "norm")
    assert norm.sharing is Sharing.REPLICATED


def test_floors_know_the_lanes_between_ranks() -> None:
    found = search(problem(STACK, linked(4, rate=1e8), gpu=250_000))
    alone = floors(found)
    for lane, seconds in alone.items():
        assert seconds <= found.step.step_s * 1.001, lane
    assert found.passes.last.lane(Lane.GATHER) and alone[Lane.GATHER] > 0


def test_shards_stay_inside_a_node_where_much_is_gathered_and_the_network_is_slow() -> None:
    """Nothing stays, so that parameters are gathered for forward and for backward."""
    asked = problem(STACK, linked(2, nodes=2, network=1e6), gpu=90_000)
    found = checked(search_groups(asked, search))
    assert found.plan.replicas == 2
    assert found.step.step_s < search(asked).step.step_s


def test_shards_are_over_all_ranks_where_memory_is_short() -> None:
    asked = problem(STACK, linked(2, nodes=2, network=1e6), gpu=220_000, host=1)
    with pytest.raises(InfeasiblePlan):
        search(asked.with_terms(replicas=2))
    assert checked(search_groups(asked, search)).plan.replicas == 1


def test_one_node_has_one_group() -> None:
    asked = problem(STACK, linked(2))
    assert search_groups(asked, search).plan == search(asked).plan


def test_slower_links_make_no_faster_plan() -> None:
    machine = load_machine("8x-h100")
    slower = replace(machine, links=replace(machine.links, inside=CollectiveRates(*[1e8] * 3)))  # type: ignore[type-var]
    fast, slow = (search(problem(STACK, one)).step.step_s for one in (machine, slower))
    assert fast <= slow * 1.001
