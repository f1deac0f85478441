"""`hightide plan`: whether and how fast a model would train, before anything is there: no weights, no GPU."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from hightide.cli.plan_text import show
from hightide.cli.target import JsonOption, check_target, writing
from hightide.cli.tide_page import HtmlOption, save_page
from hightide.cli.workload import (
    CPU,
    GPU,
    LENGTH,
    SEQUENCES,
    Dtype,
    GradientsOption,
    LoraOption,
    MachineOption,
    ModelArgument,
    UpdateOption,
    Workload,
    check_source,
    chosen_machine,
    load_workload,
)
from hightide.free_memory import GPU_HEADROOM
from hightide.integrations.lora import Lora
from hightide.integrations.model_files import errors_only
from hightide.ir.block import ModelProfile
from hightide.ir.codec import to_json
from hightide.ir.limits import parse_disks
from hightide.ir.machine import Machine
from hightide.ir.plan import GradientDtype, Update
from hightide.ir.units import parse_bytes
from hightide.planner.advice.helpful import Circumstances, fitting, improvements
from hightide.planner.advice.why import find_block, why
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.one_rank import machine_of_rank
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.peaks import is_real
from hightide.planner.predict.tide import simulated_timeline
from hightide.planner.predict.wear import parse_rating
from hightide.planner.problem import Problem, Terms
from hightide.planner.search.calls import in_calls, leanest_cuts, search_calls
from hightide.planner.search.replicas import search_groups
from hightide.planner.search.search import search
from hightide.planner.solution import Searched
from hightide.process.system import HEADROOM
from hightide.report.outlook import PlanReport, outlook, refusal, scaling, subject

# Seconds of the process's own time: what else the machine does matters less to it.
ANSWER_S = 7.5  # what is left of it when a plan is found goes into what would help
TRY_SHARE = 0.6  # of the time of the search: so long takes one change that might help
LEAST_TRIES = 2  # however late it is; but none for
LARGE_STEP = 2000  # actions or more, as gpt-175b has them with a disk: it would take longer than 10 s
HELP_S = 2.0  # at least, for what would make a model fit that does not


@dataclass(frozen=True)
class PlanOptions:
    model: ModelArgument
    sequences: Annotated[int | None, typer.Option(help=f"Sequences per step; default {SEQUENCES}.")] = None
    length: Annotated[
        int | None, typer.Option(help=f"Tokens per sequence; default {LENGTH}, or the model's maximum.")
    ] = None
    gpus: Annotated[int, typer.Option(help="GPUs per node that train together, each with such a batch.")] = 1
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1
    gpu: Annotated[str | None, typer.Option(metavar="SIZE", help="GPU memory to use; default: the machine's.")] = None
    host: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory of a node to use; default: the machine's.")
    ] = None
    disk: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER:SIZE", help="A local disk for what the host cannot hold. Repeat for several."),
    ] = None
    endurance: Annotated[
        str | None, typer.Option(metavar="RATING", help="How much may be written to the disk in its life, e.g. 600TBW.")
    ] = None
    machine: MachineOption = None
    dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype of the parameters; default: the config's, or bfloat16.")
    ] = None
    lora: LoraOption = None
    update: UpdateOption = Update.DEFERRED
    clip: Annotated[bool, typer.Option("--clip", help="Your loop clips gradients (updates are then deferred).")] = False
    gradients: GradientsOption = GradientDtype.FLOAT32
    calls: Annotated[int | None, typer.Option(help="Forward/backward calls per step; default: the plan decides.")] = (
        None
    )
    micro_batch: Annotated[int | None, typer.Option(help="Samples per micro-batch; default: the plan decides.")] = None
    look: Annotated[float, typer.Option(metavar="SECONDS", help="Spend at least this long on what would help.")] = 0.0
    why: Annotated[
        str | None, typer.Option(metavar="BLOCK", help="Show what other plans for this block would cost.")
    ] = None
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan, for wrap(plan=...).")] = None
    html: HtmlOption = None
    as_json: JsonOption = False


@contextmanager
def _uncollected() -> Iterator[None]:
    """Torch and the model are many objects, and to look through them for garbage, at the end of the process too, takes
    longer than it is worth: what is left behind are a few megabytes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@_uncollected()
