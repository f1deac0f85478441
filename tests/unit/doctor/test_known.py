"""The kept measurement: fresh, stale, of another machine, unreadable; and machine files by name."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from hightide.doctor import known as known_module
from hightide.doctor.identity import fingerprint
from hightide.doctor.known import STALE_DAYS, cache_path, known_machine, load_machine, preset_names, remember
from hightide.ir.machine import Machine

CPU = torch.device("cpu")
NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_module, "cache_folder", lambda: tmp_path / "cache")


def measured(age_days: float = 0.0) -> Machine:
    date = (NOW - timedelta(days=age_days)).isoformat()
    return replace(load_machine("h200"), date=date, fingerprint=fingerprint(CPU), estimates=())


def test_nothing_was_measured() -> None:
    known = known_machine(CPU)
    assert known.machine is None and known.is_first and known.problem == "this machine was never measured"


def test_a_fresh_measurement_is_known() -> None:
    path = remember(measured())
    assert path == cache_path() and [path] == list(path.parent.iterdir())
    known = known_machine(CPU, NOW)
    assert known.machine == measured() and not known.problem


def test_a_stale_one_is_known_and_said_to_be_stale() -> None:
    remember(measured(STALE_DAYS + 1.5))
    known = known_machine(CPU, NOW)
    assert known.machine is not None and known.problem == f"the measurement is {STALE_DAYS + 1} days old, of 2026-10-15"
    remember(measured(STALE_DAYS))
    assert not known_machine(CPU, NOW).problem


@pytest.mark.parametrize(
    ("change", "said"),
    [({"gpu": "H100"}, "gpu was 'H100' and is 'simulated"), ({"torch": "1.0"}, "torch"), ({"memory_gib": 1}, "memory")],
)
def test_one_of_another_machine_is_not_used(change: dict[str, object], said: str) -> None:
    remember(replace(measured(), fingerprint=replace(fingerprint(CPU), **change)))
    known = known_machine(CPU, NOW)
    assert known.machine is None and "of another machine" in known.problem and said in known.problem


@pytest.mark.parametrize("text", ["{", "{}", ""])
def test_one_that_cannot_be_read_is_not_used(text: str) -> None:
    remember(measured()).write_text(text)
    known = known_machine(CPU, NOW)
    assert known.machine is None and "cannot be read" in known.problem and not known.is_first


def test_without_date_or_fingerprint_it_is_not_used() -> None:
    remember(replace(measured(), date=""))
    assert "cannot be read" in known_machine(CPU, NOW).problem
    remember(replace(measured(), date="2026-11-15T12:00:00"))
    assert "cannot be read" in known_machine(CPU, NOW).problem
    remember(replace(measured(), fingerprint=None))
    assert "does not say which machine" in known_machine(CPU, NOW).problem


def test_files_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured().save(tmp_path / "mine.json")
    assert load_machine(tmp_path / "mine.json") == measured()
    monkeypatch.chdir(tmp_path)
    assert load_machine("mine.json") == measured()
    with pytest.raises(ValueError, match=f"no machine 'h300'.*{', '.join(preset_names())}"):
        load_machine("h300")
