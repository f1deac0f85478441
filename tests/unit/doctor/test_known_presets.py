"""Shipped estimates: they load, are whole, say where every number comes from, and are what bench/presets.py writes."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hightide.doctor.findings import findings_of
from hightide.doctor.known import load_machine, preset_names
from hightide.ir.machine import SHARING, Machine

PATH = Path(__file__).resolve().parents[3] / "bench" / "presets.py"
LINKED = ("4-nodes-8x-h100", "4x-rtx-4090", "8x-a100-80g", "8x-h100")
NAMES = (*LINKED, "a100-80g", "h100", "h200", "rtx-3090", "rtx-4090", "rtx-5090")


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("presets", PATH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["presets"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["presets"]


def leaves(value: object, name: str = "") -> Iterator[str]:
    """Names of all fields with numbers in them."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{name}.{field.name}".lstrip("."))
    elif isinstance(value, tuple):
        for entry in value:
            yield from leaves(entry, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name


def test_these_are_shipped(bench: ModuleType) -> None:
    assert preset_names() == list(NAMES)
    assert bench.presets() == {name: load_machine(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_marked_with_its_source(name: str) -> None:
    machine = load_machine(name)
    assert None not in (machine.gpu, machine.unpinned, machine.host, machine.disk) and not machine.is_measured
    marked = [estimate.of for estimate in machine.estimates]
    unmarked = {leaf for leaf in leaves(machine) if not any(leaf == of or leaf.startswith(f"{of}.") for of in marked)}
    assert unmarked == set()
    assert all(any(leaf.startswith(of) for leaf in leaves(machine)) for of in marked), "an estimate of nothing"
    assert all(estimate.source for estimate in machine.estimates)


@pytest.mark.parametrize("name", NAMES)
def test_lanes_are_never_faster_together(name: str) -> None:
    machine = load_machine(name)
    everything = machine.speeds_of(set(SHARING))
    for speeds in machine.speeds:
        for lane, value in machine.speeds_of(set(speeds.busy)).items():
            assert everything[lane] * 0.999 <= value <= machine.speeds_of({lane})[lane] * 1.001, (lane, speeds)


def test_the_h200_is_what_was_measured() -> None:
    machine: Machine = load_machine("h200")
    assert machine.speeds[0].bytes_per_s == (55.5e9,) and machine.speeds[1].bytes_per_s == (55.3e9,)
    assert machine.gpu is not None and machine.gpu.matmul_flop_per_s.bfloat16 == 806e12
    everything = machine.speeds_of(set(SHARING))
    assert everything[SHARING[0]] == pytest.approx(43.7e9, rel=0.01)
    assert any("Host memory bandwidth is the limit" in finding for finding in findings_of(machine))
