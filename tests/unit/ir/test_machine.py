"""Machine files: what is written can be read, and what is wrong is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hightide.doctor.known import load_machine
from hightide.ir.codec import from_json, to_json
from hightide.ir.machine import CollectiveRates, Fingerprint, Links, Machine, Speeds, subsets
from hightide.ir.tier import Lane


def test_every_set_of_lanes_once() -> None:
    assert len(subsets()) == len({frozenset(busy) for busy in subsets()}) == 7


def test_a_whole_machine_survives_a_file(tmp_path: Path) -> None:
    fingerprint = Fingerprint("gpu", "uuid", "driver", "cpu", 4, 16, "2.13")
    machine = replace(load_machine("rtx-4090"), fingerprint=fingerprint, date="2026-11-15T12:00:00+00:00")
    machine.save(tmp_path / "m.json")
    assert Machine.load(tmp_path / "m.json") == machine
    assert from_json(Machine, to_json(machine)).speeds_of({Lane.CPU}) == machine.speeds_of({Lane.CPU})


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_none_is_refused(speed: float) -> None:
    machine = load_machine("h200")
    speeds = tuple(replace(one, bytes_per_s=(speed,)) if one.busy == (Lane.CPU,) else one for one in machine.speeds)
    with pytest.raises(ValueError, match=r"above zero|must be from 1e-06 to 1e\+24"):
        replace(machine, speeds=speeds)


def test_a_set_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"no speeds for: d2h; .*h2d\+d2h\+cpu"):
        Machine("m", "made up", (Speeds((Lane.H2D,), (1.0,)),), 0.0)


def test_differences_of_fingerprints_are_named() -> None:
    one = Fingerprint("H100", "a", "570", "Xeon", 16, 125, "2.11")
    assert one.differences(one) == []
    assert one.differences(replace(one, gpu="H200", num_cores=8)) == [
        "gpu was 'H100' and is 'H200'",
        "num_cores was 16 and is 8",
    ]


RATES = CollectiveRates(100.0, 90.0, 80.0)
LINKS = Links(4, 1, RATES, None, 1e-5, 2e-5, beside_copies=0.5, copies_beside=0.75, together=0.4)


def test_links_survive_a_file(tmp_path: Path) -> None:
    machine = replace(load_machine("rtx-4090"), links=replace(LINKS, num_nodes=2, across=RATES))
    machine.save(tmp_path / "m.json")
    assert Machine.load(tmp_path / "m.json") == machine


def test_collectives_and_copies_slow_each_other_down_as_the_machine_says() -> None:
    alone = load_machine("rtx-4090")
    machine = replace(alone, links=LINKS)
    assert machine.speeds_of({Lane.GATHER}) == {Lane.GATHER: 1.0}
    assert machine.speeds_of({Lane.GATHER, Lane.REDUCE}) == {Lane.GATHER: 0.4, Lane.REDUCE: 0.4}
    copies = {Lane.H2D, Lane.CPU}
    plain, beside = alone.speeds_of(copies), machine.speeds_of({*copies, Lane.REDUCE})
    assert beside == {Lane.H2D: 0.75 * plain[Lane.H2D], Lane.CPU: plain[Lane.CPU], Lane.REDUCE: 0.5}
    assert machine.speeds_of(copies) == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nodes": 2}, "without rates across nodes"),
        ({"gpus_per_node": 0}, "0 GPUs"),
        ({"together": 0.0}, "together is 0.0; it is a share"),
        ({"beside_copies": 1.5}, "beside_copies is 1.5"),
    ],
)
def test_links_that_cannot_be_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LINKS, **change)  # type: ignore[arg-type]


def test_a_rate_of_nothing_between_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match="links: gather_bytes_per_s is 0"):
        replace(load_machine("h200"), links=replace(LINKS, inside=replace(RATES, gather_bytes_per_s=0.0)))
