"""Ranks find each other, in each of the ways in which they can be started, and leave nothing but torch's own group."""

from __future__ import annotations

from started_ranks import StartedRanks

THREADS = ["MainThread", "hightide-clock", "hightide-signs"]


def test_from_the_environment_of_torchrun(started: StartedRanks) -> None:
    for rank, found in enumerate(one.result for one in started.run("from_environment", 2)):
        assert (found["rank"], found["world"], found["backend"]) == (rank, 2, "gloo")
        assert (found["nodes"], found["local_rank"], found["ranks_of_node"]) == ([0, 0], rank, [0, 1])
        assert found["any"]
        assert found["while"] == THREADS
        assert (found["threads"], found["is_initialised"], found["num_groups"]) == (["MainThread"], True, 1)


def test_the_users_group_stays_theirs(started: StartedRanks) -> None:
    for rank, found in enumerate(one.result for one in started.run("from_the_users_group", 3)):
        assert (found["rank"], found["world"], found["any"]) == (rank, 3, True)
        assert (found["threads"], found["is_initialised"], found["num_groups"]) == (["MainThread"], True, 1)
        assert found["again"]["any"]


def test_groups_of_some_ranks(started: StartedRanks) -> None:
    for rank, found in enumerate(one.result for one in started.run("halves", 4)):
        assert (found["mine"]["rank"], found["mine"]["world"], found["mine"]["any"]) == (rank % 2, 2, True)
        assert (found["all"]["rank"], found["all"]["world"], found["all"]["any"]) == (rank, 4, True)
        assert f"process {rank} is not in the group" in found["other"]


def test_nodes_are_told_by_their_names_not_by_the_environment(started: StartedRanks) -> None:
    found = [one.result for one in started.run("on_two_nodes", 3)]
    assert [one["nodes"] for one in found] == [[0, 1, 0]] * 3
    assert [one["local_rank"] for one in found] == [0, 0, 1]
    assert [one["ranks_of_node"] for one in found] == [[0, 2], [1], [0, 2]]


def test_a_rank_that_never_comes_is_named(started: StartedRanks) -> None:
    message = started.run("never_comes", 2)[0].result["message"]
    assert "rank 0 has waited 1 s for rank(s) 1" in message and "timeout_s" in message


def test_what_ranks_cannot_have_together_is_told_to_all(started: StartedRanks) -> None:
    for found in (rank.result for rank in started.run("other_backends", 3)):
        assert "different backends (rank 0 nccl, rank 1 gloo, rank 2 gloo)" in found["message"]
        assert found["is_initialised"]
