"""The problem that `wrap` wants solved, and its solution: the model, this machine, and what a step costs there.

[Note: small models] Measuring a machine and a model, and a thorough search, take seconds: too much for a model whose
step takes milliseconds. Those are planned with assumed speeds and by a quick search. Speeds are assumed on the
simulated accelerator too, where plans must not depend on how busy the machine is. Assumed speeds may make a plan slower
than another, never larger.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.limits import DiskLimit
from hightide.ir.machine import Machine
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.planner.disk_room import usable_bytes
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.step_seconds import with_peaks
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.calls import search_calls
from hightide.planner.search.search import search
from hightide.planner.solution import Searched, Solution
from hightide.process.interrupts import is_interrupt
from hightide.process.progress import tell
from hightide.profiler.probe.probe_record import CallRecord
from hightide.profiler.probe.probe_result import ProbeResult
from hightide.rehearsal.rehearse import let_go, measure_costs, measure_selective
from hightide.this_machine import machine_among_ranks, machine_of, with_disks

SMALL_NUMEL = 2**24  # parameters

Profiled = tuple[ModelProfile, ProbeResult, Sequence[CallRecord]]


def problem_of(
    profiled: Profiled,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    compile: bool,
    terms: Terms,
    disks: Sequence[DiskLimit] = (),
    nodes: Sequence[int] | None = None,
) -> Problem:
    """On a GPU the model is rehearsed. `nodes`: of several ranks, on which each is."""
    profile = profiled[0]
    terms.check_micro_batch(profile.num_samples)
    room = usable_bytes(profile, terms.states, [disk.num_bytes for disk in disks])
    terms = replace(terms, disk_bytes=min(terms.disk_bytes, room))
    machine = _machine_for(profile, device, disks, nodes)
    fallback = "the plan follows from estimated times: it fits, and may be slower than another"
    costs = _rehearsed(profiled, optimizer, device, compile, terms.gpu_bytes, fallback) or estimate(profile, machine)
    return Problem(with_peaks(profile, costs), costs, machine, terms, quick=is_small(profile))


def estimated_problem(
    profile: ModelProfile,
    device: torch.device,
    terms: Terms,
    disks: Sequence[DiskLimit] = (),
    nodes: Sequence[int] | None = None,
) -> Problem:
    """Without a rehearsal: for a run that has its plan already."""
    machine = _machine_for(profile, device, disks, nodes)
    return Problem(profile, estimate(profile, machine), machine, terms, quick=is_small(profile))


def _machine_for(
    profile: ModelProfile, device: torch.device, disks: Sequence[DiskLimit], nodes: Sequence[int] | None
) -> Machine:
    machine = machine_of(device, is_small(profile))
    if disks and machine.disk is None:
        machine = with_disks(machine, disks)
    return machine if nodes is None else machine_among_ranks(machine, nodes)


def solved(problem: Problem, profiled: Profiled, device: torch.device, compile: bool, cuts: bool = False) -> Searched:
    """The search begins with estimates of what is held in part, where that is compiled: it takes longer to compile than
    all the rest, so it is measured only where a plan wants it, and then searched for again. Each round measures a kind
    of call, or takes the rung away where that fails: there are at most as many as kinds. `cuts`: the batch is all of a
    step, and is cut into as many calls as are fastest."""
    find = search_calls if cuts else search
    tell("searching for a plan")
    solution = find(problem)
    while wanted := _wanted_rungs(problem, solution.plan):
        before, problem = problem, _with_measured(problem, solution.plan, wanted, profiled, device, compile)
        tell("searching for a plan", "with what was measured for it")
        try:
            solution = find(problem)
        except InfeasiblePlan:  # it takes more than anything else, and all that is planned counts with it
            problem = before.without_rungs(wanted)
            solution = find(problem)
    return solution


def _wanted_rungs(problem: Problem, plan: Plan) -> frozenset[int]:
    held = {block for block, planned in enumerate(plan.blocks) if planned.activation is Activation.SELECTIVE}
    return problem.estimated_rungs & {call.kind for call in problem.profile.calls if call.block in held}


def _with_measured(
    problem: Problem, plan: Plan, kinds: Collection[int], profiled: Profiled, device: torch.device, compile: bool
) -> Problem:
    """Measured at the plan's micro-batch; at other sizes, the estimates in proportion."""
    profile, probed, records = profiled
    size = min(plan.micro_batch, profile.num_samples)
    try:
        costs = measure_selective(profile, probed, records, problem.costs, device, compile, size, kinds)
    except Exception as error:  # as in _rehearsed
        if is_interrupt(error):
            raise
        _warn_of_no_times(device, error, "nothing is held in part of them")
        return problem.without_rungs(kinds)
    return replace(problem, profile=with_peaks(problem.profile, costs), costs=costs)


