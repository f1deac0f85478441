"""`hightide simulate` from the outside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hightide
import models
from hightide.cli.main import app
from hightide.doctor.known import load_machine
from hightide.ir.plan import Plan
from hightide.ir.timeline import Timeline
from hightide.planner.predict.estimate import estimate
from unit.runtime.steps import adamw


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, batch = models.llama()
    limits = hightide.Limits(gpu="400KiB", host="64MiB")
    return hightide.plan(model, adamw(model), batch, limits=limits, micro_batch=2)


@pytest.fixture
def plan_path(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    plan.save(path)
    return path


def simulate(*arguments: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "80"})
    assert result.exit_code == exit_code, result.output
    return result


def test_a_plan_file_is_all_it_needs(plan: Plan, plan_path: Path, tmp_path: Path) -> None:
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    output = simulate(plan_path, "--machine", "h200", "--html", page, "--json", data).output
    timeline = Timeline.load(data)
    assert timeline.fingerprint == plan.fingerprint
    assert timeline.gpu_peak_bytes <= plan.forecast.gpu_peak_bytes <= plan.gpu_limit_bytes
    assert "<h1>tiny: the tide of one step</h1>" in page.read_text(encoding="utf-8")
    assert "step time" in output and "limit: " in output and "GPU peak" in output
    lines = [line for line in output.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80


def test_a_recorded_run_is_shown_beside_it(tmp_path: Path) -> None:
    settings = tmp_path / "tiny.yaml"
    settings.write_text(
        "{name: tiny, device: cpu, steps: 2, limits: {gpu: 4MiB, host: 1GiB}, sample: {tokens: 0}, micro_batch: 1,"
        " model: {hidden: 32, layers: 2, heads: 2, feed_forward: 64},"
        " data: {sequences: 2, length: 16, text_bytes: 50_000}}"
    )
    result = CliRunner().invoke(app, ["train", str(settings), "--record", "--out", str(tmp_path)])
    assert result.exit_code == 0 and "timeline.json" in result.output, result.output
    page = tmp_path / "out.html"
    output = simulate(tmp_path / "tiny-001", "--machine", "h200", "--html", page).output
    assert "measured" in output and "difference" in output
    assert "measured on the simulated accelerator" in page.read_text(encoding="utf-8")


def test_one_step_cannot_be_recorded(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--record", "--steps", "1", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "do at least 2" in result.output


def test_a_run_of_another_model_is_refused(plan_path: Path, tmp_path: Path) -> None:
    data = tmp_path / "out.json"
    simulate(plan_path, "--machine", "h200", "--json", data)
    replace(Timeline.load(data), fingerprint="feed").save(data)
    output = simulate(plan_path, "--machine", "h200", "--measured", data, exit_code=2).output
    assert "another model" in output and "feed" in output


def test_bad_input_is_one_message_with_a_remedy(plan: Plan, plan_path: Path, tmp_path: Path) -> None:
    assert "cannot read the plan" in simulate(tmp_path / "none.json", "--machine", "h200", exit_code=2).output
    assert "rtx-4090" in simulate(plan_path, "--machine", "none", exit_code=2).output
    missing = simulate(plan_path, "--machine", "h200", "--costs", tmp_path / "none.json", exit_code=2)
    assert "cannot read the costs" in missing.output
    replace(plan, profile=None).save(plan_path)
    assert "make it again" in simulate(plan_path, "--machine", "h200", exit_code=2).output
    replace(plan, micro_batch=0).save(plan_path)
    assert "micro_batch is 0" in simulate(plan_path, "--machine", "h200", exit_code=2).output


def test_costs_of_another_model_are_refused(plan: Plan, plan_path: Path, tmp_path: Path) -> None:
    assert plan.profile is not None
    path = tmp_path / "costs.json"
    replace(estimate(plan.profile, load_machine("h200")), fingerprint="feed").save(path)
    output = simulate(plan_path, "--machine", "h200", "--costs", path, exit_code=2).output
    assert "another model" in output and "feed" in output


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_missing_folder_is_named_before_any_work(option: str, tmp_path: Path) -> None:
    """Even before the plan is read, which is not there either."""
    output = simulate(tmp_path / "none.json", option, tmp_path / "no" / "out", exit_code=2).output
    assert "there is no folder" in output and "make it first" in output


def test_without_a_machine_it_says_what_there_is(
    plan_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = simulate(plan_path, exit_code=2).output
    assert "hightide doctor" in output and "h200" in output
