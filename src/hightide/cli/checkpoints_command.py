"""`hightide checkpoints`: what a folder of checkpoints holds, and whether it is whole. It may be a stranger's."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hightide.checkpoint.files.folder import Found, GoneCheckpoint, damages, found, held, manifest_of
from hightide.checkpoint.files.manifest import NAME
from hightide.checkpoint.files.names import GONE, TMP, parse_name
from hightide.cli.target import JsonOption
from hightide.cli.train.run_folder import CHECKPOINTS
from hightide.ir.codec import to_json
from hightide.ir.foreign import KEPT, shown
from hightide.ir.units import clipped, format_bytes, format_count

_HEADINGS = ("step", "loss", "size", "params", "age", "state", "plan")
WHOLE, VERIFIED, DAMAGED, UNFINISHED = "whole", "verified", "damaged", "unfinished"


@dataclass(frozen=True)
class CheckpointsOptions:
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run folder, its folder of checkpoints, or one checkpoint.")
    ]
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and verify the checksums.")] = False
    as_json: JsonOption = False


@dataclass(frozen=True)
class FileReport:
    name: str
    num_bytes: int


@dataclass(frozen=True)
class CheckpointReport:
    """None: not known."""

    path: str
    step: int
    state: str  # whole, by names and sizes; verified, by all sums; damaged; unfinished: being written or removed
    problems: tuple[str, ...]
    num_bytes: int | None
    time: float | None  # seconds since 1970, when it was saved
    parameters: int | None
    loss: float | None
    plan: str | None
    files: tuple[FileReport, ...]


def checkpoints(options: CheckpointsOptions, console: Console, notes: Console) -> bool:
    """False: something is damaged."""
    there = _found(options.folder)
    reports = [_report(one) for one in there]
    if options.verify:
        reports = _verified(reports, notes)
    if options.as_json:
        console.print(to_json(reports), markup=False, soft_wrap=True)
    else:
        _show(options.folder, reports, console)
    return all(report.state != DAMAGED for report in reports)


def _found(folder: Path) -> list[Found]:
    if not folder.is_dir():
        what = "is no folder" if os.path.lexists(folder) else "does not exist"
        raise ValueError(f"{shown(folder)} {what}; name the folder of a run, of checkpoints, or of one of them")
    inside = folder / CHECKPOINTS
    if os.path.lexists(folder / NAME) or parse_name(folder.absolute().name) is not None:
        return [_single(folder)]
    if inside.is_symlink():
        raise ValueError(f"{shown(inside)} is a link, and those are not followed; name the folder itself")
    return found(inside if os.path.lexists(inside) else folder)


def _single(path: Path) -> Found:
    """Under whatever name."""
    name = parse_name(path.absolute().name)
    try:
        manifest = manifest_of(path)
    except ValueError as error:
        return Found(path, name[0] if name else 0, None, str(error))
    return Found(path, manifest.step, manifest, None)


def _report(one: Found) -> CheckpointReport:
    manifest, state = one.manifest, WHOLE
    if not one.is_whole:
        state = UNFINISHED if one.path.suffix in (TMP, GONE) else DAMAGED
    facts: dict[str, Any] = {} if manifest is None else dict(manifest.facts)
    parameters, loss, plan = (facts.get(name) for name in ("parameters", "loss", "plan"))
    is_number = isinstance(loss, int | float) and not isinstance(loss, bool) and math.isfinite(loss)
    return CheckpointReport(
        path=str(one.path),
        step=one.step,
        state=state,
        problems=() if one.problem is None else (one.problem,),
        num_bytes=None if manifest is None else manifest.num_bytes,
        time=None if manifest is None else manifest.time,
        parameters=parameters if isinstance(parameters, int) and not isinstance(parameters, bool) else None,
        loss=float(loss) if is_number else None,  # type: ignore[arg-type]
        plan=plan if isinstance(plan, str) else None,
        files=() if manifest is None else tuple(FileReport(file.name, file.num_bytes) for file in manifest.files),
    )


def _verified(reports: list[CheckpointReport], notes: Console) -> list[CheckpointReport]:
    num_bytes = sum(report.num_bytes or 0 for report in reports if report.state == WHOLE)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
    )
    with progress:
        task = progress.add_task("", total=num_bytes)

        def read(count: int) -> None:
            progress.advance(task, count)

        return [_read_through(report, lambda text: progress.update(task, description=text), read) for report in reports]


def _read_through(
    report: CheckpointReport, tell: Callable[[str], object], read: Callable[[int], object]
) -> CheckpointReport:
    if report.state != WHOLE:
        return report
    tell(f"step {report.step}")
    try:
        with held(Path(report.path)):
            wrong = damages(report.path, read)
    except GoneCheckpoint:
        return replace(report, state=UNFINISHED)
    return replace(report, state=DAMAGED if wrong else VERIFIED, problems=tuple(wrong))


def _show(folder: Path, reports: list[CheckpointReport], console: Console) -> None:
    if not reports:
        runs = sorted(path.parent for path in folder.glob(f"*/{CHECKPOINTS}") if path.is_dir())
        elsewhere = f"; name a run, such as {shown(runs[-1])}" if runs else ""
        console.print(f"no checkpoints in {shown(folder)}{elsewhere}", markup=False, soft_wrap=True)
        return
    rows = [_HEADINGS, *map(_cells, reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = max(len("plan"), console.width - sum(widths[:-1]) - 2 * len(widths[:-1]))
    for *cells, plan in rows:
        columns = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)]
        console.print("  ".join((*columns, clipped(plan, left))), markup=False, soft_wrap=True)
    if len(reports) == 1:
        for file in reports[0].files:
            console.print(f"  {format_bytes(file.num_bytes):>9}  {file.name}", markup=False, soft_wrap=True)
    for report in reports:
        for problem in report.problems if report.state == DAMAGED else ():
            console.print(f"{shown(Path(report.path).name)}: {shown(problem, KEPT)}", markup=False, soft_wrap=True)


def _cells(report: CheckpointReport) -> tuple[str, ...]:
    return (
        str(report.step),
        "-" if report.loss is None else f"{report.loss:.4g}",
        "-" if report.num_bytes is None else format_bytes(report.num_bytes),
        "-" if report.parameters is None else format_count(report.parameters),
        "-" if report.time is None else _age(time.time() - report.time),
        report.state,
        "-" if report.plan is None else shown(" ".join(report.plan.split())),
    )


def _age(seconds: float) -> str:
    """A clock that was set back makes it negative."""
    size = abs(seconds)
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if size >= 2 * length_s or unit == "s":
            return f"{'in ' if seconds <= -1 else ''}{int(size / length_s)} {unit}"
    raise AssertionError("the last unit is always taken")
