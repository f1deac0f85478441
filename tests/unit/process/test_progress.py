"""What is shown to somebody who waits."""

from __future__ import annotations

import io
import logging
import os
import shutil
from contextlib import redirect_stderr

import pytest
import torch

import hightide
import models
from hightide.process import progress
from hightide.process.progress import doing, progress_line, tell
from unit.runtime.steps import adamw


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((40, 20)))
    return Terminal()


def test_a_line_is_drawn_over_and_goes_away(terminal: Terminal) -> None:
    with redirect_stderr(terminal), progress_line("wrapping"):
        tell("profiling")
        tell("timing blocks", "kind 2 of 3, which has a long name")
    lines = terminal.getvalue().split("\r\033[K")
    assert lines == ["", "wrapping, 0 s: profiling", "wrapping, 0 s: timing blocks (kind 2 of", ""]
    assert max(map(len, lines)) < 40


def test_a_failure_leaves_no_line_behind(terminal: Terminal) -> None:
    with redirect_stderr(terminal), pytest.raises(ZeroDivisionError), progress_line("wrapping"):
        tell("dividing")
        _ = 1 / 0
    assert terminal.getvalue().endswith("\r\033[K")
    with redirect_stderr(terminal):
        tell("nobody waits")
    assert "nobody" not in terminal.getvalue()


def test_what_is_fast_is_not_shown(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 60.0)
    with redirect_stderr(terminal), progress_line("wrapping"):
        tell("profiling")
    assert terminal.getvalue() == ""


def test_parts_are_logged_with_their_times_and_files_get_no_line(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    with caplog.at_level(logging.INFO, logger="hightide"), progress_line("outer"), progress_line("inner"):
        tell("first", "1 of 2")
        tell("first", "2 of 2")
        tell("second")
    assert [record.getMessage() for record in caplog.records] == [
        "outer: first took 0.0 s",
        "outer: second took 0.0 s",
        "outer: 0.0 s in all",
    ]
    assert capsys.readouterr().err == ""


def test_what_is_told_inside_of_a_part_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hightide"), progress_line("outer"):
        with doing("timing"):
            tell("inside")
        tell("after")
    assert [record.getMessage() for record in caplog.records] == [
        "outer: timing took 0.0 s",
        "outer: after took 0.0 s",
        "outer: 0.0 s in all",
    ]


def test_wrap_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = models.hand_written()
    optimizer: torch.optim.Optimizer = adamw(model)
    with caplog.at_level(logging.INFO, logger="hightide"):
        model, optimizer = hightide.wrap(
            model, optimizer, batch, limits=hightide.Limits(gpu="1MiB", host="1MiB"), device="cpu"
        )
    text = caplog.text
    for part in ("profiling the model", "searching for a plan", "moving values to their places", "pinning host memory"):
        assert f"hightide.wrap: {part} took" in text
    assert "hightide.wrap: " in text.splitlines()[-1] and "in all" in text.splitlines()[-1]
    hightide.unwrap(model)
