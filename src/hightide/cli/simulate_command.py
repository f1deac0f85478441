"""`hightide simulate`: a step of a plan as it will go by, in numbers and as a page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from hightide.cli.target import check_target, writing
from hightide.cli.tide_page import HtmlOption, save_page
from hightide.cli.train.run_folder import PLAN, TIMELINE
from hightide.cli.workload import MachineOption, chosen_machine
from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.plan import Plan
from hightide.ir.timeline import Timeline
from hightide.ir.units import format_seconds
from hightide.planner.one_rank import machine_of_plan
from hightide.planner.predict.estimate import estimate
from hightide.planner.predict.step_seconds import StepForecast, forecast
from hightide.planner.predict.tide import simulated_timeline
from hightide.planner.problem import Problem, Terms
from hightide.planner.solution import Solution
from hightide.planner.verify.check_plan import check_costs, check_plan, check_profile
from hightide.planner.verify.verify_schedule import verify_step
from hightide.report.summary import gpu_room, limiting, rows


@dataclass(frozen=True)
class SimulateOptions:
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN.json|FOLDER", help="A plan file, or a run folder of `hightide train --record`."),
    ]
    machine: MachineOption = None
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measured times of blocks; default: estimated.")
    ] = None
    measured: Annotated[Path | None, typer.Option(metavar="FILE", help="A recorded step to show beside it.")] = None
    html: HtmlOption = None
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the simulated step as JSON.")] = None


def simulate(options: SimulateOptions, device: torch.device, console: Console) -> None:
    options = _look_into_folder(options)
    check_target("--html", options.html)
    check_target("--json", options.json)
    plan = Plan.load(options.plan)
    profile = _profile(plan, options.plan)
    machine = machine_of_plan(chosen_machine(options.machine, device, console), plan)
    costs = Costs.load(options.costs) if options.costs is not None else estimate(profile, machine)
    check_costs(profile, costs)
    measured = _measured(options.measured, plan)
    solution, problem = Solution.of(profile, plan), Problem(profile, costs, machine, Terms.of(plan))
    verify_step(profile, solution.placement, solution.passes)
    step = forecast(problem, solution.placement, solution.passes)
    timeline = simulated_timeline(solution, step.simulated, machine)
    _show(console, step, timeline, measured, costs)
    if options.json is not None:
        with writing("--json", options.json):
            timeline.save(options.json)
        console.print(f"timeline: {options.json}", soft_wrap=True)
    if options.html is not None:
        with writing("--html", options.html):
            save_page(options.html, _title(options.plan), solution, timeline, problem, measured)
        console.print(f"page: {options.html}", soft_wrap=True)


def _look_into_folder(options: SimulateOptions) -> SimulateOptions:
    """A run folder has a plan and, where it was recorded, a step of that plan."""
    if not options.plan.is_dir():
        return options
    recorded = options.plan / TIMELINE
    measured = options.measured or (recorded if recorded.exists() else None)
    return replace(options, plan=options.plan / PLAN, measured=measured)


def _title(path: Path) -> str:
    return path.absolute().parent.name if path.name == PLAN else path.stem


def _profile(plan: Plan, path: Path) -> ModelProfile:
    if plan.profile is None:
        raise ValueError(
            f"the plan {path} does not contain the profile that it was made from, so there is nothing to simulate; "
            "make it again with hightide.plan(model, optimizer, batch).save(path)"
        )
    check_profile(plan.profile)
    check_plan(plan.profile, plan)
    return plan.profile


def _measured(path: Path | None, plan: Plan) -> Timeline | None:
    if path is None:
        return None
    timeline = Timeline.load(path)
    if timeline.fingerprint != plan.fingerprint:
        raise ValueError(
            f"{path} was recorded of another model: it has the fingerprint {timeline.fingerprint}, the plan has "
            f"{plan.fingerprint}; record a run of this plan with hightide.record(model)"
        )
    return timeline


def _show(console: Console, step: StepForecast, simulated: Timeline, measured: Timeline | None, costs: Costs) -> None:
    timelines = [simulated] if measured is None else [simulated, measured]
    table = Table("", box=None, pad_edge=False, header_style="bold")
    for heading in ("simulated", "measured", "difference")[: 3 if measured is not None else 1]:
        table.add_column(heading, justify="right")
    for row in rows(timelines):
        table.add_row(row.name, *row.cells, *([row.difference] if measured is not None else []))
    console.print(f"{simulated.source}; times of blocks {costs.source}", markup=False, soft_wrap=True)
    console.print(table)
    busiest = limiting(simulated)
    share = busiest.busy_s / simulated.step_s
    console.print(f"limit: {busiest.lane} ({busiest.lane.meaning}), busy {share:.0%} of the step")
    console.print(gpu_room(simulated))
    if step.issue_s > simulated.step_s:
        console.print(
            f"the thread that runs the model needs {format_seconds(step.issue_s)}, more than the GPU: use "
            "larger micro-batches, or wrap(..., compile=True)"
        )
