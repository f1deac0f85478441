"""From what the user asks for to a plan, and on to a run."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch
from torch import nn

from hightide.agreed_plan import largest_example, plan_of_all
from hightide.asked import Asked
from hightide.checkpoint.pretrained_folder import save_pretrained
from hightide.free_memory import room_on, warn_of_moving_in, warn_of_reserve, warn_of_room
from hightide.integrations import lora, transformers
from hightide.integrations.model_files import written_here
from hightide.ir.block import ModelProfile
from hightide.ir.plan import Plan
from hightide.loading.first_values import first_values
from hightide.loading.unloaded import forget, origins_in, seem_unloaded
from hightide.observe.larger_batches import LargerBatches
from hightide.observe.ranked_batches import RankedLargerBatches
from hightide.observe.ranked_watch import RankedWatch
from hightide.observe.watch import Watch
from hightide.optim.optimizer import WrappedOptimizer, wrap_optimizer
from hightide.plan_again import plan_again
from hightide.planner.advice.missing import of_node
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.problem import Problem, Terms
from hightide.planner.solution import Searched, Solution
from hightide.planner.verify.check_plan import check_plan, check_states
from hightide.posing import (
    Profiled,
    is_small,
    problem_of,
    rehearsed_profile,
    solved,
    verified,
)
from hightide.process.interrupts import deferred, uninterrupted
from hightide.process.progress import progress_line, tell
from hightide.process.system import resident_bytes
from hightide.profiler.fake.values import made_up
from hightide.profiler.model.batch_sizes import BatchSizes
from hightide.profiler.model.model_profile import profile_calls
from hightide.profiler.switches import checkpointing
from hightide.runtime.known_batches import Admission, KnownBatches
from hightide.runtime.run import Run
from hightide.runtime.run_context import RunContext
from hightide.runtime.surgery import check_modules, wrap_modules
from hightide.shard.agreement import check_same
from hightide.shard.collectives import Collectives
from hightide.shard.meeting import EVEN_ALONE_SWITCH
from hightide.this_machine import machine_of, measured_products

S = TypeVar("S", bound=Solution)


def plan_for(asked: Asked) -> Plan:
    """The plan that `wrap` would use, without touching the model."""
    with deferred, progress_line("hightide.plan"), checkpointing.off(asked.model):
        profiled = profile_of(asked)
        problem = problem_of(profiled, asked.optimizer, asked.device, asked.compile, asked.terms(), asked.disks)
        return _moving_in(_searched(problem, profiled, asked), asked).plan


def wrap_model(
    asked: Asked, collectives: Collectives | None, before: Plan | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`wrap`, from its checked arguments. `collectives`: of several ranks. `before`: the plan that a run had which goes
    on."""
    model, plan = asked.model, asked.plan
    if plan is not None:
        _check_ranks(plan, collectives)
    run: Run | None = None
    optimizer: WrappedOptimizer | None = None
    try:
        with deferred, progress_line("hightide.wrap"), checkpointing.off_unless_it_fails(model):
            profiled = profile_of(asked)
            if collectives is not None:
                _check_same(asked, profiled[0], before, collectives)
            example = BatchSizes.of(asked.batch, profiled[1].samples)
            again = None if before is None else plan_again(before, asked, profiled, collectives)
            if again is not None:
                solution: Solution = again
            elif plan is not None:
                solution = _solution_of_given(plan, profiled, asked)
            elif collectives is None:
                solution = _searched_for_one(asked.terms(), profiled, asked)
            else:
                profile, example = largest_example(collectives, profiled[0], example)
                solution = _searched_for_all(profile, profiled, asked, collectives)
            if asked.device.type == "cuda":
                warn_of_moving_in((_moving_in(solution, asked) if plan or again else solution).plan)
            run = _make_run(solution, profiled, asked, collectives, example)
            optimizer = wrap_optimizer(asked.optimizer, run)
            run.fix_memory()
            wrap_modules(run)
            if isinstance(solution, Searched) and again is None:  # one of before has been watched then
                run.observer = Watch(run, solution) if collectives is None else RankedWatch(run, solution, collectives)
            elif plan is not None:  # a plan that the user brings is never changed
                warn_of_reserve(run.forecast, run.plan.gpu_limit_bytes)
            return model, optimizer  # in here: what interrupts the end of the section is still undone
    except BaseException:
        with uninterrupted:
            _undo(model, run, optimizer)
        raise


# ---- the way to a plan


