"""One self-contained HTML page: GPU memory over a step, the lanes below it; a measured step under a simulated one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources

from hightide.ir.action import Op
from hightide.ir.tier import ChunkKind
from hightide.ir.timeline import Bar, MemoryPart, Timeline
from hightide.ir.units import format_seconds
from hightide.report.summary import gpu_room, rows, worst_waits

# One colour stands for one thing, in memory and on the lanes. Its value for light and dark is in page.css.
PART_COLOURS = {
    MemoryPart.PERSISTENT: "states",
    MemoryPart.SLOTS: "params",
    MemoryPart.GRADIENTS: "grads",
    MemoryPart.BATCH: "other",
    MemoryPart.INPUTS: "inputs",
    MemoryPart.KEPT: "forward",
    MemoryPart.SELECTIVE: "selective",
    MemoryPart.SWAPPED: "swap",
    MemoryPart.TRANSIENTS: "backward",
    MemoryPart.REST: "inputs",
}
PART_LABELS = {MemoryPart.TRANSIENTS: "transients, with what is recomputed"}  # else as they are called
BAR_COLOURS = {
    "forward": "forward",
    "backward": "backward",
    "update": "states",
    "parameters move": "params",
    "gradients move": "grads",
    "states move": "states",
    "block inputs move": "inputs",
    "activations swap": "swap",
    "other": "other",
}
_NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.UPDATE: "update",
    Op.SETTLE: "update",
    Op.STASH: "block inputs move",
    Op.UNSTASH: "block inputs move",
    Op.WRITE_BACK: "gradients move",
    Op.CLEAR: "gradients move",
    Op.SUM: "gradients move",
    Op.LOOK_UP: "parameters move",
    Op.GATHER: "parameters move",
    Op.REDUCE: "gradients move",
}
_MOVED = {
    ChunkKind.PARAM: "parameters move",
    ChunkKind.GRAD: "gradients move",
    ChunkKind.STATE: "states move",  # with the parameters and gradients that lie beside them on disk
}


def timeline_html(
    title: str, simulated: Timeline, measured: Timeline | None = None, facts: Sequence[str] = (), plan_text: str = ""
) -> str:
    """`facts` are lines under the title, `plan_text` is the plan in words."""
    timelines = [simulated] if measured is None else [simulated, measured]
    shown = [_panel(timeline) for timeline in timelines]
    lines = [*facts, *(f"Shown: {one.source}." for one in timelines if one.is_part)]
    data = json.dumps({"seconds": max(one.step_s for one in timelines), "panels": shown}, separators=(",", ":"))
    script = data.replace("<", "\\u003c")  # nothing in it can end the script
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title>",
        f"<style>{_resource('page.css')}</style>",
        f"<header><h1>{escape(title)}</h1>{''.join(f'<p>{escape(fact)}</p>' for fact in lines)}</header>",
        "<main>",
        '<noscript><p class="note">The pictures need JavaScript; the numbers below do not.</p></noscript>',
        '<div id="charts"></div>',
        f'<div class="tables">{_summary(timelines)}{"".join(_waits(timeline) for timeline in timelines)}</div>',
        f"<details><summary>The plan</summary><pre>{escape(plan_text)}</pre></details>" if plan_text else "",
        "</main>",
        f'<script id="data" type="application/json">{script}</script>',
        f"<script>{_resource('page.js')}</script>",
        "</html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _panel(timeline: Timeline) -> dict[str, object]:
    names, lanes = list(BAR_COLOURS), [one.lane for one in timeline.lanes]
    return {
        "title": timeline.source,
        "step": _seconds(timeline.step_s),
        "peak": timeline.gpu_peak_bytes,
        "reserved": timeline.gpu_reserved_bytes,
        "limit": timeline.gpu_limit_bytes,
        "away": _away(timeline),
        "parts": [[PART_LABELS.get(part, str(part)), PART_COLOURS[part]] for part in timeline.parts],
        "levels": [[_seconds(level.at_s), *level.num_bytes] for level in timeline.levels],
        "lanes": [[str(lane), lane.meaning] for lane in lanes],
        "names": [[name, BAR_COLOURS[name]] for name in names],
        "bars": [
            [
                lanes.index(bar.lane),
                names.index(_name(bar)),
                _seconds(bar.start_s),
                _seconds(bar.end_s),
                bar.id,
                bar.num_bytes,
                _seconds(bar.waited_s),
                bar.waited_for,
                int(bar.earlier),
                *([bar.held_bytes] if bar.held_bytes else []),
            ]
            for bar in timeline.bars
            if bar.end_s > bar.start_s or bar.waited_s
        ],
    }


def _away(timeline: Timeline) -> list[list[float]]:
    """What waits on the host between forward and backward: from moments on, bytes of block inputs and of swapped
    activations. They are there when their copy has ended, and until they have begun to come back, or are on disk."""
    moves = []
    for bar in timeline.bars:
        is_of_inputs = bar.op in (Op.STASH, Op.UNSTASH) or (bar.op in (Op.READ, Op.WRITE) and bar.kind is None)
        if is_of_inputs and not bar.earlier and bar.num_bytes:
            sign = 1 if bar.op in (Op.STASH, Op.READ) else -1
            at_s = bar.start_s if bar.op is Op.UNSTASH else bar.end_s
            moves.append((at_s, sign * (bar.num_bytes - bar.held_bytes), sign * bar.held_bytes))
    levels: list[list[float]] = []
    inputs = held = 0
    for at_s, more_inputs, more_held in sorted(moves):
        inputs, held = inputs + more_inputs, held + more_held
        levels.append([_seconds(at_s), inputs, held])
    return levels


def _name(bar: Bar) -> str:
    if bar.held_bytes:
        return "activations swap"
    if bar.op in (Op.FETCH, Op.READ, Op.WRITE):
        return _MOVED[bar.kind] if bar.kind is not None else _NAMES[Op.STASH]
    return "other" if bar.op is None else _NAMES.get(bar.op, "other")


def _seconds(value: float) -> float:
    return round(value, 6)


def _summary(timelines: list[Timeline]) -> str:
    heads = ["simulated", "measured", "difference"] if len(timelines) == 2 else ["simulated"]
    lines = [
        f"<tr><th scope=row>{escape(row.name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row.cells)}"
        + (f"<td>{escape(row.difference)}</td>" if len(timelines) == 2 else "")
        + "</tr>"
        for row in rows(timelines)
    ]
    head = "".join(f"<th scope=col>{name}</th>" for name in heads)
    return (
        f"<section><h2>In numbers</h2><table><thead><tr><td></td>{head}</tr></thead>"
        f'<tbody>{"".join(lines)}</tbody></table><p class="note">{gpu_room(timelines[0])}. '
        "Busy times count within this step, whatever step the work belongs to.</p></section>"
    )


def _waits(timeline: Timeline) -> str:
    waits = worst_waits(timeline)
    if not waits:
        return ""
    lines = [
        f"<tr><th scope=row>{escape(name)}</th><td>{format_seconds(seconds)}</td>"
        f"<td>{seconds / timeline.step_s:.1%} of the step</td></tr>"
        for name, seconds in waits
    ]
    return (
        f"<section><h2>What compute waited for longest, {escape(timeline.source)}</h2>"
        f"<table><tbody>{''.join(lines)}</tbody></table></section>"
    )


def _resource(name: str) -> str:
    return resources.files("hightide.report").joinpath(name).read_text(encoding="utf-8").strip()
