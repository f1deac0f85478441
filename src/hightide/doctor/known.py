"""Machine files: what `hightide doctor` has measured here, what it has measured elsewhere, and shipped estimates."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import torch

from hightide.doctor.identity import fingerprint
from hightide.ir.codec import from_json
from hightide.ir.foreign import read_json
from hightide.ir.machine import Machine
from hightide.process.system import cache_folder, make_private

STALE_DAYS = 30


@dataclass(frozen=True)
class Known:
    """The last measurement of this machine, if there is one that can be used."""

    machine: Machine | None
    problem: str = ""  # why it cannot, or what is doubtful about it. The remedy is always `hightide doctor`
    is_first: bool = False  # nothing was ever measured here


def known_machine(device: torch.device, now: datetime | None = None) -> Known:
    """A stale measurement is returned and said to be stale. One of other hardware or software is not returned."""
    try:
        path = cache_path()
    except OSError as error:
        return Known(None, f"no measurement of this machine can be kept: {error}", is_first=True)
    if not path.exists():
        return Known(None, "this machine was never measured", is_first=True)
    try:
        machine = Machine.load(path)
        measured = datetime.fromisoformat(machine.date)
        age_days = ((now or datetime.now(UTC)) - measured).days
    except (OSError, ValueError, TypeError) as error:  # TypeError: a date without its zone
        return Known(None, f"the measurement in {path} cannot be read: {error}")
    if machine.fingerprint is None:
        return Known(None, f"the measurement in {path} does not say which machine it is of")
    differences = machine.fingerprint.differences(fingerprint(device))
    if differences and not any(not machine.fingerprint.differences(fingerprint(twin)) for twin in _twins(device)):
        return Known(None, f"the measurement of {machine.date[:10]} is of another machine: {'; '.join(differences)}")
    if age_days > STALE_DAYS:
        return Known(machine, f"the measurement is {age_days} days old, of {machine.date[:10]}")
    return Known(machine)


def _twins(device: torch.device) -> list[torch.device]:
    """Other GPUs of its kind in this machine: what was measured of one of them is true of all."""
    if device.type != "cuda":
        return []
    name, others = torch.cuda.get_device_name(device), range(torch.cuda.device_count())
    return [torch.device("cuda", index) for index in others if torch.cuda.get_device_name(index) == name]


def remember(machine: Machine) -> Path:
    """Keeps a measurement for `known_machine`. Where it lies now."""
    path = cache_path()
    make_private(path.parent)
    machine.save(path)
    return path


def cache_path() -> Path:
    """Machines may share a home folder: each has its own file."""
    host = re.sub(r"[^A-Za-z0-9.-]", "_", platform.node()) or "machine"
    return cache_folder() / "machines" / f"{host}.json"


def preset_names() -> list[str]:
    return sorted(entry.name.removesuffix(".json") for entry in _presets().iterdir() if entry.name.endswith(".json"))


def load_machine(name_or_path: str | Path) -> Machine:
    """A shipped estimate by its name, or a file that `hightide doctor --out` has written."""
    name = str(name_or_path)
    if name in preset_names():
        return from_json(Machine, (_presets() / f"{name}.json").read_text("utf-8"), f"the preset {name}")
    path = Path(name_or_path)
    if not path.is_file():
        raise ValueError(
            f"there is no machine {name!r}: it is no file, and presets are {', '.join(preset_names())}; "
            f"`hightide doctor --out FILE` writes a file on the machine itself"
        )
    try:
        is_one = "speeds" in read_json(path, "machine")
    except (TypeError, ValueError):  # no mapping, or no JSON at all
        is_one = False
    if not is_one:
        raise ValueError(
            f"{path} is no machine file (made by `hightide doctor --out FILE`); name one, or a preset: "
            f"{', '.join(preset_names())}"
        )
    return Machine.load(path)


def _presets() -> Traversable:
    return resources.files("hightide") / "machines"
