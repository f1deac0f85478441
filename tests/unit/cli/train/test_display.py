"""Everything shown fits 80 columns; a pipe gets plain lines without control codes."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from hightide.cli.train.display import StepDisplay, StepRecord, TierPeak, show_peaks, show_sample
from hightide.cli.train.trained_model import printable


def record(step: int, light_share: float | None = 0.678) -> StepRecord:
    peaks = {"gpu": 999 * 2**20, "host": 1023 * 2**30}
    return StepRecord(step, 12.3456, 1e-3, 1.0, 0.5, 123_456.0, light_share, peaks, {"h2d": 1}, {"h2d": 0.0}, 2, 0)


def piped() -> tuple[Console, io.StringIO]:
    buffer = io.StringIO()
    return Console(file=buffer, width=80, highlight=False), buffer


def test_a_pipe_gets_the_first_the_last_and_every_nth_step_as_plain_lines() -> None:
    console, buffer = piped()
    with StepDisplay(console, num_steps=1234, log_every=500) as display:
        for step in range(1, 1235):
            display.show(record(step))
    lines = buffer.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/1234", "500/1234", "1000/1234", "1234/1234"]
    assert all("loss 12.346" in line and "123.5k tok/s" in line and "gpu 999 MiB" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in buffer.getvalue()


@pytest.mark.parametrize(("share", "said"), [(0.678, True), (None, False)])
def test_the_share_of_the_speed_of_light_is_shown_where_it_is_known(share: float | None, said: bool) -> None:
    console, buffer = piped()
    with StepDisplay(console, num_steps=1, log_every=1) as display:
        display.show(record(1, share))
    assert ("tok/s  68% light  gpu" in buffer.getvalue()) is said and ("light" in buffer.getvalue()) is said


@pytest.mark.parametrize(("share", "last"), [(0.678, "68% light  gpu 999 MiB"), (None, "tok/s  gpu 999 MiB")])
def test_a_terminal_shows_the_bar_within_80_columns(share: float | None, last: str) -> None:
    buffer = io.StringIO()
    console = Console(file=buffer, width=80, force_terminal=True, color_system=None, highlight=False)
    with StepDisplay(console, num_steps=100, log_every=10) as display:
        display.show(record(7, share))
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", buffer.getvalue()))
    bars = [line for line in lines if line.startswith("7/100")]
    assert bars and all(re.search("[━╸]", bar) and "loss 12.346" in bar and last in bar for bar in bars)
    assert max(len(line) for line in lines) <= 80


def test_lines_tell_the_time_that_is_left_without_that_of_the_slow_first_step() -> None:
    console, buffer = piped()
    with StepDisplay(console, num_steps=10_000, log_every=2) as display:
        for step, step_s in ((1, 100.0), (2, 0.5), (3, 1.5), (4, 1.0)):
            display.show(replace(record(step, None), step_s=step_s))
    lines = buffer.getvalue().splitlines()
    assert " left" not in lines[0] and "  1:23:19 left  " in lines[1] and "  2:46:36 left  " in lines[2]
    assert all(len(line) <= 80 for line in lines)


def test_peaks_fit_80_columns_and_show_measured_beside_forecast() -> None:
    console, buffer = piped()
    show_peaks(console, [TierPeak("accelerator", 24 * 2**20, 20 * 2**20, 19 * 2**20)])
    heading, row = buffer.getvalue().splitlines()
    assert heading.split()[:5] == ["peak", "memory", "limit", "forecast", "measured"]
    assert row.split() == ["accelerator", "24.0", "MiB", "20.0", "MiB", "19.0", "MiB", "95%"]
    assert len(heading) <= 80


def test_text_of_the_model_is_never_read_as_markup() -> None:
    console, buffer = piped()
    show_sample(console, "def ", "def [bold]x[/nonsense]")
    assert "def [bold]x[/nonsense]" in buffer.getvalue()


@pytest.mark.parametrize(
    ("text", "shown"),
    [("def f():\n\treturn", "def f():\n    return"), ("\x1b[2J\x07\x9f", "�[2J��"), ("é", "é")],
)
def test_what_could_upset_a_terminal_is_replaced(text: str, shown: str) -> None:
    assert printable(text) == shown
