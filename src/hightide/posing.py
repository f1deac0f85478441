"""The problem that `wrap` has solved: the machine that it runs on, and what a step costs there.

[Note: small models] Measuring a machine and a model, and a thorough search, take seconds: too much for a model whose
step takes milliseconds. Those are planned with assumed speeds and by a quick search. Speeds are assumed on the
simulated accelerator too, where plans must not depend on how busy the machine is. Assumed speeds may make a plan slower
than another, never larger.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from hightide.doctor.disk_speed import DiskTest, measure_disk
from hightide.doctor.known import known_machine, load_machine, remember
from hightide.doctor.measure import examine
from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.limits import DiskLimit
from hightide.ir.machine import SIMULATED, Disk, Estimate, Machine, MatmulRates
from hightide.ir.plan import Plan
from hightide.ir.tier import Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.one_rank import machine_of_rank
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

SMALL_NUMEL = 2**24  # parameters
ASSUMED = "rtx-3090"  # a preset
ASSUMED_LINKS, ASSUMED_NETWORK = "4x-rtx-4090", "4-nodes-8x-h100"  # presets with several GPUs

QUICK_DISK = DiskTest(Path(), file_bytes=4 << 30, sustained_s=4.0, phase_s=1.5, small_s=0.2)

_disturbed: dict[torch.device, Machine] = {}  # measured by this process, and not kept for others
_measured_disks: dict[Path, Disk] = {}  # likewise; `hightide doctor --disk` measures thoroughly, and keeps it

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
        machine = with_disk(machine, disks[0])
    return machine if nodes is None else _of_rank(machine, nodes)


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


def machine_of(device: torch.device, is_small: bool) -> Machine:
    if device.type != "cuda":
        return simulated_machine()
    known = known_machine(device)
    if known.machine is not None:
        return known.machine
    if is_small:
        return load_machine(ASSUMED)
    if device in _disturbed:
        return _disturbed[device]
    warnings.warn(f"{known.problem}: `hightide doctor` runs now, once, for about 10 s", stacklevel=4)
    report = examine(device, tell=lambda detail: tell("measuring this machine", detail))
    if report.is_undisturbed:
        with suppress(OSError):  # nowhere to keep it: the next run measures again, and says so
            remember(report.machine)
    else:
        warnings.warn(
            "other programs used the machine while it was measured (its cores, or memory of its GPU), so forecasts may "
            "be too slow. The next process measures again; `hightide doctor` says what was in use, and keeps what it "
            "measures",
            stacklevel=4,
        )
        _disturbed[device] = report.machine
    return report.machine


def _of_rank(machine: Machine, nodes: Sequence[int]) -> Machine:
    """What one of several ranks has of it. Between GPUs of which nobody has measured it, as in a preset. Where
    nodes have different numbers of ranks, everything between ranks is taken for as slow as it is across nodes."""
    counts = Counter(nodes)
    gpus, num_nodes = max(counts.values()), len(counts)
    links = machine.links
    if links is None or links.gpus_per_node < gpus or links.num_nodes < num_nodes:
        like = load_machine(ASSUMED_LINKS if num_nodes == 1 else ASSUMED_NETWORK)
        assert like.links is not None
        links = replace(like.links, gpus_per_node=gpus, num_nodes=num_nodes)
        told = Estimate("links", f"taken for those of {like.name}")
        machine = replace(machine, links=links, estimates=(*machine.estimates, told))
    own = machine_of_rank(machine, gpus, num_nodes)
    if len(set(counts.values())) > 1 or len(nodes) == 1:
        return replace(own, links=replace(links, gpus_per_node=1, num_nodes=len(nodes)))
    return own


def with_disk(machine: Machine, limit: DiskLimit) -> Machine:
    """With the speeds of a folder's disk, measured in a few seconds, or taken for those of a preset."""
    folder = Path(limit.path)
    if folder not in _measured_disks:
        size = min(QUICK_DISK.file_bytes, limit.num_bytes) // 2**20 * 2**20
        try:
            test = replace(QUICK_DISK, folder=folder, file_bytes=size)
            _measured_disks[folder] = measure_disk(test, lambda detail: tell("measuring this machine", detail))
        except ValueError as error:
            disk = load_machine(ASSUMED).disk
            assert disk is not None
            warnings.warn(
                f"the disk of {folder} cannot be measured ({error}); the plan follows from the speed of {disk.name}: "
                "it fits, and may be slower than another",
                stacklevel=5,
            )
            source = f"taken for {disk.name}"
            return replace(machine, disk=disk, estimates=(*machine.estimates, Estimate("disk", source)))
    return replace(machine, disk=_measured_disks[folder])


def measured_products(device: torch.device) -> MatmulRates | None:
    """What doctor has found this GPU to reach. None: nobody has measured it. Nothing is measured here."""
    if device.type != "cuda":
        return None
    machine = known_machine(device).machine or _disturbed.get(device)
    return None if machine is None else machine.measured_products


@cache
def simulated_machine() -> Machine:
    """The simulated accelerator is taken for a small GPU that nobody has."""
    machine = load_machine(ASSUMED)
    assert machine.gpu is not None
    return replace(machine, name=SIMULATED, gpu=replace(machine.gpu, name=SIMULATED))


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
