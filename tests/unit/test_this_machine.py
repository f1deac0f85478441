"""The machine that `wrap` plans for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hightide
import models
from hightide import this_machine
from hightide.doctor.disk_speed import MIN_FILE_BYTES
from hightide.doctor.known import Known, load_machine
from hightide.ir.limits import DiskLimit
from hightide.ir.machine import Machine
from unit.runtime.steps import adamw

CUDA = torch.device("cuda", 0)


def no_measuring(*_: Any) -> Any:
    raise AssertionError("this is no moment to measure a machine")


def test_the_simulated_accelerator_is_never_measured_and_plans_are_the_same_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(this_machine, "examine", no_measuring)
    monkeypatch.setattr(this_machine, "known_machine", no_measuring)
    model, batch = models.hand_written()
    limits = hightide.Limits(gpu="128KiB", host="1MiB")
    first, second = (hightide.plan(model, adamw(model), batch, limits=limits) for _ in range(2))
    assert first == second and first.forecast.step_s > 0
    machine = this_machine.simulated_machine()
    assert machine.is_simulated and not machine.is_measured


def test_a_machine_that_was_measured_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(load_machine("h200"), name="here")
    monkeypatch.setattr(this_machine, "known_machine", lambda device: Known(here))
    monkeypatch.setattr(this_machine, "examine", no_measuring)
    assert this_machine.machine_of(CUDA, is_small=False) is here


def test_an_unknown_machine_is_measured_once_for_a_large_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    here, kept = replace(load_machine("h200"), name="here"), []
    monkeypatch.setattr(this_machine, "known_machine", lambda device: Known(None, "this machine was never measured"))
    monkeypatch.setattr(
        this_machine, "examine", lambda device, tell: SimpleNamespace(machine=here, is_undisturbed=True)
    )

    def remember(machine: Machine) -> None:
        kept.append(machine)
        raise OSError("a home folder that cannot be written")

    monkeypatch.setattr(this_machine, "remember", remember)
    assumed = this_machine.machine_of(CUDA, is_small=True)
    assert not kept and assumed.gpu is not None and not assumed.is_simulated
    with pytest.warns(UserWarning, match="never measured: `hightide doctor` runs now, once"):
        assert this_machine.machine_of(CUDA, is_small=False) is here
    assert kept == [here]


def test_what_was_measured_beside_other_programs_is_used_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(load_machine("h200"), name="here")
    monkeypatch.setattr(this_machine, "known_machine", lambda device: Known(None, "this machine was never measured"))
    monkeypatch.setattr(
        this_machine, "examine", lambda device, tell: SimpleNamespace(machine=here, is_undisturbed=False)
    )
    monkeypatch.setattr(this_machine, "remember", no_measuring)
    monkeypatch.setattr(this_machine, "_disturbed", {})
    with pytest.warns(UserWarning, match="other programs used the machine while it was measured"):
        assert this_machine.machine_of(CUDA, is_small=False) is here
    monkeypatch.setattr(this_machine, "examine", no_measuring)
    assert this_machine.machine_of(CUDA, is_small=False) is here, "once in a process"


def test_a_folder_that_nobody_has_measured_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = replace(this_machine.QUICK_DISK, file_bytes=MIN_FILE_BYTES, sustained_s=0.3, phase_s=0.1, small_s=0.05)
    monkeypatch.setattr(this_machine, "QUICK_DISK", quick)
    monkeypatch.setattr(this_machine, "_measured_disks", {})
    machine = replace(load_machine("h200"), disk=None)
    limit = DiskLimit(str(tmp_path), 1 << 40)
    found = this_machine.with_disks(machine, [limit])
    assert found.disk is not None and found.disk.read_bytes_per_s > 0 and found.disk.written_bytes > 0
    assert found.estimates == machine.estimates
    assert this_machine.with_disks(machine, [limit]).disk is found.disk
    (tmp_path / "below").mkdir()
    on_one = [limit, DiskLimit(str(tmp_path / "below"), 1 << 40)]
    assert this_machine.with_disks(machine, on_one).disk is found.disk, "it is the same disk"
    (tmp_path / "below").rmdir()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_measured_is_taken_for_a_preset_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "_measured_disks", {})
    machine = replace(load_machine("h200"), disk=None)
    with pytest.warns(UserWarning, match=r"cannot be measured .* the plan follows from the speed of a PCIe 4.0 SSD"):
        found = this_machine.with_disks(machine, [DiskLimit(str(tmp_path), 1 << 20)])
    assert found.disk == load_machine(this_machine.ASSUMED).disk
    assert "disk" in {estimate.of for estimate in found.estimates}
