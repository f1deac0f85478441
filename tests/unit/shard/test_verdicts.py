"""Decisions on signs that are made up: who waits for whom, and whether for ever."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hightide.shard.issued import Issued
from hightide.shard.signs import OUTSIDE, Position, Sign, Standstill, Wait
from hightide.shard.verdicts import EQUALLY, EVALUATE, EXCHANGED, deadlock, difference, gone_on, missing, stuck

EVERYONE = (0, 1, 2)


def wait(lane: str, number: int = 0, members: tuple[int, ...] = EVERYONE, name: str = "") -> Wait:
    return Wait(lane, number, name or f"{lane} {number}", members)


def sign(*waits: Wait, calls: Mapping[str, int] | None = None, ended: str | None = None, **numbers: int) -> Sign:
    """A rank that has issued so many on each lane, and stands still at these waits; without any, it works."""
    lanes = {lane: Position(number, "", (f"{lane} {number}",)) for lane, number in numbers.items()}
    still = Standstill(7, waits) if waits else None
    return Sign(3, "tick 4", lanes, None, ended, "train.py:5", calls or {}, still)


def on_two_lanes() -> dict[int, Sign]:
    """Rank 0 has one gather more than rank 1, which has a reduction more; rank 2 has come to both."""
    return {
        0: sign(wait("gather", 5), gather=5, reduce=8),
        1: sign(wait("reduce", 9), gather=4, reduce=9),
        2: sign(wait("gather", 5), wait("reduce", 9), gather=5, reduce=9),
    }


def test_ranks_that_wait_for_each_other_are_found() -> None:
    assert stuck(on_two_lanes()) == [0, 1, 2]


def test_a_rank_that_works_may_still_come() -> None:
    """Then nobody is stuck who waits for it alone."""
    signs = on_two_lanes()
    signs[1] = sign(gather=4, reduce=9)
    assert stuck(signs) == []
    signs[1] = sign(wait("reduce", 9), gather=4, reduce=9)
    signs[0] = sign(gather=5, reduce=8)
    assert stuck(signs) == []


def test_what_all_have_come_to_is_under_way() -> None:
    assert stuck({rank: sign(wait("gather", 5), gather=5) for rank in EVERYONE}) == []


def test_who_waits_for_two_things_may_go_on_with_either() -> None:
    """Rank 0's reduction is under way; what it does then, nobody knows."""
    signs = {
        0: sign(wait("gather", 5), wait("reduce", 8), gather=5, reduce=8),
        1: sign(wait("reduce", 9), gather=4, reduce=9),
        2: sign(wait("reduce", 9), gather=4, reduce=9),
    }
    assert stuck(signs) == []


def test_others_may_be_stuck_while_one_works() -> None:
    """Ranks 0 and 1 wait for each other; rank 2, which works, will come to nothing that ends it."""
    signs = on_two_lanes()
    signs[2] = sign(gather=4, reduce=8)
    assert stuck(signs) == [0, 1]


def test_a_chain_that_ends_at_a_rank_that_works_is_no_circle() -> None:
    signs = {
        0: sign(wait("gather", 5), gather=5, reduce=9, control=3),
        1: sign(wait("reduce", 9, (1, 2)), gather=4, reduce=9, control=3),
        2: sign(gather=4, reduce=8, control=3),
    }
    assert stuck(signs) == []
    signs[2] = sign(wait("control", 4), gather=4, reduce=8, control=4)
    assert stuck(signs) == [0, 1, 2]


def test_who_has_ended_comes_to_nothing() -> None:
    signs = {0: sign(wait("gather", 5, (0, 1)), gather=5), 1: sign(ended="it has ended", gather=4)}
    assert stuck(signs) == [0]


@pytest.mark.parametrize("members", [EVERYONE, (0, 1, 2, 7)])
def test_a_barrier_of_the_users_own_is_a_wait(members: tuple[int, ...]) -> None:
    """Also of ranks of which some are not ours."""
    barrier = wait(OUTSIDE, members=members, name="barrier")
    signs = {0: sign(wait("gather", 5), gather=5), 1: sign(barrier, gather=4), 2: sign(barrier, gather=4)}
    assert missing(barrier, signs) == [0]
    assert stuck(signs) == [0, 1, 2]
    signs[0] = sign(gather=5)  # it writes a file, and comes
    assert stuck(signs) == []


def test_a_barrier_without_the_rank_that_waits_ends() -> None:
    barrier = wait(OUTSIDE, members=(1, 2), name="barrier")
    signs = {0: sign(wait("gather", 5), gather=5), 1: sign(barrier, gather=4), 2: sign(barrier, gather=4)}
    assert stuck(signs) == []
    signs[2] = sign(wait(OUTSIDE, members=EVERYONE, name="all_reduce"), gather=4)  # it waits in another one
    assert stuck(signs) == [0, 1, 2]


