"""What ranks exchange and agree on, against the same computed by one of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hightide.ir.machine import Machine
from hightide.ir.tier import Lane
from hightide.planner.one_rank import machine_of_rank
from hightide.planner.predict.collective_seconds import links_of
from started_ranks import StartedRanks
from unit.planner.profiles import plan_with, stack

SIZES = [[128, 0, 64], [4033, 0, 0], [9000, 3, 1]]  # elements of a part: also more than a frame, and odd
MANY = [1_200_005, 0, 17]  # more than what is staged at a time


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gathered_chunks_are_those_of_their_ranks(started: StartedRanks, world: int) -> None:
    for rank in started.run("gathered", world, sizes=[*SIZES, MANY] if world == 2 else SIZES):
        assert rank.result["wrong"] == []


@pytest.mark.parametrize(("world", "part_numels"), [(2, MANY), (3, [5, 70_001, 7]), (4, [128, 0, 4096])])
def test_means_are_of_sums_in_the_order_of_ranks(started: StartedRanks, world: int, part_numels: list[int]) -> None:
    for rank in started.run("reduced", world, part_numels=part_numels):
        assert all(rank.result["equal"]), rank.result


@pytest.mark.parametrize("world", [2, 3])
def test_numbers_and_words(started: StartedRanks, world: int) -> None:
    results = [rank.result for rank in started.run("numbers", world)]
    assert all(found == results[0] for found in results)
    found = results[0]
    assert found["fp32"] == pytest.approx([0.1 * world * (world + 1) / 2, 3.0e7 * world])
    assert found["fp64"] == pytest.approx(0.1 * world * (world + 1) / 2, rel=1e-15)
    assert (found["none"], found["one"]) == (False, True)
    assert found["said"] == ["word " * rank for rank in range(world)]
    assert found["long"] == [3000 * rank for rank in range(world)]
    assert found["from 1"] == "texttext"


def test_the_calls_that_nccl_gets(started: StartedRanks) -> None:
    for rank, found in enumerate(one.result for one in started.run("nccl_lanes_over_gloo", 2)):
        assert found["whole"] == [[0] * 10, [1] * 10]
        assert found["part"] == [3.0 * (10 * rank + element) for element in range(10)]
        assert found["total"] == [1.0, 2.0]
        assert (found["numbers"], found["under way"]) == ([1, 3, 1], [False, False])
        assert "rank 1 raised KeyError: 'a bad batch'" in found["message"]


@pytest.mark.parametrize("world", [2, 3])
def test_one_plan_and_the_least_limits(started: StartedRanks, world: int) -> None:
    others = "rank 1" if world == 2 else "ranks 1, 2"
    for rank, found in enumerate(one.result for one in started.run("agreed", world)):
        assert found["plan"] == "plan of rank 0"
        assert found["least"] == {"gpu": 101 - world, "host": None, "disk": 7}
        assert found["same"] == "no error: None"
        assert f"ranks differ in steps: 0 on rank 0; 1 on {others}" in found["differs"]
        assert f"ranks have different limits: disk, gpu on rank 0; gpu, host on {others}" in found["other names"]
        cause = "TypeError: no plan fits\nat all"
        assert found["no plan"] == (cause if rank == 0 else f"FailedElsewhere: rank 0 could not make the plan: {cause}")
        assert found["after"] == "another"


@pytest.mark.parametrize(("world", "nodes"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.long)])
def test_links_are_measured_and_planned_with(started: StartedRanks, tmp_path: Path, world: int, nodes: int) -> None:
    """The slowest of all ranks, the same on all; the machine file says over what."""
    path = tmp_path / "machine.json"
    results = [one.result for one in started.run("links_between", world, nodes=nodes, path=str(path))]
    assert all(found == results[0] for found in results)
    found = results[0]
    assert (found["gpus_per_node"], found["num_nodes"], found["backend"]) == (world // nodes, nodes, "gloo")
    assert (found["across"] is None) == (nodes == 1) and all(rate > 1e4 for rate in found["inside"].values())
    assert 0 < found["latency_s"] < 1 and all(0 < found[name] <= 1 for name in ("beside_copies", "together"))
    assert {f"{lane} beside copies to the GPU" for lane in (Lane.GATHER, Lane.REDUCE)} <= {*found["told"]}
    machine = Machine.load(path)
    assert "links over gloo" in machine.source
    own = machine_of_rank(machine, world // nodes, nodes)
    plan = replace(plan_with(stack()), ranks=world)
    assert links_of(own, plan) == machine.links
