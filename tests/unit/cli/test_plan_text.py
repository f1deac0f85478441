"""What would help, as it is printed, 80 columns wide."""

from __future__ import annotations

import pytest
from rich.console import Console

from hightide.cli.plan_text import show
from hightide.planner.advice.helpful import Change, Improvement, Improvements
from hightide.report.outlook import PlanReport, Subject

SUBJECT = Subject("tiny", 10**6, 10**6, 8, 1, "h200", False, "estimated", 2**20, 2**30, 0)
IN_BACKWARD = Change("in-backward updates, if your loop never clips", "--update in_backward")
MORE = Change("8.0 GiB more GPU memory", "--gpu 32GiB")
OWN_BATCH = Change("16 samples per step", "")


def shown(improvements: Improvements) -> list[str]:
    console = Console(width=80, highlight=False, emoji=False)
    with console.capture() as capture:
        show(console, PlanReport(SUBJECT, True, None, None, would_help=improvements), "")
    return [line.rstrip() for line in capture.get().splitlines()[5:]]


def test_a_batch_without_an_option_takes_one_line() -> None:
    only = Improvements((Improvement(OWN_BATCH, 1.0, 1.09),), (), 1)
    assert shown(only) == ["what would help, at least", "  1.09x  16 samples per step"]
    both = Improvements((Improvement(OWN_BATCH, 1.0, 1.09), Improvement(MORE, 1.0, 1.06)), (), 2)
    assert shown(both)[1:] == ["  1.09x  16 samples per step", "  1.06x  8.0 GiB more GPU memory  --gpu 32GiB"]


@pytest.mark.parametrize(
    ("improvements", "said"),
    [
        (
            Improvements((), (IN_BACKWARD, MORE, OWN_BATCH), 0, "--look 30"),
            "what would help: nothing was tried, the time was up; to look longer: --look 30; not tried: "
            "--update in_backward, --gpu 32GiB, 16 samples per step",
        ),
        (
            Improvements((), (MORE,), 1, "--look 30"),
            "what would help: nothing of what was tried (1), the time was up; to look longer: --look 30; not tried: "
            "--gpu 32GiB",
        ),
        (
            Improvements((), (), 3),
            "what would help: nothing that was tried: more memory, other timing, a larger batch",
        ),
    ],
)
def test_there_is_no_heading_over_nothing(improvements: Improvements, said: str) -> None:
    lines = shown(improvements)
    assert " ".join(line.strip() for line in lines) == said
    assert max(map(len, lines)) <= 80 and all(line.startswith("  ") for line in lines[1:])
