"""A simulated step as a page, with what it is of."""

from __future__ import annotations

from pathlib import Path

from hightide import files
from hightide.ir.action import Mode
from hightide.ir.block import ModelProfile
from hightide.ir.costs import Costs
from hightide.ir.machine import Machine
from hightide.ir.plan import Plan
from hightide.ir.tier import Lane
from hightide.ir.timeline import Timeline
from hightide.ir.units import format_bytes
from hightide.planner.lower import lower
from hightide.report.page import timeline_html


def save_page(
    path: Path,
    title: str,
    profile: ModelProfile,
    plan: Plan,
    timeline: Timeline,
    costs: Costs,
    machine: Machine,
    measured: Timeline | None = None,
) -> None:
    facts = [f"{_facts(profile, plan)}.", f"Times of blocks: {costs.source}. Lanes: {machine.source}."]
    page = timeline_html(f"{title}: the tide of one step", timeline, measured, facts, plan.explain())
    files.write_text(path, page)


def count(numel: int) -> str:
    """Short text for people: 8030261248 -> '8.03B'."""
    return f"{numel / 1e9:.2f}B" if numel >= 1e9 else f"{numel / 1e6:.2f}M"


def _facts(profile: ModelProfile, plan: Plan) -> str:
    numel = sum(spec.numel for spec in profile.params)
    blocks = len({call.block for call in profile.calls})
    moved = {Lane.H2D: 0, Lane.D2H: 0}
    for action in lower(profile, plan, Mode.TRAIN).actions:
        if action.lane in moved:
            moved[action.lane] += action.num_bytes
    return (
        f"{count(numel)} parameters in {blocks} blocks, {plan.num_samples} samples in micro-batches of "
        f"{plan.micro_batch}, updates {str(plan.update).replace('_', ' ')}; {format_bytes(moved[Lane.H2D])} to the GPU "
        f"and {format_bytes(moved[Lane.D2H])} from it per step"
    )
