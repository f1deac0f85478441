"""Several ranks over gloo, on simulated accelerators, train as DDP of plain PyTorch does, wherever their plan puts
things; and plans that average gradients at the same moments give the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from started_ranks import StartedRanks

WITHIN_S = 100.0
ALL = ["replicated", "sharded on the gpu", "whole parameters", "streamed", "states on the host", "mixed"]
SOME = ["streamed", "mixed"]


def check(
    training: StartedRanks, world: int, places: list[str], rel: float = 1e-5, most: float = 2e-6, **options: Any
) -> list[dict[str, Any]]:
    """Each rank's losses and norms, and in the end the weights, are those of DDP, and no tier is above its limit.
    `most`: by which a weight differs."""
    ranks = training.run("train", world, within_s=WITHIN_S, places=places, **options)
    found = [rank.result for rank in ranks]
    for of_rank in found:
        plain = of_rank.pop("plain")
        for where, trained in of_rank.items():
            print(where)  # pytest shows it where the next line fails
            assert trained["losses"] == pytest.approx(plain["losses"], rel=rel, abs=1e-6)
            assert trained["norms"] == pytest.approx(plain["norms"], rel=rel, abs=1e-6)
            assert trained["norms"] == found[0][where]["norms"]
            assert trained["deviations"] == 0
            assert not trained["above"]
            assert trained["unwrapped"] == found[0][where]["digest"]
    for trained in found[0].values():
        assert trained["difference"] < most
    return found


def assert_same_bits(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert len({tuple(trained["losses"]) for trained in of_rank.values()}) == 1
    assert len({trained["digest"] for trained in found[0].values()}) == 1


def test_clipped_steps_give_the_same_bits_under_every_plan(training: StartedRanks) -> None:
    assert_same_bits(check(training, 2, ALL, subject="llama", clip=0.5))


def test_updates_in_backward(training: StartedRanks) -> None:
    places = ["from disk", *SOME]
    assert_same_bits(check(training, 2, places, subject="hand_written", update="in_backward"))


def test_tied_parameters(training: StartedRanks) -> None:
    check(training, 2, ["mixed"], subject="llama_tied", clip=0.5)


def test_few_trained_parameters(training: StartedRanks) -> None:
    assert_same_bits(check(training, 2, SOME, subject="hand_written", frozen=True, clip=0.1))


def test_batches_of_different_sizes(training: StartedRanks) -> None:
    check(training, 2, ["streamed"], subject="hand_written", uneven=True, clip=0.5)


def test_a_rank_without_labels(training: StartedRanks) -> None:
    check(training, 2, ["mixed"], subject="llama", ignored=True, clip=0.5)


@pytest.mark.parametrize("gradients", ["float32", pytest.param("param", marks=pytest.mark.long)])
def test_masters_of_16_bit_parameters(training: StartedRanks, gradients: str) -> None:
    """DDP rounds the mean to 16 bits, and what each rank brings."""
    options = {"subject": "hand_written", "dtype": "bfloat16", "gradients": gradients, "rel": 2e-2, "most": 8e-3}
    assert_same_bits(check(training, 2, ["sharded on the gpu", *SOME], **options))


def test_planned_accumulation(training: StartedRanks) -> None:
    assert_same_bits(check(training, 2, SOME, subject="hand_written", accumulate=3, sums="gpu", clip=0.5))
    check(training, 2, ["mixed"], subject="hand_written", accumulate=2, clip=0.5)


def test_sums_that_stay_are_used_where_they_are_by_updates_in_backward(training: StartedRanks) -> None:
    places = ["sharded on the gpu", "mixed"]
    check(training, 2, places, subject="hand_written", accumulate=2, sums="gpu", update="in_backward")


def test_sums_that_stay_go_on_after_a_step_as_the_mean_of_all_ranks(training: StartedRanks) -> None:
    """Nobody clears gradients: a rank must not go on with what it alone had of other ranks' shards."""
    places = ["sharded on the gpu", "mixed"]
    check(training, 2, places, subject="hand_written", accumulate=2, sums="gpu", clip=0.5, cleared=False)


def test_accumulation_that_no_plan_knows(training: StartedRanks) -> None:
    """A sum that goes on may still be averaged when the next backward begins, which that of a tied head does first."""
    check(training, 2, ["mixed", "replicated"], subject="llama_tied", accumulate=2, planned=False, clip=0.5)


