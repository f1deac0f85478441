"""Whatever happens to one rank, all others end soon, and say why."""

from __future__ import annotations

import random

import pytest

from started_ranks import EndedRank, StartedRanks

WITHIN_S = 12.0  # on a machine that is busy; signs come every 0.3 s, and a rank is silent after 3.6 s


def check_all_end(ranks: list[EndedRank], victim: int, *texts: str) -> None:
    """Soon after the moment that the victim has written."""
    struck_s = float(ranks[victim].stdout.splitlines()[0])
    for number, rank in enumerate(ranks):
        if number != victim:
            assert rank.status == 1 and not rank.timed_out, (number, rank)
            assert rank.ended_s - struck_s < WITHIN_S
            assert f"RankFailure: rank {number}, at " in rank.error, rank.stderr
            assert any(text in rank.error for text in texts), rank.error


def check_struck(started: StartedRanks, kind: str, world: int, victim: int, seed: int) -> None:
    is_stop = kind == "SIGSTOP"
    ranks = started.run("struck", world, 30.0, stopped=victim if is_stop else None, kind=kind, victim=victim, seed=seed)
    assert ranks[victim].status == -9 and ranks[victim].timed_out == is_stop
    if victim == 0:
        texts = ("which hosts the store, has not answered",) if is_stop else ("which hosts the store, is gone",)
    else:
        texts = (f"rank {victim} has given no sign of life",) if is_stop else (f"rank {victim} died",)
    check_all_end(ranks, victim, *texts)
    for number, rank in enumerate(ranks):
        if number != victim:
            assert "bytes (number " in rank.error and f"rank {victim}" in rank.error


@pytest.mark.parametrize(
    ("kind", "world", "victim"), [("SIGKILL", 3, 1), ("SIGKILL", 2, 0), ("SIGSTOP", 2, 1), ("SIGSTOP", 3, 0)]
)
def test_a_rank_that_is_killed_or_stopped(started: StartedRanks, kind: str, world: int, victim: int) -> None:
    check_struck(started, kind, world, victim, seed=world)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_at_random_moments(started: StartedRanks, kind: str, world: int, seed: int) -> None:
    check_struck(started, kind, world, random.Random(seed).randrange(world), seed)


@pytest.mark.parametrize(("world", "victim", "step"), [(2, 0, 0), (3, 1, 7)])
def test_the_others_are_told_what_a_rank_raised(started: StartedRanks, world: int, victim: int, step: int) -> None:
    ranks = started.run("raises", world, victim=victim, step=step)
    assert ranks[victim].status == 1 and "KeyError: 'a bad batch'" in ranks[victim].error
    check_all_end(ranks, victim, f"rank {victim} raised KeyError: 'a bad batch' (at step {step})")


def test_an_interrupt_of_a_wait_is_told(started: StartedRanks) -> None:
    """Also if the program that was interrupted goes on."""
    ranks = started.run("interrupted", 2)
    assert ranks[1].status == 0
    check_all_end(ranks, 1, "rank 1 raised KeyboardInterrupt")
    assert ranks[0].ended_s < ranks[1].ended_s


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_interrupts_at_random_moments(started: StartedRanks, seed: int) -> None:
    victim = seed % 4
    ranks = started.run("struck", 4, kind="SIGINT", victim=victim, seed=seed)
    assert ranks[victim].status == -2 and "KeyboardInterrupt" in ranks[victim].stderr
    check_all_end(ranks, victim, f"rank {victim} raised KeyboardInterrupt")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("world", [2, 4])
def test_raised_at_random_moments(started: StartedRanks, world: int, seed: int) -> None:
    moment = random.Random(seed)
    test_the_others_are_told_what_a_rank_raised(started, world, moment.randrange(world), moment.randrange(100))


@pytest.mark.parametrize(("how", "text"), [("exception", "it has ended with ZeroDivisionError"), ("done", "has ended")])
def test_a_rank_that_has_ended_is_not_waited_for(started: StartedRanks, how: str, text: str) -> None:
    ranks = started.run("ends_early", 2, quick_end=False, how=how)
    check_all_end(ranks, 1, f"rank 1 is no longer there: {text}" if how == "exception" else text)


@pytest.mark.parametrize(("world", "step"), [(2, 0), (3, 3)])
def test_other_orders_are_told_to_all(started: StartedRanks, world: int, step: int) -> None:
    zero = "rank 0" if world == 2 else "ranks 0, 2"
    expected = (
        f"number {step + 1} of lane gather: chunk {step}, 40 bytes on {zero}, chunk {step + 1}, 40 bytes on rank 1"
    )
    for number, rank in enumerate(started.run("other_order", world, step=step)):
        assert rank.status == 1 and f"RankFailure: rank {number}, at " in rank.error and expected in rank.error


@pytest.mark.parametrize("numel", [10, 100_000])
def test_other_sizes_are_told_to_all(started: StartedRanks, numel: int) -> None:
    """Where gloo itself would end the process, without a word to the others."""
    expected = f"chunk 1, {4 * numel} bytes on rank 0, chunk 1, {4 * numel + 400} bytes on rank 1"
    for rank in started.run("other_size", 2, numel=numel):
        assert rank.status == 1 and expected in rank.error


def test_a_rank_that_was_stopped_goes_on(started: StartedRanks) -> None:
    for rank in started.run("goes_on_after_a_stop", 2, quick_end=False):
        assert rank.result == {}


def test_a_slow_rank_gives_a_warning(started: StartedRanks) -> None:
    ranks = started.run("slow", 2, slow_s=3.0, timeout_s=30)
    assert [rank.result for rank in ranks] == [{}, {}]
    assert "UserWarning: rank 1 has waited" in ranks[1].stderr and "rank 0 is at an evaluation" in ranks[1].stderr
    assert "gives up after 30 s" in ranks[1].stderr and "Warning" not in ranks[0].stderr


def test_a_slow_rank_has_a_timeout(started: StartedRanks) -> None:
    ranks = started.run("slow", 2, slow_s=2.5, timeout_s=1)
    for rank in ranks:
        assert rank.status == 1 and "chunk 0, 40 bytes (number 1 of lane gather) was not through" in rank.error
        assert "rank 0 is at an evaluation" in rank.error and "a larger timeout_s than 1" in rank.error


def test_who_waits_for_nobody_goes_on(started: StartedRanks) -> None:
    for rank in started.run("alone_in_the_end", 3, quick_end=False):
        assert rank.result == {} and rank.stderr == ""
