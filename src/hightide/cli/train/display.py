"""The output of a training run: lines that stay, a bar where there is a terminal, tables at the end. Fits 80
columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hightide.ir.units import format_bytes

WIDTH = 80  # columns
RECENT = 20  # steps, by which the time is told that is left


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl. Peaks, bytes moved, stalls and counts are since the run began, or was resumed."""

    step: int  # counts from 1
    loss: float
    lr: float  # as used by this step
    grad_norm: float | None  # before clipping; None without clipping
    step_s: float  # from the end of the step before, as the accelerator sees it
    tokens_per_s: float
    # How near `step_s` comes to the speed of light, as in hightide.Stats; None on the simulated accelerator, and
    # wherever else nobody has measured how fast the GPU multiplies
    light_share: float | None
    peak_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    stall_s: dict[str, float]
    evictions: int
    deviations: int


class StepDisplay:
    """A line every `log_every` steps. On a terminal a bar below them moves at every step; a pipe gets lines only."""

    def __init__(self, console: Console, num_steps: int, log_every: int, first_step: int = 1) -> None:
        self._console = console
        self._first_step = first_step
        self._num_steps = num_steps
        self._log_every = log_every
        self._step_seconds: deque[float] = deque(maxlen=RECENT)
        self._progress = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=num_steps, completed=first_step - 1, text="first step")

    def __enter__(self) -> StepDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, record: StepRecord) -> None:
        if record.step > self._first_step:  # which is slower than all others
            self._step_seconds.append(record.step_s)
        # Beside a bar, which tells the time that is left, there is no room for all of it.
        self._progress.update(self._task, completed=record.step, text=_step_text(record, "", "gpu"))
        if record.step == self._first_step or record.step % self._log_every == 0 or record.step == self._num_steps:
            head = f"step {record.step:>{len(str(self._num_steps))}}/{self._num_steps}  "
            texts = (head + _step_text(record, self._left(record.step), *tiers) for tiers in _fewer(record.peak_bytes))
            line = next((text for text in texts if len(text) <= WIDTH), None)
            self._console.print(line or head + _step_text(record, ""), markup=False, soft_wrap=True)

    def _left(self, step: int) -> str:
        if not self._step_seconds or step == self._num_steps:
            return ""
        seconds = round((self._num_steps - step) * sum(self._step_seconds) / len(self._step_seconds))
        hours, minutes = divmod(seconds // 60, 60)
        return f"  {hours}:{minutes:02d}:{seconds % 60:02d} left" if hours else f"  {minutes}:{seconds % 60:02d} left"


def _fewer(tiers: Mapping[str, object]) -> Iterator[list[str]]:
    """All of them, and fewer and fewer: what the host and a disk hold hardly changes."""
    names = list(tiers)
    return (names[:count] for count in range(len(names), -1, -1))


def _step_text(record: StepRecord, left: str, *shown: str) -> str:
    tiers = "".join(f"  {tier} {format_bytes(record.peak_bytes[tier])}" for tier in shown)
    light = "" if record.light_share is None else f"  {record.light_share:.0%} light"
    return f"loss {record.loss:.3f}  {_thousands(record.tokens_per_s)} tok/s{light}{left}{tiers}"


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def device_text(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return "simulated accelerator: a bounded arena in RAM, on the CPU"


def show_plan(console: Console, explanation: str) -> None:
    console.rule("plan", style="dim")
    console.print(explanation.rstrip("\n"), markup=False, soft_wrap=True)  # the planner has laid it out already
    console.rule(style="dim")


def show_sample(console: Console, prompt: str, text: str) -> None:
    body = Text(text)
    body.stylize("bold", 0, len(prompt))
    console.print(Panel(body, title="what the model writes", title_align="left", border_style="dim"))


@dataclass(frozen=True)
class TierPeak:
    name: str
    limit_bytes: int
    forecast_bytes: int
    measured_bytes: int


def show_peaks(console: Console, peaks: list[TierPeak]) -> None:
    table = Table("peak memory", box=None, pad_edge=False, header_style="bold")
    for heading in ("limit", "forecast", "measured", "measured / forecast"):
        table.add_column(heading, justify="right")
    for peak in peaks:
        sizes = (format_bytes(size) for size in (peak.limit_bytes, peak.forecast_bytes, peak.measured_bytes))
        share = f"{peak.measured_bytes / peak.forecast_bytes:.0%}" if peak.forecast_bytes else "-"
        table.add_row(peak.name, *sizes, share)
    console.print(table)
