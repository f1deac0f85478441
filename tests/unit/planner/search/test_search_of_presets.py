"""The search on models of real shapes: what synthetic ones of a few blocks do not show."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from hightide.cli.workload import load_workload
from hightide.doctor.known import load_machine
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.loss_tiles import loss_tile_tokens
from hightide.planner.mechanism import Mechanism
from hightide.planner.predict.estimate import estimate
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.nearby import fits, least_disk_bytes
from hightide.planner.search.search import search
from hightide.planner.search.trials import Trials

GIB = 2**30
HARDLY = 0.8  # of a limit that is enough: with a disk a refusal may name a sixth more than it takes


@cache
def asked(model: str, machine: str, num_samples: int) -> Problem:
    profile, known = load_workload(model, num_samples, 2048, None, None).profile(), load_machine(machine)
    return Problem(profile, estimate(profile, known), known, Terms(24 * GIB, 118 * GIB))


def limited(problem: Problem, gpu: float, host: float, disk: float = 0.0) -> Problem:
    sizes = [int(size * GIB) for size in (gpu, host, disk)]
    return problem.with_terms(gpu_bytes=sizes[0], host_bytes=sizes[1], disk_bytes=sizes[2])


def step_s(problem: Problem) -> float:
    return search(problem).step.step_s


def test_slots_of_another_size_are_tried_before_it_is_refused() -> None:
    """In slots of the usual size the head of the 8B alone takes more than these 5 GiB."""
    plan = search(limited(asked("llama-3.1-8b", "h200", 4), gpu=5, host=200)).plan
    assert plan.forecast.gpu_bytes <= 5 * GIB


@pytest.mark.parametrize("num_samples", [5, *(pytest.param(size, marks=pytest.mark.long) for size in (6, 7, 8))])
def test_a_loss_in_smaller_tiles_is_tried_before_it_is_refused(num_samples: int) -> None:
    problem = limited(asked("llama-3.2-1b", "rtx-3090", num_samples), gpu=3, host=64)
    plan = search(problem).plan
    assert plan.forecast.gpu_bytes <= 3 * GIB
    assert plan.loss_tile_tokens <= loss_tile_tokens(problem.profile)
    roomy = search(limited(problem, gpu=8, host=64)).plan
    assert roomy.loss_tile_tokens == loss_tile_tokens(problem.profile), "only where nothing else fits"


@pytest.mark.parametrize(("gpu", "host"), [(24.0, 100.8), pytest.param(24.0, 118.0, marks=pytest.mark.long)])
def test_a_disk_makes_no_plan_slower(gpu: float, host: float) -> None:
    without = limited(asked("llama-3.1-8b", "h200", 4), gpu, host)
    assert step_s(without.with_terms(disk_bytes=1000 * GIB)) <= 1.001 * step_s(without)


@pytest.mark.parametrize(
    ("update", "tier"),
    [
        (Update.DEFERRED, Tier.HOST),
        pytest.param(Update.IN_BACKWARD, Tier.GPU, marks=pytest.mark.long),
        pytest.param(Update.DEFERRED, Tier.GPU, marks=pytest.mark.long),
        pytest.param(Update.IN_BACKWARD, Tier.HOST, marks=pytest.mark.long),
    ],
)
def test_more_memory_makes_no_plan_much_slower(update: Update, tier: Tier) -> None:
    """Not at all would be better: see "Is it near the best?" in docs/planning.md."""
    problem = asked("llama-3.1-8b", "h200", 4).with_terms(gradients=GradientDtype.PARAM, update=update)
    sizes = (92, 118) if tier is Tier.HOST else (16, 24, 48)
    found = [step_s(problem.with_limit(tier, size * GIB)) for size in sizes]
    assert all(later <= 1.03 * min(found[: at + 1]) for at, later in enumerate(found)), found


@pytest.mark.parametrize(
    ("gpu", "host", "disk"),
    [
        pytest.param(6.0, 4.0, 10.0, marks=pytest.mark.long),
        (3.2, 3.0, 1000.0),
    ],
)
def test_with_a_disk_a_refusal_names_what_is_enough_and_hardly_more(gpu: float, host: float, disk: float) -> None:
    problem = limited(asked("llama-3.2-1b", "rtx-3090", 4), gpu, host, disk)
    with pytest.raises(InfeasiblePlan) as refused:
        search(problem)
    assert len(refused.value.enough) > 1
    for enough in refused.value.enough:
        assert len(enough) == 1
        tier, size = next(iter(enough.items()))
        search(problem.with_limit(tier, size))
        with pytest.raises(InfeasiblePlan):
            search(problem.with_limit(tier, int(HARDLY * size)))


def test_a_disk_is_named_also_where_only_lean_plans_from_it_fit() -> None:
    """Everything streamed with one buffer of each kind takes more of the host than it has."""
    problem = limited(asked("llama-3.2-1b", "rtx-3090", 4), gpu=8, host=6)
    assert not fits(problem)
    size = least_disk_bytes(problem)
    assert size is not None and fits(problem.with_limit(Tier.DISK, size))


@pytest.mark.parametrize(("there", "first"), [(24, Tier.GPU), (12, Tier.HOST)])
def test_more_of_the_gpu_than_there_is_is_not_what_is_missing(there: int, first: Tier) -> None:
    problem = limited(asked("llama-3.2-1b", "rtx-3090", 4), gpu=8, host=6)
    gpu = problem.machine.gpu
    assert gpu is not None
    machine = replace(problem.machine, gpu=replace(gpu, memory_bytes=there * GIB))
    with pytest.raises(InfeasiblePlan) as refused:
        search(replace(problem, machine=machine))
    assert refused.value.tier is first and f"are missing on the {first}" in str(refused.value)
    assert {tier for enough in refused.value.enough for tier in enough} == {Tier.GPU, Tier.HOST}


def test_an_embedding_is_looked_up_on_the_host_where_that_is_faster() -> None:
    """Of the 8B in 10 GiB, updated in backward: its table goes over the link, or has no room. (With deferred updates
    it makes no difference there.)"""
    problem = limited(asked("llama-3.1-8b", "rtx-3090", 4), gpu=10, host=200).with_terms(update=Update.IN_BACKWARD)
    found, without = search(problem), search(problem.with_terms(without=frozenset({Mechanism.LOOKUP})))
    assert [block.name for block in found.plan.blocks if block.compute is Tier.HOST] == ["model.embed_tokens"]
    assert not any(block.compute is Tier.HOST for block in without.plan.blocks)
    assert found.step.step_s < 0.997 * without.step.step_s
    found.verify()


@pytest.mark.long  # a third of the searches above; small tables are in test_search.py
def test_where_states_on_the_gpu_save_more_an_embedding_stays_there() -> None:
    """Of the 8B in 24 GiB with deferred updates, the host's update is the limit: a table on the GPU spares it that."""
    problem = limited(asked("llama-3.1-8b", "h200", 4), gpu=24, host=200)
    found = search(problem)
    forced = replace(found.candidate, looked_up=frozenset({0}), whole=found.candidate.whole - {0})
    assert Trials(problem).step_s(forced) > found.step.step_s
