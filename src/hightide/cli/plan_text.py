"""The output of `hightide plan`. Fits 80 columns."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hightide.ir.tier import Lane
from hightide.ir.units import format_bytes, format_count, format_flop, format_seconds
from hightide.planner.advice.explain import WIDTH
from hightide.planner.advice.helpful import Change, Improvements
from hightide.planner.advice.why import NOISE, Reasons
from hightide.planner.predict.wear import in_words
from hightide.report.outlook import Outlook, PlanReport, Refusal, Scaling, Subject


def show(console: Console, report: PlanReport, plan_text: str) -> None:
    """`plan_text`: the plan in words, if there is one."""
    for line in _subject(report.subject):
        console.print(line, markup=False)
    console.print()
    if report.outlook is not None:
        head, _, rest = plan_text.partition("\n")
        console.print(head, style="bold green", markup=False)
        _outlook(console, report.outlook)
        if report.scaling is not None:
            _scaling(console, report.subject, report.scaling)
        console.print(rest, markup=False)
    if report.refusal is not None:
        _refusal(console, report.refusal, report.would_fit, report.subject.gpus_per_node * report.subject.nodes)
    if report.why is not None:
        console.print()
        _why(console, report.why)
    if report.would_help is not None:
        console.print()
        _help(console, report.would_help)


def _subject(subject: Subject) -> list[str]:
    trained = subject.num_trained_params
    share = "" if trained == subject.num_params else f", {format_count(trained)} trained"
    tokens = f" x {subject.tokens_per_sample} tokens" if subject.tokens_per_sample > 1 else " samples"
    source = "measured" if subject.machine_is_measured else "estimated"
    limits = f"GPU {format_bytes(subject.gpu_limit_bytes)}, host {format_bytes(subject.host_limit_bytes)}"
    limits += f", disk {format_bytes(subject.disk_limit_bytes)}" if subject.disk_limit_bytes else ""
    is_one = subject.gpus_per_node * subject.nodes == 1
    nodes = "" if subject.nodes == 1 else f"{subject.nodes} nodes of "
    return [
        f"{subject.model}: {format_count(subject.num_params)} parameters{share}",
        f"{subject.num_samples}{tokens} per step{'' if is_one else ' and GPU'} on {subject.machine} ({source})",
        *([] if is_one else [f"ranks: {nodes}{subject.gpus_per_node} GPUs, a batch each"]),
        f"limits{'' if is_one else ' of each rank'}: {limits}",
    ]


def _outlook(console: Console, outlook: Outlook) -> None:
    speed = (
        f"{outlook.samples_per_s:.2f} samples/s"
        if outlook.tokens_per_s is None
        else f"{outlook.tokens_per_s:,.0f} tokens/s"
    )
    floor = max(outlook.lanes, key=lambda one: one.floor_s)
    console.print(f"  {format_seconds(outlook.step_s)} per step, {speed}")
    alone = "without recomputation" if floor.lane is Lane.COMPUTE else "alone"
    share = f"{format_seconds(outlook.floor_s)}, {outlook.floor_share:.0%} of the step"
    console.print(_wrapped(f"  floor: {share}: {floor.lane} ({floor.lane.meaning}) {alone}"))
    if outlook.light_s is not None:
        rate = f"{format_flop(outlook.needed_flop)} at {format_flop(outlook.needed_flop / outlook.light_s)}/s"
        share = f"{format_seconds(outlook.light_s)}, {outlook.light_share:.0%} of the step"
        console.print(_wrapped(f"  speed of light: {share}: {rate}"))
    lanes = [one for one in outlook.lanes if one.busy_s or one.lane.always_shown]
    shares = {one.lane: one.busy_s / outlook.step_s for one in lanes}
    others = ", ".join(f"{lane} {share:.0%}" for lane, share in shares.items() if lane is not outlook.limiting_lane)
    limit = outlook.limiting_lane
    console.print(_wrapped(f"  limit: {limit} ({limit.meaning}), busy {shares[limit]:.0%} of the step; {others}"))
    if outlook.wear is not None:
        console.print(_wrapped(f"  disk: {in_words(outlook.wear)}"))


def _scaling(console: Console, subject: Subject, scaling: Scaling) -> None:
    tokens = subject.tokens_per_sample
    unit = "tokens/s" if tokens > 1 else "samples/s"
    ranks = subject.gpus_per_node * subject.nodes
    if scaling.alone_samples_per_s is None:
        console.print("  scaling: one GPU of this machine alone cannot hold it")
    else:
        alone = f"{scaling.alone_samples_per_s * tokens:,.{0 if tokens > 1 else 2}f} {unit}"
        console.print(f"  scaling: {scaling.efficiency:.0%} of {ranks} times one GPU alone ({alone})")
    if subject.nodes > 1:
        way = (
            f"inside each of {scaling.replicas} groups of nodes" if scaling.replicas > 1 else f"over all {ranks} ranks"
        )
        console.print(f"  shards: {way}")
    disk = f", {format_bytes(scaling.node_disk_bytes)} of disk" if scaling.node_disk_bytes else ""
    console.print(f"  a node, all its ranks: {format_bytes(scaling.node_host_bytes)} of host memory{disk}")


def _refusal(console: Console, refusal: Refusal, changes: tuple[Change, ...], ranks: int) -> None:
    missing = " and ".join(
        f"{format_bytes(one.missing_bytes)} ({one.missing_bytes} bytes) short on the {one.tier}"
        for one in refusal.shortages
    )
    console.print(Text.assemble(("DOES NOT FIT", "bold red"), f": {missing}"))
    peak = f"the peak is {refusal.when}" if refusal.moment else "it is short throughout the step"
    console.print(peak, markup=False)
    console.print()
    if ranks > 1:
        console.print("what would make it fit is looked for with one GPU only; more of them, or more memory, would")
        return
    if not changes:
        console.print("no single change was found that would make it fit")
        return
    console.print("what would make it fit, any one of these", style="bold")
    _rows(console, [(change.text, change.option) for change in changes])


def _help(console: Console, helpful: Improvements) -> None:
    if not helpful.found:
        console.print(_wrapped(_no_help(helpful), indent="  "), markup=False)
        return
    console.print("what would help, at least", style="bold")
    _rows(console, [(f"{one.speedup:.2f}x", one.change.text, one.change.option) for one in helpful.found])
    if helpful.untried:
        names = "; ".join(change.text for change in helpful.untried)
        text = f"not tried, time was up: {names}; to try them: {helpful.look_longer}"
        console.print(Padding(Text(text, style="dim"), (0, 0, 0, 2), expand=False))


def _no_help(helpful: Improvements) -> str:
    if not helpful.untried:
        return "what would help: nothing that was tried: more memory, other timing, a larger batch"
    tried = f"nothing of what was tried ({helpful.num_tried})" if helpful.num_tried else "nothing was tried"
    options = ", ".join(change.option or change.text for change in helpful.untried)
    return f"what would help: {tried}, the time was up; to look longer: {helpful.look_longer}; not tried: {options}"


def _why(console: Console, reasons: Reasons) -> None:
    console.print(Text(f"why {reasons.block}", style="bold"))
    console.print(Padding(Text(f"planned: {reasons.planned}"), (0, 0, 0, 2), expand=False))
    if not reasons.alternatives:
        console.print("  no other way to plan it would change its time or its bytes")
        return
    table = Table("instead", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("step", "GPU peak", "host", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for one in reasons.alternatives:
        table.add_row(
            one.text,
            _signed(one.step_difference_s, format_seconds(abs(one.step_difference_s)), NOISE * one.step_s),
            _signed(one.gpu_difference_bytes, format_bytes(abs(one.gpu_difference_bytes))),
            _signed(one.host_difference_bytes, format_bytes(abs(one.host_difference_bytes))),
            "too much" if one.too_many_bytes else "fits",
        )
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _signed(value: float, text: str, least: float = 0.0) -> str:
    return "0" if abs(value) <= least else ("+" if value > 0 else "-") + text


def _rows(console: Console, rows: list[tuple[str, ...]]) -> None:
    """The last cell is an option of the command. An empty column of them would take room from the others."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    has_options = any(row[-1] for row in rows)
    for *cells, option in rows:
        table.add_row(*cells, *([Text(option, style="cyan")] if has_options else []))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _wrapped(text: str, indent: str = "    ") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