def test_groups_of_ranks_with_a_copy_each(training: StartedRanks) -> None:
    """Two nodes of two ranks: shards inside a node, their mean across. Sums are added up in another order then."""
    check(training, 4, ["mixed"], subject="hand_written", replicas=2, clip=0.5)


@pytest.mark.long
@pytest.mark.parametrize(("world", "replicas"), [(4, 2), (3, 3), (2, 2)])
@pytest.mark.parametrize(
    "options",
    [
        {"update": "in_backward"},
        {"clip": 0.5},
        {"accumulate": 3, "sums": "gpu", "clip": 0.5},
        {"accumulate": 2, "sums": "host", "clip": 0.5},
        {"accumulate": 2, "planned": False, "clip": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("subject", ["llama_tied", "hand_written"])
def test_more_groups_of_ranks(
    training: StartedRanks, world: int, replicas: int, subject: str, options: dict[str, Any]
) -> None:
    check(training, world, ALL, subject=subject, replicas=replicas, **options)


def test_three_ranks(training: StartedRanks) -> None:
    check(training, 3, ["mixed"], subject="hand_written", clip=0.5)


@pytest.mark.long
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("subject", ["llama", "llama_tied", "hand_written"])
def test_more_ranks(training: StartedRanks, world: int, update: str, subject: str) -> None:
    found = check(training, world, ALL, subject=subject, update=update)
    if subject != "llama_tied":
        assert_same_bits(found)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sums", ["host", "gpu"])
@pytest.mark.parametrize("subject", ["llama", "llama_tied"])
def test_accumulation_of_more_models(training: StartedRanks, world: int, sums: str, subject: str) -> None:
    check(training, world, ALL, subject=subject, accumulate=3, sums=sums, clip=0.5)


def test_layers_that_ranks_leave_out(training: StartedRanks) -> None:
    """Nobody hangs, and whatever any rank has used is updated on all."""
    for where, update in (("streamed", "deferred"), ("mixed", "in_backward")):
        check_skips(training, where=where, update=update)


def check_skips(training: StartedRanks, **options: Any) -> None:
    for rank in training.run("skip", 2, within_s=WITHIN_S, **options):
        found = rank.result
        assert found["losses"] == pytest.approx(found["plain"], rel=1e-5)
        assert found["difference"] < 1e-6


def test_layers_that_ranks_leave_out_of_gradients_that_are_zeroed(training: StartedRanks) -> None:
    """A rank that adds nothing to a gradient multiplies it by 0 too."""
    check_skips(training, where="mixed", update="deferred", set_to_none=False)


def test_layers_that_ranks_leave_out_of_sums_that_stay(training: StartedRanks) -> None:
    """A rank that adds nothing to a sum of before, which is at its home, brings it to be averaged as the others do."""
    check_skips(training, where="streamed", update="deferred", set_to_none=False, accumulate=2, sums="gpu")


def test_a_layer_that_a_rank_leaves_out_before_a_frozen_one(training: StartedRanks) -> None:
    """Its backward begins with a block to which nothing is added, and yet it takes part in averages from the first."""
    check_skips(training, where="streamed", update="deferred", frozen=2)


def test_what_is_on_its_way_is_gathered_once(training: StartedRanks) -> None:
    """Else a rank where it has arrived already would not take part."""
    assert [rank.result for rank in training.run("fetches_twice", 2, within_s=WITHIN_S)] == [[True, False]] * 2


@pytest.mark.parametrize("where", ["streamed", "mixed"])
def test_what_ranks_exchange_off_the_plan_does_not_depend_on_how_far_their_lanes_are(
    training: StartedRanks, where: str
) -> None:
    """Else one of them gathers or averages what another does not. And whatever the lane, all issue it in one order."""
    first, second = (rank.result for rank in training.run("off_the_plan", 2, within_s=WITHIN_S, where=where))
    assert first["issued"] == second["issued"]
    for found in (first, second):
        assert found["losses"] == pytest.approx(found["plain"], rel=1e-5)


def test_layers_that_ranks_run_more_or_less_often(training: StartedRanks) -> None:
    """A gradient that is averaged twice in a backward has what another rank alone had added when it was first."""
    check_skips(training, where="streamed", update="deferred", rounds=2)


def test_layers_that_ranks_leave_out_of_a_step_that_comes_early(training: StartedRanks) -> None:
    """All ranks average what any of them has not."""
    check_skips(training, where="replicated", update="deferred", accumulate=3, set_to_none=False)


@pytest.mark.parametrize(
    ("clip", "backwards", "places"),
    [
        (None, 1, ["replicated", "mixed"]),
        (0.5, 2, ["replicated"]),
        *(pytest.param(clip, number, ALL, marks=pytest.mark.long) for clip in (None, 0.5) for number in (1, 2)),
    ],
)
def test_several_forwards_before_backward(
    training: StartedRanks, clip: float | None, backwards: int, places: list[str]
) -> None:
    """What is added to a gradient after its planned average is averaged too, before anybody uses it."""
    for rank in training.run("pairs", 2, within_s=WITHIN_S, places=places, clip=clip, backwards=backwards):
        for found in rank.result["found"].values():
            assert found["losses"] == pytest.approx(rank.result["plain"], rel=1e-5)
            assert found["difference"] < 2e-6


def test_statistics_are_those_of_the_first_rank(training: StartedRanks) -> None:
    """As DDP has them when a model is called; so an evaluation is the same on all ranks."""
    first, second = (rank.result for rank in training.run("normalise", 2, within_s=WITHIN_S, where="mixed"))
    for found in (first, second):
        assert found["losses"] == pytest.approx(found["plain"], rel=1e-5)
    assert first["losses"][1::2] == second["losses"][1::2]
    assert first["digest"] == second["digest"]


def test_an_overflow_on_one_rank_skips_the_step_on_all(training: StartedRanks) -> None:
    for rank in training.run("overflow", 2, within_s=WITHIN_S, where="mixed"):
        found = rank.result
        plain = found["plain"]
        assert found["scales"] == plain["scales"] == [64.0, 32.0, 32.0, 32.0]
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("world", "where", "replicas"),
    [
        (2, "mixed", 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, "streamed", 1), (3, "mixed", 1))),
        pytest.param(4, "mixed", 2, marks=pytest.mark.long),
    ],
)
def test_gradients_are_read_replaced_and_clipped_by_any_norm(
    training: StartedRanks, world: int, where: str, replicas: int
) -> None:
    for rank in training.run("gradients", world, within_s=WITHIN_S, where=where, replicas=replicas):
        found, plain = rank.result, rank.result["plain"]
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(plain["norms"], rel=1e-4, abs=1e-7)
        for mine, other in zip(found["read"], plain["read"], strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)


