"""bench/ablate.py: every mechanism is missed in turn, told and found."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import ablate

from hightide.ir.plan import Update
from hightide.planner.mechanism import Mechanism
from hightide.planner.predict.estimate import estimate
from hightide.planner.problem import Problem, Terms
from unit.planner.predict.test_step_seconds import GPU
from unit.planner.profiles import UNLIMITED, stack


def problem() -> Problem:
    profile = stack()
    return Problem(profile, estimate(profile, GPU), GPU, Terms(UNLIMITED, UNLIMITED, Update.IN_BACKWARD), quick=True)


def test_every_mechanism_is_missed_once() -> None:
    missed = [mechanism for one in ablate.ABLATIONS for mechanism in one.without]
    assert sorted(missed) == sorted(Mechanism) and ablate.ABLATIONS[0] is ablate.FULL
    assert not ablate.FULL.without and len({one.name for one in ablate.ABLATIONS}) == len(ablate.ABLATIONS)


def test_updates_that_begin_at_the_step_are_no_question_where_all_do() -> None:
    assert ablate.ablations(Update.IN_BACKWARD) == list(ablate.ABLATIONS)
    assert {one.name for one in ablate.ABLATIONS} - {one.name for one in ablate.ablations(Update.DEFERRED)} == {
        "updates begin at step()"
    }


def test_micro_batches_as_passes_are_equal_calls_and_each_is_one_micro_batch() -> None:
    asked = problem().with_terms(update=Update.DEFERRED)
    plans = list(ablate.in_passes(asked))
    assert [one.plan.accumulate for one in plans] == [1, 2, 3, 6]
    assert all(
        one.plan.micro_batch * one.plan.accumulate == one.plan.num_samples * one.plan.accumulate == 6 for one in plans
    )
    best = ablate.told(asked, replace(ablate.FULL, update=Update.DEFERRED, in_passes=True))
    assert best is not None and best.step.step_s == min(one.step.step_s for one in plans)


SIZE = ("--model", "tiny", "--sequences", "2", "--length", "8", "--host", "8GiB")


@pytest.mark.long
def test_every_plan_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert ablate.main(["--device", "cpu", *SIZE, "--gpu", "600KiB", "--steps", "1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == [one.name for one in ablate.ABLATIONS]
    assert all(row["told_s"] > 0 and row["found_s"] > 0 for row in rows)


def test_the_table_tells_what_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert ablate.main(["--machine", "h200", *SIZE, "--gpu", "1GiB"]) == 0
    heading, _, first, *others = capsys.readouterr().out.strip().splitlines()
    assert heading == "tiny, 2 x 8 tokens, 1GiB" and first.split()[0] == "everything" and "+0.0%" in first
    assert [line[:32].strip() for line in others] == [one.name for one in ablate.ABLATIONS[1:]]


def test_without_a_gpu_a_machine_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert ablate.main(["--device", "cpu"]) == 2 and "--machine h200" in capsys.readouterr().err