def plan(options: PlanOptions, device: torch.device, console: Console, notes: Console) -> bool:
    """Whether it fits. Results go to `console`, everything else to `notes`."""
    _check(options)
    check_source(options.model)
    node = chosen_machine(options.machine, device, notes)
    machine = machine_of_rank(node, options.gpus, options.nodes)
    lora = Lora.parse(options.lora) if options.lora is not None else None
    with notes.status("profiling the model, without its values") as status:
        workload = load_workload(options.model, options.sequences, options.length, options.dtype, lora)
        with errors_only("transformers"):
            profile = workload.profile(GPU if is_real(machine) else CPU)
        _check_against(profile, options)
        costs = estimate(profile, machine)
        terms = replace(_terms(options, machine), ranks=options.gpus * options.nodes)
        problem = Problem(profile, costs, machine, terms)
        status.update("searching a plan")
        before_s = time.process_time()
        try:
            found = _searched(options, workload, problem)
        except InfeasiblePlan as refused:
            if refused.tier is None:
                raise
            status.update("searching what would fit")
            may_go_on = _clock(ANSWER_S - HELP_S, max(HELP_S, options.look), 0)
            is_one = problem.terms.ranks == 1
            step = in_calls(problem, refused.num_calls)
            cuts = leanest_cuts(problem) if _cuts_calls(options, workload) else ()
            circumstances = _circumstances(options, workload, step)
            fits = fitting(step, refused, circumstances, may_go_on, cuts) if is_one else ()
            report = PlanReport(subject(workload.name, problem), False, None, refusal(refused, problem), would_fit=fits)
        else:
            status.update("searching what would help")
            may_go_on = _help_clock(found, time.process_time() - before_s, options.look)
            report = _report(options, workload, found, may_go_on)
            if found.plan.ranks > 1:
                report = replace(report, scaling=scaling(found, _alone(options, workload, profile, node)))
            _write(options, workload.name, found)
    if options.as_json:
        console.print(to_json(report), markup=False, soft_wrap=True)
    else:
        show(console, report, found.plan.explain() if report.fits else "")
    if options.why is not None and not report.fits:
        notes.print(f"no answer to --why {options.why}: there is no plan", markup=False, soft_wrap=True)
    for path in (options.save, options.html):
        if path is not None:
            notes.print(f"written: {path}" if report.fits else f"not written: {path}", markup=False, soft_wrap=True)
    return report.fits


def _terms(options: PlanOptions, machine: Machine) -> Terms:
    return Terms(
        *_limits(options, machine),
        options.update,
        options.micro_batch,
        gradients=options.gradients,
        disk_bytes=_disk_bytes(options, machine),
        in_parts=True,  # by AdamW
    )


def _alone(options: PlanOptions, workload: Workload, profile: ModelProfile, node: Machine) -> Searched | None:
    """On one GPU that has the node to itself. None: it does not fit."""
    options = replace(options, gpus=1, nodes=1)
    terms = _terms(options, node)
    try:
        return _searched(options, workload, Problem(profile, estimate(profile, node), node, terms))
    except InfeasiblePlan:
        return None


def _searched(options: PlanOptions, workload: Workload, problem: Problem) -> Searched:
    return search_groups(problem, lambda one: _searched_calls(options, workload, one))


def _searched_calls(options: PlanOptions, workload: Workload, problem: Problem) -> Searched:
    """In as many calls as asked for, else in as many as are fastest. A batch of the model's own is one call."""
    if options.calls is not None:
        return search(in_calls(problem, options.calls))
    return search_calls(problem) if _cuts_calls(options, workload) else search(problem)


def _cuts_calls(options: PlanOptions, workload: Workload) -> bool:
    return options.calls is None and not workload.has_own_batch


def _check(options: PlanOptions) -> None:
    if options.clip and options.update is Update.IN_BACKWARD:
        raise ValueError("--clip needs all gradients before the first update; use --update deferred with it")
    if options.gpus < 1 or options.nodes < 1:
        raise ValueError(f"--gpus {options.gpus} --nodes {options.nodes}: at least one GPU of one node trains")
    if not options.look >= 0:
        raise ValueError(f"--look {options.look:g} is no number of seconds; write 0 or more, such as --look 30")
    if options.endurance is not None:
        parse_rating(options.endurance, "--endurance")
    check_target("--save", options.save)
    check_target("--html", options.html)