LOOPS = ["dropout", "autocast", "scaler", "items", "last batch", "accumulate"]
FAST = {("dropout", 2, "mixed", 1), ("items", 2, "streamed", 1), ("accumulate", 2, "mixed", 1)}


@pytest.mark.parametrize(
    ("loop", "world", "where", "replicas"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.long)
        for case in (
            *((loop, 2, "mixed", 1) for loop in LOOPS),
            *((loop, 2, "streamed", 1) for loop in LOOPS),
            *((loop, 3, "mixed", 1) for loop in LOOPS),
            *((loop, 4, "mixed", 2) for loop in LOOPS),
            *((loop, 4, "streamed", 1) for loop in LOOPS),
        )
    ],
)
def test_loops_that_users_of_ddp_write(
    training: StartedRanks, loop: str, world: int, where: str, replicas: int
) -> None:
    rel, most = (2e-2, 5e-3) if loop in ("autocast", "scaler") else (1e-5, 2e-6)  # DDP rounds what it sums in bf16
    for rank in training.run("loops", world, within_s=WITHIN_S, loop=loop, where=where, replicas=replicas):
        found = rank.result
        assert found["losses"] == pytest.approx(found["plain"], rel=rel)
        assert found["difference"] < most
        if loop == "accumulate" and where == "mixed":
            check_exchanged_at_last(found["reduced"])


def check_exchanged_at_last(counted: list[list[int]]) -> None:
    """Bytes of gradients so far, after each pass: none before the last of a step, of those that stay."""
    first, second, last = (moved for step, moved in counted if step == 1)
    assert first == second < last
