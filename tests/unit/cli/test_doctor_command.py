"""`hightide doctor` from the outside, with little work."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hightide.cli import doctor_command as doctor_module
from hightide.cli.doctor_command import show_report
from hightide.cli.main import app
from hightide.doctor import known, rates
from hightide.doctor.conditions import Warned
from hightide.doctor.disk_speed import MIN_FILE_BYTES, DiskTest
from hightide.doctor.findings import findings_of
from hightide.doctor.known import cache_path, known_machine, load_machine
from hightide.doctor.measure import Effort, FreeMemory, Report
from hightide.ir.codec import from_json
from hightide.ir.machine import Machine

SMALL = Effort(buffer_bytes=1 << 20, update_numel=1 << 18, dram_numel=1 << 18, window_s=0.01)


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Effort, "here", classmethod(lambda cls: SMALL))
    monkeypatch.setattr(doctor_module, "DiskTest", partial(DiskTest, phase_s=0.05, small_s=0.02))
    monkeypatch.setattr(rates, "MEASURE_S", 0.01)
    monkeypatch.setattr(rates, "LONG_ENOUGH_S", 0.0)
    monkeypatch.setattr(known, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("COLUMNS", "80")


def test_json_is_all_that_is_on_standard_output(tmp_path: Path) -> None:
    out, scratch = tmp_path / "mine.json", tmp_path / "scratch"
    scratch.mkdir()
    command = ["doctor", "--json", "--out", str(out), "--disk", str(scratch), "--disk-bytes", str(MIN_FILE_BYTES)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = from_json(Report, result.stdout)
    assert report.machine.disk is not None and report.machine.disk.written_bytes == MIN_FILE_BYTES
    assert report.machine == Machine.load(out) == known_machine(torch.device("cpu")).machine
    assert json.loads(result.stdout)["machine"]["speeds"]
    assert f"{MIN_FILE_BYTES * 19 // 8} bytes) in {scratch}" in result.stderr.replace("\n", "")
    assert list(scratch.iterdir()) == []


def test_a_table_fits_80_columns_and_a_foreign_measurement_is_said() -> None:
    path = cache_path()
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "all three" in result.stdout and "what this means" in result.stdout
    assert "measuring anew" in result.stderr and "cannot be read" in result.stderr
    assert known_machine(torch.device("cpu")).machine is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--disk", "nowhere"], "no such folder"),
        (["--disk-bytes", "1GiB"], "without --disk"),
        (["--disk", ".", "--disk-bytes", "1KiB"], "too few"),
        (["--disk", ".", "--disk-bytes", "much"], "not a size"),
        (["--out", "nowhere/m.json"], "there is no folder"),
    ],
)
def test_bad_input_is_one_message(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == 2 and said in result.stderr and not result.stdout
    assert not cache_path().exists()


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0 and "not kept for later" in result.stderr
    assert from_json(Report, result.stdout).machine.is_measured


def test_a_real_machine_fits_80_columns() -> None:
    machine = replace(load_machine("h200"), date="2026-11-15T12:00:00+00:00")
    free = FreeMemory(138 << 30, 118 << 30, 64 << 30, 57 << 30)
    warned = (Warned("the GPU's PCIe link is ×4 wide and could be ×16", "reseat it"),)
    text = io.StringIO()
    console = Console(file=text, width=80, highlight=False)
    show_report(console, Report(machine, free, tuple(findings_of(machine)), warned, 12.0, is_undisturbed=True))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line.split() for line in lines if line.startswith("each alone "))
    assert row[-3:] == ["55.5", "55.3", "5.06"]
    assert any("control group's limit is 64.0 GiB" in line for line in lines)
    assert any("→ reseat it" in line for line in lines)