def test_a_broadcast_waits_for_its_source_only() -> None:
    """Rank 2 waits for rank 1, which works; when that waits for rank 0, and rank 0 for it, all of them are stuck."""
    signs = {
        0: sign(wait("gather", 5), gather=5),
        1: sign(gather=4),
        2: sign(wait(OUTSIDE, members=(1, 2), name="broadcast"), gather=4),
    }
    assert stuck(signs) == []
    signs[1] = sign(wait(OUTSIDE, members=(0, 1), name="broadcast"), gather=4)
    assert stuck(signs) == [0, 1, 2]


def test_groups_wait_for_their_own_ranks_only() -> None:
    """Rank 2 is of another group; that it has not come does not matter."""
    signs = {
        0: sign(wait("gather", 5, (0, 1)), gather=5, reduce=9),
        1: sign(wait("reduce", 9, (0, 1)), gather=5, reduce=9),
        2: sign(wait("control", 2), gather=4, control=2),
    }
    assert stuck(signs) == []


def test_a_deadlock_is_told_with_ranks_ticks_waits_and_calls() -> None:
    calls = {"backward": 3, "step()": 3}
    signs = {
        0: sign(wait("gather", 5), gather=5, reduce=8, calls=calls),
        1: sign(wait("reduce", 9), gather=4, reduce=9, calls={"backward": 4, "step()": 3}),
        2: sign(wait("control", 1), gather=4, reduce=8, control=1, calls=calls),
    }
    text = deadlock([0, 1, 2], signs, "control").text
    at = "(at tick 4, train.py:5) waits for"
    assert f"rank 0 {at} gather 5 (number 5 of lane gather), to which ranks 1, 2 have not come" in text
    assert f"rank 1 {at} reduce 9 (number 9 of lane reduce), to which ranks 0, 2 have not come" in text
    assert "Calls so far: backward: 3 on ranks 0, 2, 4 on rank 1. " in text and text.endswith(f"{EXCHANGED}. {EQUALLY}")


def test_a_deadlock_of_an_evaluation_says_who_must_evaluate() -> None:
    barrier = wait(OUTSIDE, members=(0, 1), name="barrier")
    signs = {0: sign(wait("gather", 5, (0, 1)), gather=5, calls={"evaluation": 1}), 1: sign(barrier, gather=4)}
    text = deadlock([0, 1], signs, "control").text
    assert "rank 1 (at tick 4, train.py:5) waits for torch.distributed.barrier(), to which rank 0 has not come" in text
    assert "evaluation: 1 on rank 0, 0 on rank 1" in text and text.endswith(EVALUATE) and EXCHANGED not in text
    signs[1] = sign(wait("control", 1, (0, 1)), gather=4, control=1)  # it reads a gradient: either may be the mistake
    assert deadlock([0, 1], signs, "control").text.endswith(f"{EXCHANGED}. {EVALUATE}")


def test_of_many_ranks_a_few_are_told() -> None:
    signs = {rank: sign(wait("gather", 5, tuple(range(9))), gather=5) for rank in range(8)}
    signs[8] = sign(wait("control", 1, tuple(range(9))), gather=4, control=1)
    assert stuck(signs) == list(range(9))
    text = deadlock(list(range(9)), signs, "control").text
    assert text.count("waits for") == 4 and "and 5 more ranks wait" in text


def test_who_has_gone_on_is_told() -> None:
    waited = Issued("control", 3, "gradient of w", "", 0.0)
    numbers = {"gather": 4, "reduce": 9, "save": 0, "control": 3}
    signs = {1: sign(gather=5, reduce=9, control=2)}
    fault = gone_on(0, waited, numbers, signs, apart=("save",))
    assert fault is not None and "rank 0 came to gradient of w (number 3 of lane control)" in fault.text
    assert "rank 1 has gone on without it, to gather 5 (number 5 of lane gather)" in fault.text
    assert gone_on(0, waited, numbers, {1: sign(gather=5, control=3)}, ()) is None  # it has come
    assert gone_on(0, waited, numbers, {1: sign(gather=4, control=2)}, ()) is None  # it may still
    assert gone_on(0, waited, numbers, {1: sign(gather=4, control=2, save=2)}, ("save",)) is None


def test_who_issued_what_is_told_by_name() -> None:
    told = difference("gather", 4, ["a", "b", "a"], [0, 1, 2])
    assert "number 4 of lane gather: a on ranks 0, 2, b on rank 1" in told and told.endswith(f"{EXCHANGED}. {EQUALLY}")
    assert difference("gather", 4, ["a, of an evaluation, after 3 steps", "a after 3 steps"], [0, 1]).endswith(EVALUATE)
