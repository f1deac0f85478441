"""What one of several ranks has of its node."""

from __future__ import annotations

import pytest

from hightide.doctor.known import load_machine
from hightide.ir.machine import SHARING
from hightide.ir.tier import Lane
from hightide.planner.one_rank import machine_of_rank

NODE = load_machine("8x-h100")


def test_one_rank_has_the_machine_to_itself() -> None:
    assert machine_of_rank(NODE, 1) is NODE


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_host_and_disk_are_divided(gpus: int) -> None:
    one = machine_of_rank(NODE, gpus)
    assert one.host is not None and NODE.host is not None and one.disk is not None and NODE.disk is not None
    assert one.host.memory_bytes * gpus == NODE.host.memory_bytes and one.host.num_cores * gpus == NODE.host.num_cores
    assert one.disk.read_bytes_per_s * gpus == NODE.disk.read_bytes_per_s
    assert one.gpu == NODE.gpu and one.links is not None and one.links.gpus_per_node == gpus
    assert one.speeds_of({Lane.CPU})[Lane.CPU] * gpus == pytest.approx(NODE.speeds_of({Lane.CPU})[Lane.CPU])


def test_all_ranks_together_move_no_more_than_host_memory_does() -> None:
    passes = {Lane.H2D: 1.0, Lane.D2H: 1.0, Lane.CPU: 26 / 14}

    def through_memory(speeds: dict[Lane, float]) -> float:
        return sum(passes[lane] * speed for lane, speed in speeds.items())

    most = max(through_memory(NODE.speeds_of(set(row.busy))) for row in NODE.speeds)
    for gpus in (2, 4, 8):
        one = machine_of_rank(NODE, gpus)
        for row in one.speeds:
            assert gpus * through_memory(one.speeds_of(set(row.busy))) <= most * 1.001
            assert all(one.speeds_of(set(row.busy))[lane] <= NODE.speeds_of({lane})[lane] for lane in row.busy)
    assert machine_of_rank(NODE, 2).speeds_of({Lane.H2D}) == NODE.speeds_of({Lane.H2D})
    assert machine_of_rank(NODE, 8).speeds_of(set(SHARING))[Lane.H2D] < NODE.speeds_of(set(SHARING))[Lane.H2D]


@pytest.mark.parametrize(("name", "gpus", "nodes"), [("h200", 2, 1), ("8x-h100", 9, 1), ("8x-h100", 8, 2)])
def test_more_than_there_are_is_refused(name: str, gpus: int, nodes: int) -> None:
    with pytest.raises(ValueError, match=f"{nodes} nodes? of {gpus} GPUs: the machine '{name}' has 1"):
        machine_of_rank(load_machine(name), gpus, nodes)