def profile_of(asked: Asked) -> Profiled:
    tell("profiling the model")
    origins = origins_in(asked.model)

    def loaded(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in origins:
            return made_up(tensor)
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        origins[id(tensor)].fill(values)
        return values

    about = (asked.model, asked.optimizer, asked.batch, asked.blocks)
    if not origins:
        return profile_calls(*about, device=asked.device)
    return profile_calls(*about, device=asked.device, source=loaded)


def _check_same(asked: Asked, profile: ModelProfile, before: Plan | None, collectives: Collectives) -> None:
    """All ranks ask for the same, but for limits and batches."""
    given = "".join(one.digest for one in (asked.plan, before) if one is not None)
    asked_for = {
        "update=": str(asked.update),
        "gradients=": str(asked.gradients),
        "compile=": asked.compile,
        "accumulate=": asked.accumulate,
        "plan=": given,
        "the optimizer": asked.rule.optimizer.__name__,
    }
    check_same(collectives, {"the model": profile.fingerprint} | asked_for, details=profile.facts)


def _check_ranks(plan: Plan, collectives: Collectives | None) -> None:
    world = 1 if collectives is None else collectives.ranks.world
    if plan.ranks != world:
        raise ValueError(
            f"the plan is for {plan.ranks} ranks, and there are {world}; leave plan= out: wrap makes one for these, "
            "which hightide.stats(model).plan has"
        )
    if plan.even_alone != (collectives is not None and world == 1):
        raise ValueError(
            f"the plan has even_alone={plan.even_alone}, which goes with {EVEN_ALONE_SWITCH}={int(plan.even_alone)} in "
            "the environment; set it, or make another plan"
        )


def _solution_of_given(plan: Plan, profiled: Profiled, asked: Asked) -> Solution:
    """The solution of a plan that the user brings."""
    profile, place = profiled[0], asked.device
    check_plan(profile, plan)
    check_states(plan, asked.rule.states)
    rehearsed = partial(rehearsed_profile, profiled, asked.optimizer, place, asked.compile, plan.gpu_limit_bytes)
    solution = verified(Solution.of(profile, plan), rehearsed)
    if place.type == "cuda":
        warn_of_room(room_on(place, asked.model, asked.optimizer), plan)
    return solution.described() if plan.is_edited else solution


def _searched_for_one(terms: Terms, profiled: Profiled, asked: Asked) -> Searched:
    problem = problem_of(profiled, asked.optimizer, asked.device, asked.compile, terms, asked.disks)
    return _moving_in(_searched(problem, profiled, asked), asked)


def _searched_for_all(profile: ModelProfile, profiled: Profiled, asked: Asked, collectives: Collectives) -> Searched:
    """One plan for several ranks. `profile`: of the batch that it is made for, which may be another one's."""
    ranks, place = collectives.ranks, asked.device

    def posed(terms: Terms) -> Problem:
        if place.type == "cuda":  # one at a time: each would disturb others
            if ranks.local_rank == 0:
                machine_of(place, is_small(profiled[0]))
            collectives.exchange("measured machines", b"")
        return problem_of(profiled, asked.optimizer, place, asked.compile, terms, asked.disks, ranks.nodes)

    def search(problem: Problem) -> Searched:
        try:
            return _moving_in(_searched(problem, profiled, asked), asked)
        except InfeasiblePlan as refused:
            raise of_node(refused, asked.ranks_on_node) from None

    return plan_of_all(collectives, profile, asked.terms(), posed, search)


def _searched(problem: Problem, profiled: Profiled, asked: Asked) -> Searched:
    solution = solved(problem, profiled, asked.device, asked.compile, asked.cuts)
    solution.verify()
    return solution


def _moving_in(solution: S, asked: Asked) -> S:
    """With what the host needs meanwhile. What the process has beside it is the same for all plans only where blocks
    run on a GPU: there it has been compiled for, and has its kernels."""
    on_host = {
        name: param
        for name, param in asked.model.named_parameters()
        if param.device.type == "cpu" and not param.is_meta
    }
    states = [value for state in asked.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    waiting_bytes = sum(state.nbytes for state in states if state.device.type == "cpu")
    model_bytes = sum(param.nbytes for param in on_host.values())
    process_bytes = max(0, resident_bytes() - model_bytes - waiting_bytes) if asked.device.type == "cuda" else 0
    return solution.moving_in(set(on_host), waiting_bytes, process_bytes)


# ---- from a plan to a run


def _make_run(
    solution: Solution, profiled: Profiled, asked: Asked, collectives: Collectives | None, example: BatchSizes
) -> Run:
    """A run in which the model's values are in their places; its modules are still its own. `example`: the batch of the
    plan."""
    model, probed = asked.model, profiled[1]
    adapted = {id(param) for param in lora.adapted_parameters(model)}
    names = {name for name, param in model.named_parameters() if id(param) in adapted}
    check_modules(model, solution.profile, probed, names)
    around_call = transformers.around_call(model)
    context = RunContext(
        first_values(model),
        transformers.training_checks(model, asked.batch),
        around_call,
        KnownBatches(example.with_samples(solution.plan.num_samples), looks_on_gpu=around_call is not None),
        partial(_admission, solution, asked, collectives),
        names,
        measured_products(asked.device),
        None if collectives is None else save_pretrained,
        written_here,
    )
    seem_unloaded(model, False)
    run = Run(model, solution, probed, context, asked.device, asked.compile, disks=asked.disks, collectives=collectives)
    forget(model)  # the files from which values came
    return run


def _admission(solution: Solution, asked: Asked, collectives: Collectives | None, run: Run) -> Admission:
    """Which batches are let in: those like the example, and larger ones as the plan allows."""
    fixed = "" if asked.plan is None else "it was given by plan=, and is never changed"
    if collectives is None:
        return LargerBatches(run, solution, fixed)
    return RankedLargerBatches(run, solution, collectives, fixed)


def _undo(model: nn.Module, run: Run | None, optimizer: WrappedOptimizer | None) -> None:
    """Model and optimizer are as before a `wrap` that was interrupted, or failed. A run that could not be made has done
    so itself."""
    if optimizer is not None:
        optimizer.give_back()
    if run is not None:
        run.retreat()
        checkpointing.switch_on_again(model)
    seem_unloaded(model, True)