def _check_against(profile: ModelProfile, options: PlanOptions) -> None:
    """Before the search, and in the words of the command."""
    size, num_samples = options.micro_batch, profile.num_samples
    if size is not None and not 1 <= size <= num_samples:
        raise ValueError(
            f"--micro-batch {size} does not fit the batch of {num_samples} samples; choose a number from 1 to "
            f"{num_samples}, or leave it out"
        )
    if options.why is not None:
        find_block([block.name for block in profile.blocks], options.why)


def _limits(options: PlanOptions, machine: Machine) -> tuple[int, int]:
    """By default what the machine has, less what `wrap` leaves to others."""
    if (options.gpu is None and machine.gpu is None) or (options.host is None and machine.host is None):
        raise ValueError(f"the machine {machine.name!r} does not say how much memory it has; give --gpu and --host")
    gpu_bytes = parse_bytes(options.gpu, "--gpu") if options.gpu is not None else _gpu_memory_bytes(machine)
    if options.host is not None:
        return gpu_bytes, parse_bytes(options.host, "--host") // options.gpus
    assert machine.host is not None
    return gpu_bytes, int(machine.host.memory_bytes * HEADROOM)


def _disk_bytes(options: PlanOptions, machine: Machine) -> int:
    """Nothing is written there yet. Folders of another machine need not be here."""
    disks = parse_disks(options.disk or (), "--disk")
    for path in (Path(disk.path) for disk in disks):
        if path.exists() and not path.is_dir():
            raise ValueError(f"--disk {path} is no folder; name one, such as --disk {path.absolute().parent}:200GiB")
        if not path.exists() and options.machine is None:
            raise ValueError(f"--disk {path}: there is no such folder on this machine; make it, or name another")
    if disks and machine.disk is None:
        raise ValueError(
            f"--disk {disks[0].path}: the machine {machine.name!r} has no rates for a disk; "
            "measure it with `hightide doctor --disk FOLDER`, or name a preset"
        )
    return sum(disk.num_bytes for disk in disks) // options.gpus


def _gpu_memory_bytes(machine: Machine) -> int:
    return int(machine.gpu.memory_bytes * GPU_HEADROOM) if machine.gpu is not None else 0


def _circumstances(options: PlanOptions, workload: Workload, problem: Problem) -> Circumstances:
    return Circumstances(_gpu_memory_bytes(problem.machine), options.clip, workload.has_own_batch)


def _report(options: PlanOptions, workload: Workload, found: Searched, may_go_on: Callable[[], bool]) -> PlanReport:
    reasons = why(found, options.why) if options.why is not None else None
    is_one = found.plan.ranks == 1  # what is tried are the options of one
    helpful = improvements(found, _circumstances(options, workload, found.problem), may_go_on) if is_one else None
    about = subject(workload.name, found.problem)
    rated_bytes = parse_rating(options.endurance, "--endurance") if options.endurance is not None else None
    return PlanReport(about, True, outlook(found, rated_bytes), None, would_help=helpful, why=reasons)


def _write(options: PlanOptions, name: str, found: Searched) -> None:
    if options.save is not None:
        with writing("--save", options.save):
            found.plan.save(options.save)
    if options.html is not None:
        timeline = simulated_timeline(found, found.step.simulated, found.problem.machine)
        with writing("--html", options.html):
            save_page(options.html, name, found, timeline, found.problem)


def _help_clock(found: Searched, search_s: float, look_s: float) -> Callable[[], bool]:
    num_least = LEAST_TRIES if len(found.step.simulated.spans) < LARGE_STEP else 0
    return _clock(ANSWER_S - TRY_SHARE * search_s, look_s, num_least)


def _clock(end_s: float, least_s: float, num_least: int) -> Callable[[], bool]:
    """Whether there is time for one more: until the process is so old, for `least_s` from now, for the first few."""
    end_s = max(end_s, time.process_time() + least_s)
    numbers = itertools.count()
    return lambda: next(numbers) < num_least or time.process_time() < end_s
