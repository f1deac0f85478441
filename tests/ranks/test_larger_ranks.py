"""Batches that are larger than the example, of one rank or of several: all ranks do the same, and train as DDP does."""

from __future__ import annotations

from typing import Any

import pytest

from started_ranks import StartedRanks

WITHIN_S = 100.0
SMALL, SHORT, LARGE = (2, 8), (1, 8), (4, 16)
MANY, LONG = (4, 8), (2, 16)
MOVES, TOO_LITTLE, PLENTY = "200KiB", "120KiB", "32MiB"  # of GPU memory, for LARGE


def check(
    started: StartedRanks, calls: list[Any], gpu: str, num_plans: int, world: int = 2, **options: Any
) -> list[dict[str, Any]]:
    """`calls`: by step and call, the shape of each rank."""
    ranks = started.run("ranked_larger.larger", world, within_s=WITHIN_S, calls=calls, gpu=gpu, **options)
    found = [rank.result for rank in ranks]
    for of_rank in found:
        assert of_rank["losses"] == pytest.approx(of_rank["plain"], rel=1e-5, abs=1e-6)
        assert of_rank["deviations"] == 0
        assert all(0 <= peak <= limit for peak, limit in zip(of_rank["peaks"], of_rank["limits"], strict=True))
        for name in ("plans", "refused", "batches", "digest"):
            assert of_rank[name] == found[0][name], name
    assert found[0]["difference"] < 2e-6
    assert len(set(found[0]["plans"])) == num_plans
    assert len(found[0]["warned"]) == num_plans - 1 and not any(one["warned"] for one in found[1:])
    return found


def test_the_larger_batch_of_one_rank_moves_all(training: StartedRanks) -> None:
    """Once: later ones are known on all ranks, whoever has them."""
    calls = [[[SMALL, SMALL]], [[SMALL, LARGE]], [[LARGE, SHORT]], [[LONG, MANY]]]
    found = check(training, calls, MOVES, 2, update="in_backward")
    assert found[0]["plans"][1] != found[0]["plans"][2]  # before that pass
    assert "a batch of input_ids 4x16, labels 4x16 on rank 1, where batches had up to" in found[0]["warned"][0]
    assert found[0]["batches"] == "input_ids 4x16, labels 4x16"


def test_the_plan_is_made_for_the_largest_example(training: StartedRanks) -> None:
    found = check(training, [[[SMALL, LARGE]], [[LARGE, SMALL]]], MOVES, 1, examples=[SMALL, LARGE])
    assert found[0]["batches"] == "input_ids 4x16, labels 4x16"


def test_between_the_calls_of_a_step_all_refuse_the_same(training: StartedRanks) -> None:
    """Gradients in shards stay where they are. Training goes on, with whatever is left of the step."""
    calls = [[[SMALL, SMALL], [SMALL, LARGE]], [[SMALL, LARGE], [LARGE, SMALL]], [[SMALL, SMALL], [LARGE, LARGE]]]
    found = check(training, calls, MOVES, 2, refused=[[0, 1]])
    (said,) = found[0]["refused"]
    assert said.startswith("a batch of input_ids 4x16, labels 4x16 on rank 1, where batches had up to input_ids 2x8")
    assert "pass the larger batch in the first call of a step" in said


def test_a_rank_that_cannot_profile_its_batch_ends_all(training: StartedRanks) -> None:
    first, second = training.run("ranked_larger.raises_in_profiling", 2, within_s=WITHIN_S, gpu=MOVES)
    assert first.status == second.status == 1 and not first.timed_out and not second.timed_out
    assert second.error.endswith(" KeyError: 'no such profile'")
    assert "profiles of larger batches failed on rank 1: KeyError: 'no such profile'" in first.error


@pytest.mark.long
def test_what_does_not_fit_all_refuse_with_the_same_numbers(training: StartedRanks) -> None:
    calls = [[[SMALL, SMALL]], [[SMALL, LARGE]], [[LARGE, SMALL]], [[SMALL, SMALL]]]
    found = check(training, calls, TOO_LITTLE, 1, refused=[[1, 0], [2, 0]])
    for said in found[0]["refused"]:
        assert "bytes (45.4 KiB) are missing on the gpu" in said and "2 of 4 samples fit" in said


@pytest.mark.long
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_each_rank_is_larger_in_another_way(training: StartedRanks, update: str) -> None:
    calls = [[[SMALL, SMALL, SMALL]], [[LONG, MANY, SMALL]], [[SHORT, LARGE, LONG]], [[LARGE, SMALL, LARGE]]]
    found = check(training, calls, MOVES, 2, world=3, update=update)
    assert "2x16 on rank 0; a batch of input_ids 4x8, labels 4x8 on rank 1, where" in found[0]["warned"][0]


@pytest.mark.long
def test_a_plan_that_holds_it_stays(training: StartedRanks) -> None:
    calls = [[[SMALL, SMALL]], [[SMALL, LARGE]], [[LARGE, SMALL]]]
    check(training, calls, PLENTY, 1, clip=0.5)


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [2, 3])
def test_with_accumulation_the_first_call_of_a_step_moves(training: StartedRanks, accumulate: int) -> None:
    rest = [[SMALL, SHORT]] * (accumulate - 1)
    calls = [[[SMALL, SMALL], *rest], [[SMALL, LONG], *rest], [[LARGE, SMALL], *rest], [[LARGE, LARGE], *rest]]
    check(training, calls, MOVES, 3, clip=0.5)


@pytest.mark.long
def test_a_rank_that_takes_no_part_ends_all(training: StartedRanks) -> None:
    for rank in training.run("ranked_larger.takes_no_part", 2, within_s=WITHIN_S, gpu=MOVES):
        assert rank.status == 1 and not rank.timed_out
        assert "RankFailure" in rank.error and "the beginning of a forward" in rank.error
