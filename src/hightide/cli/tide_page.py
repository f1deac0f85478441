"""A simulated step as a page, with what it is of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hightide.ir.tier import Lane
from hightide.ir.timeline import Timeline
from hightide.ir.units import format_bytes, format_count
from hightide.planner.problem import Problem
from hightide.planner.solution import Solution
from hightide.process import files
from hightide.report.page import timeline_html

HtmlOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw memory and lanes into one HTML page.")]


def save_page(
    path: Path,
    title: str,
    solution: Solution,
    timeline: Timeline,
    problem: Problem,
    measured: Timeline | None = None,
) -> None:
    sources = f"Times of blocks: {problem.costs.source}. Lanes: {problem.machine.source}."
    facts = [f"{_facts(solution)}.", sources]
    page = timeline_html(f"{title}: the tide of one step", timeline, measured, facts, solution.plan.explain())
    files.write_text(path, page)


def _facts(solution: Solution) -> str:
    profile, plan = solution.profile, solution.plan
    numel = sum(spec.numel for spec in profile.params)
    blocks = len({call.block for call in profile.calls})
    moved = {lane: solution.passes.moved_bytes(lane) for lane in (Lane.H2D, Lane.D2H)}
    return (
        f"{format_count(numel)} parameters in {blocks} blocks, {plan.num_samples} samples in micro-batches of "
        f"{plan.micro_batch}, updates {str(plan.update).replace('_', ' ')}; {format_bytes(moved[Lane.H2D])} to the GPU "
        f"and {format_bytes(moved[Lane.D2H])} from it per step"
    )