def rehearsed_profile(
    profiled: Profiled, optimizer: torch.optim.Optimizer, device: torch.device, compile: bool, gpu_bytes: int
) -> ModelProfile | None:
    """With the bytes that blocks really take, where a rehearsal can tell them."""
    costs = _rehearsed(profiled, optimizer, device, compile, gpu_bytes, "the plan is refused")
    return None if costs is None else with_peaks(profiled[0], costs)


def verified(solution: Solution, rehearsed: Callable[[], ModelProfile | None]) -> Solution:
    """A plan that does not fit the GPU may have been searched for blocks that were `rehearsed`: compiled ones take less
    than tensors without values tell."""
    try:
        solution.verify()
    except InfeasiblePlan as refusal:
        measured = rehearsed() if refusal.tier is Tier.GPU else None
        if measured is None:
            raise
        solution = Solution.of(measured, solution.plan)
        solution.verify()
    return solution


def is_small(profile: ModelProfile) -> bool:
    return sum(spec.numel for spec in profile.params) < SMALL_NUMEL


def _rehearsed(
    profiled: Profiled,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    compile: bool,
    gpu_bytes: int,
    fallback: str,
) -> Costs | None:
    profile, probed, records = profiled
    if device.type != "cuda" or is_small(profile) or probed.failure:
        return None
    sizes = rehearsed_sizes(profile, gpu_bytes)
    try:
        return measure_costs(profile, probed, records, optimizer, device, compile, sizes)
    except Exception as error:  # whatever a block raises alone, or memory that others hold
        if is_interrupt(error):
            raise
        _warn_of_no_times(device, error, fallback)
        return None


def _warn_of_no_times(device: torch.device, error: Exception, fallback: str) -> None:
    let_go(device)
    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    warnings.warn(f"blocks cannot be timed alone ({reason}); {fallback}", stacklevel=5)


def rehearsed_sizes(profile: ModelProfile, gpu_bytes: int) -> list[int]:
    """One sample, a quarter of the batch, and all of it; less where a block would not fit alone."""
    num_samples = profile.num_samples
    sizes = sorted({1, -(-num_samples // 4), num_samples})
    return [size for size in sizes if size == 1 or _largest_block_bytes(profile, size) <= gpu_bytes]


def _largest_block_bytes(profile: ModelProfile, num_samples: int) -> int:
    """Parameters and gradient; activations, and what enters and leaves, forward and backward. The logits of a head that
    is fused with the loss never exist."""
    params = {spec.name: spec for spec in profile.params}
    largest = 0
    for call in profile.calls:
        if profile.blocks[call.block].lazy_head:
            continue
        numel = sum(params[key].numel for key in profile.blocks[call.block].params)
        beside = call.new_inputs.at(num_samples) + call.saved_inputs.at(num_samples) + call.outputs.at(num_samples)
        inside = call.kept.at(num_samples) + call.backward_peak.at(num_samples)
        largest = max(largest, 8 * numel + 2 * beside + inside)
    return largest
