"""A frozen model beside one that several ranks train: equal to the plain one, in shards that add up to one copy."""

from __future__ import annotations

import pytest

from hightide.shard.gloo_lane import STAGING_BYTES
from started_ranks import StartedRanks

WITHIN_S = 100.0
POLICY, REFERENCE = 500 * 1024, 120 * 1024


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_dpo_equals_ddp_and_ranks_have_one_copy(training: StartedRanks, world: int) -> None:
    options = {"gpu": POLICY, "gpu_frozen": REFERENCE, "host_frozen": 2**20}
    found = [one.result for one in training.run("ranked_frozen.beside", world, within_s=WITHIN_S, **options)]
    for of_rank in found:
        for ours, theirs in of_rank["losses"]:
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert of_rank["alone"][0] == pytest.approx(of_rank["alone"][1], rel=1e-5)
        assert of_rank["gpu"][0] <= POLICY and of_rank["gpu"][1] <= REFERENCE
        assert of_rank["host"] <= 2**20 // world
        assert of_rank["ranks"] == world and of_rank["streams"] and of_rank["frozen"] and not of_rank["trainable"]
    assert found[0]["difference"] < 2e-6
    assert sum(of_rank["host"] for of_rank in found) < 1.2 * found[0]["param_bytes"], (
        "one copy, no gradients, no states"
    )


def test_the_host_holds_it_once(training: StartedRanks) -> None:
    """64 MiB of parameters, of which the accelerators hold little."""
    gpu_bytes, host_bytes = 12 << 20, 66 << 20
    found = [
        one.result
        for one in training.run("ranked_frozen.in_memory", 2, WITHIN_S, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    ]
    assert all(24 << 20 < one["host"] <= host_bytes // 2 for one in found)
    most_bytes = host_bytes + 2 * (gpu_bytes + 2 * STAGING_BYTES)  # what a lane sends and receives
    assert sum(one["bytes"] for one in found) <= most_bytes < 2 * ((64 << 20) + gpu_bytes)


@pytest.mark.long
def test_a_rank_that_evaluates_alone_ends(training: StartedRanks) -> None:
    first, second = training.run("ranked_frozen.evaluates_alone", 2, within_s=WITHIN_S, gpu_frozen=REFERENCE)
    assert second.status == 0 and first.status == 1 and not first.timed_out
    assert "rank 1 is no longer there: it has ended" in first.error
