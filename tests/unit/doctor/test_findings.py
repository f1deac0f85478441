"""What the numbers mean, in sentences that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hightide.doctor.findings import findings_of
from hightide.doctor.known import load_machine
from hightide.ir.machine import SIMULATED, Machine, Speeds, subsets
from hightide.ir.tier import Lane

GB = 1e9


def machine(**alike: float) -> Machine:
    """The H200 with these speeds of its lanes, however many are busy."""
    speeds = tuple(Speeds(busy, tuple(alike[lane] for lane in busy)) for busy in subsets())
    return replace(load_machine("h200"), speeds=speeds)


def test_the_limit_is_named_with_its_number() -> None:
    text = " ".join(findings_of(load_machine("h200")))
    assert "Host memory bandwidth is the limit: 162 GB/s." in text
    assert "the update 57%" in text


def test_lanes_that_do_not_hinder_each_other() -> None:
    text = " ".join(findings_of(machine(h2d=20 * GB, d2h=20 * GB, cpu=10 * GB)))
    assert "do not hinder each other" in text and "is the limit" not in text


def test_another_cause_than_memory_is_not_blamed_on_memory() -> None:
    alone = machine(h2d=20 * GB, d2h=20 * GB, cpu=10 * GB)
    slow = tuple(
        replace(one, bytes_per_s=tuple(value / len(one.busy) for value in one.bytes_per_s)) for one in alone.speeds
    )
    text = " ".join(findings_of(replace(alone, speeds=slow)))
    assert "although they use only 20 of 115 GB/s" in text and "is the limit" not in text
    assert "The two directions hinder each other: together they reach 10.0 and 10.0 GB/s, 50% of alone." in text


def test_tokens_that_hide_the_rest() -> None:
    """806 TFLOP/s are 100.75e12 tokens·parameters/s; 4 bytes per parameter at 50 GB/s, 5 G parameters/s."""
    found = machine(h2d=50 * GB, d2h=50 * GB, cpu=80 * GB)
    assert found.host is not None
    found = replace(found, host=replace(found.host, update_params_per_s=5e9))
    text = " ".join(findings_of(found))
    assert "from about 8,100 tokens per step on" in text and "on the host from about 20,000" in text


def test_without_a_gpu_nothing_is_said_about_one() -> None:
    found = load_machine("h200")
    assert found.gpu is not None
    text = " ".join(findings_of(replace(found, gpu=replace(found.gpu, name=SIMULATED), unpinned=None)))
    assert "Without a GPU, copies and updates share the cores" in text
    assert "tokens" not in text and "Pinned" not in text


def test_a_disk_that_gets_slower_is_noticed() -> None:
    found = load_machine("h200")
    assert found.disk is not None
    text = " ".join(findings_of(found))
    assert "take 5.5 s per step, and write 12 GB" in text and "gets slower" not in text
    slow = replace(found.disk, sustained_write_bytes_per_s=1e9)
    assert "3.1 GB/s on average over 17 GB, 1.0 at the end" in " ".join(findings_of(replace(found, disk=slow)))
    assert not any("disk" in text for text in findings_of(replace(found, disk=None)))


@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H, Lane.CPU])
def test_only_lanes_are_known(lane: Lane) -> None:
    bare = Machine("bare", "made up", load_machine("h200").speeds, 0.0)
    assert bare.speeds_of({lane}) and findings_of(bare) == []
