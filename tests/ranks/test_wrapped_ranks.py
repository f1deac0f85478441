"""What else a model does that several ranks train: it is planned, loaded, read, evaluated; and ranks that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

import models
from hightide.runtime.lanes.lanes import CORES_FOR_OTHERS
from hightide.shard.gloo_lane import STAGING_BYTES
from started_ranks import StartedRanks

WITHIN_S = 100.0


def test_the_first_rank_plans_for_all(training: StartedRanks) -> None:
    """Host memory is a node's: each of its ranks has a half of it. No rank has more than that. And they end as any
    program does."""
    ranks = training.run("plan_and_train", 2, WITHIN_S, quick_end=False, gpu="400KiB", host="64MiB")
    first, second = (rank.result for rank in ranks)
    assert first["ranks"] == second["ranks"] == 2
    assert first["limits"] == second["limits"] == [400 * 1024, 32 * 1024**2]
    assert first["norms"] == second["norms"] and first["losses"] != second["losses"]
    for found in (first, second):
        assert all(0 < peak <= limit for peak, limit in zip(found["peaks"], found["limits"], strict=True))


def test_limits_that_are_too_small_on_one_rank_are_the_same_error_on_all(training: StartedRanks) -> None:
    """Else a loop that tries again would wait for ranks whose loops do not."""
    first, second = (rank.result for rank in training.run("asks_for_more", 2, WITHIN_S))
    assert first["told"].startswith("no plan fits 1024 bytes")
    assert second["told"] == f"rank 0 could not make a plan: {first['told']}"
    assert first["limit"] == second["limit"] and first["norms"] == second["norms"]


@pytest.mark.parametrize("where", ["mixed", pytest.param("whole parameters", marks=pytest.mark.long)])
def test_values_are_those_of_the_first_rank_and_can_be_loaded_and_read(training: StartedRanks, where: str) -> None:
    first, second = (rank.result for rank in training.run("values", 2, within_s=WITHIN_S, where=where))
    assert first["before"] and first["loaded"]
    assert first["evaluated"] == second["evaluated"] and first["after"] == second["after"]
    assert first["after"] == pytest.approx(first["unwrapped"], rel=1e-6)
    assert first["digest"] == second["digest"]


def test_first_values_are_the_same_on_any_number_of_ranks_and_each_reads_its_shards(
    training: StartedRanks, tmp_path: Path
) -> None:
    models.llama(num_layers=2)[0].save_pretrained(tmp_path)
    (alone,) = training.run("first_values", 1, within_s=WITHIN_S, folder=str(tmp_path))
    known, ranks = alone.result, training.run("first_values", 2, within_s=WITHIN_S, folder=str(tmp_path))
    for what in ("in files", "on meta"):
        assert ranks[0].result[what] == known[what]
    assert known["read in files"] == known["whole"]
    for rank in ranks:
        assert rank.result["read in files"] <= 0.55 * known["whole"]  # shards are padded, what is tiny is whole


def test_a_rank_that_raises_in_a_block_ends_the_others(training: StartedRanks) -> None:
    first, second = training.run("raises", 2, within_s=WITHIN_S, where="streamed", at="block")
    assert not first.timed_out and not second.timed_out and first.status == second.status == 1
    assert "shapes cannot be multiplied" in second.error
    assert "RankFailure: rank 0, at forward of block" in first.error
    assert "rank 1 raised RuntimeError: mat1 and mat2" in first.error and "gather of chunk" in first.error


def test_a_rank_that_raises_between_steps_ends_the_others(training: StartedRanks) -> None:
    first, second = training.run("raises", 2, within_s=WITHIN_S, where="mixed", at="step")
    assert not first.timed_out and not second.timed_out and first.status == second.status == 1
    assert "ValueError: enough" in second.error
    assert "RankFailure: rank 0" in first.error and "it has ended with ValueError: enough" in first.error


def test_what_one_rank_does_otherwise_is_told_to_all(training: StartedRanks, tmp_path: Path) -> None:
    """Each updates its shards, and takes its part of what is loaded: the model would be put together of pieces."""
    first, last = (rank.result for rank in training.run("other_acts", 2, within_s=WITHIN_S, folder=str(tmp_path)))
    assert first == last
    assert (first.pop("nothing"), first.pop("a little")) == ("", "")
    for what, told in {
        "options": "lr=1.0",
        "a save": "lr=1.0",
        "a gradient less": "ranks differ in the update of first.weight",
        "clipped": "what gradients were multiplied by",
        "a group": "nothing on rank 1",
        "values": "what was loaded into",
        "the model": 'trained, in group 0" on rank 0',
        "update": "ranks differ in update=",
        "a collective on a gradient": "pass a copy (p.grad.clone())",
    }.items():
        assert told in first.pop(what)
    assert not first and not list(tmp_path.iterdir())


def test_at_the_end_of_a_program_lanes_issue_what_others_wait_for(training: StartedRanks) -> None:
    """While there are communicators, and a watchman to tell who does not come."""
    for rank in training.run("ends", 2, within_s=WITHIN_S, quick_end=False):
        assert rank.status == 0
        order = list(dict.fromkeys(rank.stdout.splitlines()[1:]))
        assert order == ['"lanes"', '"watchman"', '"communicators"']


ROUTE = [("mixed", 1, 1), ("streamed", 3, 1), ("sharded on the gpu", 2, 1), ("replicated", 1, 1), ("mixed", 3, 1)]


@pytest.mark.parametrize(
    ("world", "subject", "dtype"),
    [
        (2, "hand_written", "bfloat16"),
        pytest.param(3, "llama", "float32", marks=pytest.mark.long),
        pytest.param(2, "llama", "float32", marks=pytest.mark.long),
    ],
)
def test_moves_to_other_plans_change_no_bit(training: StartedRanks, world: int, subject: str, dtype: str) -> None:
    """Nor does one that fails on a rank: then it does on all."""
    results = training.run("moves", world, within_s=WITHIN_S, route=ROUTE, subject=subject, dtype=dtype)
    for rank, found in enumerate(one.result for one in results):
        assert found["stays"] == ("nothing left" if rank == 1 else "another rank has no memory for this plan")
        assert found["moved"]["digest"] == found["stayed"]["digest"] or rank > 0
        assert found["moved"]["losses"] == found["stayed"]["losses"]


@pytest.mark.long
def test_moves_into_groups_and_back(training: StartedRanks) -> None:
    route = [("mixed", 1, 2), ("streamed", 2, 1), ("mixed", 1, 4), ("mixed", 2, 2)]
    for rank in training.run("moves", 4, within_s=WITHIN_S, route=route, subject="hand_written", dtype="float32"):
        found = rank.result
        assert found["moved"]["losses"] == pytest.approx(found["stayed"]["losses"], rel=1e-5)


@pytest.mark.parametrize("what", ["gradient", pytest.param("norm", marks=pytest.mark.long)])
def test_a_rank_that_reads_alone_is_told(training: StartedRanks, what: str) -> None:
    """Soon: long before a timeout. Those that go on wait for its gathers."""
    for rank in training.run("read_alone", 2, within_s=40.0, what=what, evaluates=True):
        assert rank.status == 1 and not rank.timed_out
        exchanged = {"gradient": "gradient of first.weight", "norm": "norms of type 1 of gradients"}[what]
        for text in ("rank 0", "rank 1", exchanged, "gather of chunk", "in the same order: reading p.grad"):
            assert text in rank.error


@pytest.mark.long
@pytest.mark.parametrize("what", ["gradient", "norm"])
def test_a_rank_that_reads_alone_is_told_at_the_next_forward(training: StartedRanks, what: str) -> None:
    for rank in training.run("read_alone", 2, within_s=40.0, what=what, evaluates=False):
        assert rank.status == 1 and not rank.timed_out
        assert "bytes on rank 0, the beginning of a forward, " in rank.error and "reading p.grad" in rank.error


def test_what_is_not_there_is_refused(training: StartedRanks) -> None:
    for rank in training.run("refuse", 2, within_s=WITHIN_S):
        said = rank.result
        assert "it was given by plan=" in said["a larger batch"] and "largest batch" in said["a larger batch"]
        assert "optimizer.state of a model that several ranks train is not built yet" in said["states"]
        assert "without torchrun" in said["verify"]


@pytest.mark.parametrize("seen", ["memory", pytest.param("time", marks=pytest.mark.long)])
def test_what_one_rank_sees_in_its_first_steps_moves_all(training: StartedRanks, seen: str) -> None:
    """To one plan, before the same pass, without a bit's difference. Costs are those of the slowest."""
    first, second = (rank.result for rank in training.run("watched", 2, within_s=WITHIN_S, seen=seen))
    assert first["plans"] == second["plans"] and len(set(first["plans"])) == 2
    assert len(first["told"]) == 1 and "Planned again, once" in first["told"][0] and not second["told"]
    assert first["glue_s"] == second["glue_s"] == pytest.approx(2e-6)
    for found in (first, second):
        assert found["losses"] == found["same"] and not found["is_watched"]
    assert first["digest"] == first["same digest"]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_host_holds_everything_once_and_cores_are_divided(
    training: StartedRanks, world: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """32 MiB of parameters, and as much for each of gradients and two moments. torchrun says OMP_NUM_THREADS=1, and
    updates have their share of 16 cores all the same: 8 of 2 ranks, less those that are left to others."""
    gpu_bytes, host_bytes = 24 << 20, 144 << 20
    limits = {"gpu_bytes": gpu_bytes, "host_bytes": host_bytes}
    alone, found = (
        [rank.result for rank in training.run("in_memory", ranks, within_s=WITHIN_S, **limits)] for ranks in (1, world)
    )
    assert [one["sharers"] for one in found] == [16 // world - CORES_FOR_OTHERS] * world and found[0]["torch"] == 1
    assert not any(one["above"] for one in found)
    most_bytes = host_bytes + world * (gpu_bytes + 2 * 2 * STAGING_BYTES)  # what two lanes send and receive
    resident, held = (sum(one["bytes"] for one in found), sum(one["peaks"]["host"] for one in found))
    assert held <= host_bytes and resident <= most_bytes < world * (4 * (32 << 20) + gpu_bytes)
    with capsys.disabled():
        print(
            f"\n{world} ranks: {told(resident)} resident, {told(held)} on the host, at most {told(most_bytes)}", end=""
        )
        print(f" (alone: {told(alone[0]['bytes'])} and {told(alone[0]['peaks']['host'])})")


def told(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


@pytest.mark.long
def test_checkpoints_go_from_groups_to_none_and_back(training: StartedRanks, tmp_path: Path) -> None:
    for number, rank in enumerate(training.run("saves", 4, within_s=WITHIN_S, folder=str(tmp_path))):
        for found in rank.result.values():
            assert found["same"] and (found["moments"] > 20 if number == 0 else found["moments"] == 0)
            went_on, loaded = found["losses"]
            assert loaded == pytest.approx(went_on, rel=1e-2)
