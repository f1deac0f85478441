"""Several watchmen in one process, over a store in it: what they find out about each other."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from hightide.shard import watchman as watchman_module
from hightide.shard.fault_finder import BEATS_OF_GPU
from hightide.shard.issued import SHOWN
from hightide.shard.own_rank import Standing
from hightide.shard.signs import BEATS_OF_DOUBT, Patience
from hightide.shard.verdicts import compare
from hightide.shard.watchman import RankFailure, Watchman
from waiting import LONG_S, OwnThreads, soon

QUICK = Patience(timeout_s=60.0, warn_s=30.0, silent_s=1.2, beat_s=0.02)


class FaultyStore:
    """A connection that can hang or be cut."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.hangs_at: set[str] = set()  # the calls that do
        self.is_cut = False
        self.goes_on = threading.Event()

    def _may(self, call: str) -> None:
        if call in self.hangs_at:
            self.goes_on.wait()
        if self.is_cut:
            raise RuntimeError("connection reset")

    def set(self, key: str, value: str) -> None:
        self._may("set")
        self.store.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._may("get")
        return [self.store.get(key) for key in keys]


class Watched:
    """So many ranks; rank 0 hosts the store."""

    def __init__(self, world: int, patience: Patience = QUICK) -> None:
        store = dist.HashStore()
        self.stores = [FaultyStore(store) for _ in range(world)]
        self.num_broken_off = [0] * world
        self.ranks = [
            Watchman(one, rank, world, ("gather", "reduce"), patience, "rank 0", 0)
            for rank, one in enumerate(self.stores)
        ]
        for rank, watchman in enumerate(self.ranks):
            watchman.break_off = lambda rank=rank: self._break_off(rank)
            watchman.doing = f"tick {rank}"
            watchman.give_first_sign()
        for watchman in self.ranks:
            watchman.begin()

    def _break_off(self, rank: int) -> None:
        self.num_broken_off[rank] += 1

    def message(self, rank: int) -> str:
        """Of the failure that it comes to know of."""

        def fails() -> bool:
            try:
                self.ranks[rank].check()
            except RankFailure:
                return True
            return False

        assert soon(fails)
        with pytest.raises(RankFailure) as caught:
            self.ranks[rank].check()
        assert soon(lambda: self.num_broken_off[rank] == 1)
        return str(caught.value)

    def finds(self, rank: int, after_s: float = 0.0) -> str | None:
        """What its clock would find, so many seconds later."""
        fault = self.ranks[rank]._find_fault(time.monotonic() + after_s)
        return None if fault is None else fault.text

    def hear(self, rank: int) -> None:
        """Until it has read signs that were given from now on."""
        before = self.ranks[rank]._heard_s
        assert soon(lambda: self.ranks[rank]._heard_s > before + 2 * QUICK.beat_s)

    def end(self) -> None:
        for store in self.stores:
            store.hangs_at.clear()
            store.goes_on.set()
        for watchman in reversed(self.ranks):
            watchman.end()


@pytest.fixture
def watched() -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []
    threads = OwnThreads()

    def make(world: int, patience: Patience = QUICK) -> Watched:
        made.append(Watched(world, patience))
        return made[-1]

    yield make
    for one in made:
        one.end()
    assert threads.end()


def test_all_are_told_what_one_raised(watched: Callable[..., Watched]) -> None:
    team = watched(3)
    team.ranks[0].issue("gather", "chunk 7, 8 bytes")
    team.ranks[1].fail(ValueError("a bad batch\nof many"))
    assert "rank 0, at tick 0, waited" in team.message(0)
    assert "for chunk 7, 8 bytes (number 1 of lane gather), and cannot go on: rank 1 raised" in team.message(0)
    for rank in range(3):
        assert team.message(rank).endswith("rank 1 raised ValueError: a bad batch (at tick 1)")
    with pytest.raises(RankFailure):
        team.ranks[2].issue("gather", "chunk 8")


def test_the_first_fault_stays(watched: Callable[..., Watched]) -> None:
    team = watched(2)
    team.ranks[1].fail(ValueError("first"))
    team.ranks[1].fail(ValueError("second"))
    assert "first" in team.message(0)
    team.ranks[0].fail(RankFailure("what it has learnt is none of its own"))
    assert "first" in team.message(0) and "first" in team.message(1)


def test_ranks_that_issue_other_collectives_are_told(watched: Callable[..., Watched]) -> None:
    team = watched(2)
    for watchman, chunks in zip(team.ranks, ("abc", "abd"), strict=True):
        for chunk in chunks:
            watchman.issue("reduce", chunk, lambda: True)
    for rank in range(2):
        assert "number 3 of lane reduce: c on rank 0, d on rank 1" in team.message(rank)


def test_also_when_the_difference_is_long_ago() -> None:
    ranks = [Watchman(FaultyStore(dist.HashStore()), rank, 2, ("gather",), QUICK, "rank 0", 0) for rank in range(2)]
    for rank, watchman in enumerate(ranks):
        for number in range(3 * SHOWN):
            watchman.issue("gather", f"{number} {rank if number == 1 else 0}", lambda: True)
    for rank in range(2):
        fault = compare(rank, ranks[rank].own.logs, 1 - rank, ranks[1 - rank]._sign())
        assert fault is not None
        assert fault.text == f"ranks 0, 1 issued different collectives on lane gather, before number {3 * SHOWN}"


def test_a_rank_that_is_behind_is_waited_for(watched: Callable[..., Watched]) -> None:
    team = watched(2)
    for chunk in "abcd":
        team.ranks[0].issue("gather", chunk)
    team.ranks[1].issue("gather", "a")
    for rank in range(2):
        team.hear(rank)
        assert team.finds(rank, QUICK.silent_s / 2) is None


def test_a_silent_rank_is_lost_to_who_waits_for_it(watched: Callable[..., Watched]) -> None:
    team = watched(3)
    team.stores[2].hangs_at = {"set"}
    silent_s = lambda: team.ranks[0]._heard_s - team.ranks[0]._others[2].heard_s  # noqa: E731
    assert soon(lambda: silent_s() > QUICK.silent_s)
    assert team.finds(0) is None  # nobody waits
    team.ranks[0].issue("gather", "a")
    assert "rank 2 has given no sign of life for" in team.message(0) and "(at tick 2, " in team.message(0)
    assert "rank 2 has given no sign of life for" in team.message(1)  # it is told


def test_a_store_that_hangs_is_the_fault_of_its_host(watched: Callable[..., Watched]) -> None:
    team = watched(2)
    team.stores[1].hangs_at = {"get"}
    team.ranks[1].issue("gather", "a")
    assert "rank 0 (at tick 0), which hosts the store, has not answered for" in team.message(1)


def test_a_store_that_is_gone_is_the_fault_of_its_host(watched: Callable[..., Watched]) -> None:
    team = watched(2)
    team.stores[1].is_cut = True
    assert soon(lambda: team.ranks[1]._lost_store is not None)
    assert team.finds(1) is None
    team.ranks[1].issue("gather", "a")
    gone = "rank 0 (at tick 0), which hosts the store, is gone (RuntimeError: connection reset)"
    assert gone in team.message(1)


class Clock:
    """That can be put forward, as it is for a process that was stopped."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def test_a_process_that_was_stopped_gives_the_others_time(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(watchman_module, "time", clock)
    team = watched(2, Patience(warn_s=1e4, timeout_s=1e4, silent_s=30.0, beat_s=0.02))
    team.stores[0].hangs_at = {"get"}  # nothing is heard so soon
    before_s = team.ranks[0]._heard_s
    assert soon(lambda: clock.monotonic() > before_s + 0.2)
    team.ranks[0].issue("gather", "a")
    clock.ahead_s = 300.0
    assert soon(lambda: team.ranks[0]._heard_s > before_s + 200)
    team.ranks[0].check()


def test_the_host_of_the_store_ends_when_all_know_why(watched: Callable[..., Watched]) -> None:
    team = watched(2, Patience(silent_s=60.0, beat_s=1.0))
    team.stores[1].hangs_at = {"get"}
    threading.Timer(0.3, team.stores[1].goes_on.set).start()
    team.ranks[0].fail(ValueError("a bad batch"))
    team.ranks[0].end()
    assert "a bad batch" in team.message(1) and team.ranks[1]._lost_store is None
    assert team.ranks[0]._others[1].sign.fault is not None


def test_the_host_of_the_store_waits_for_the_others_to_end(watched: Callable[..., Watched]) -> None:
    """A while: 1.5 times as long as from one sign to the next."""
    team = watched(2, Patience(silent_s=1e4, beat_s=100.0))
    end = threading.Thread(target=team.ranks[0].end)
    end.start()
    end.join(timeout=0.3)
    assert end.is_alive()
    team.ranks[1].end()
    end.join(timeout=LONG_S)
    assert not end.is_alive()


def test_who_has_ended_is_waited_for_no_more(watched: Callable[..., Watched]) -> None:
    team = watched(2)
    team.ranks[0].issue("gather", "a", lambda: True)
    team.ranks[1].issue("gather", "a", lambda: True)
    team.ranks[1].end("it has ended with KeyError: 3")
    assert soon(lambda: team.ranks[0]._others[1].sign.ended is not None)
    assert team.finds(0, 10 * QUICK.silent_s) is None
    team.ranks[0].issue("gather", "b")
    assert "rank 1 is no longer there: it has ended with KeyError: 3 (at tick 1, " in team.message(0)


def test_a_slow_rank_is_warned_of_once_and_has_a_timeout(watched: Callable[..., Watched]) -> None:
    patience = Patience(timeout_s=500.0, warn_s=50.0, silent_s=1e4, beat_s=0.02)
    team = watched(2, patience)
    team.ranks[1].issue("gather", "a")
    with pytest.warns(
        UserWarning, match=r"rank 1 has waited 60 s for a \(number 1 of lane gather\): rank 0 is at tick 0"
    ):
        assert team.finds(1, 60.0) is None
    assert team.finds(1, 60.0) is None
    late = team.finds(1, 501.0)
    assert late is not None and "rank 0 is at tick 0" in late and "larger timeout_s than 500" in late


def crossed(team: Watched) -> None:
    """Both have come to one gather; then rank 0 to another one, and rank 1 to a reduction."""
    for watchman in team.ranks:
        watchman.issue("gather", "a", lambda: True)
    team.ranks[0].issue("gather", "b")
    team.ranks[1].issue("reduce", "c")


STANDING = Patience(warn_s=1e4, timeout_s=1e4, silent_s=60.0, beat_s=0.05)


def test_ranks_that_wait_for_each_other_on_two_lanes_are_told(watched: Callable[..., Watched]) -> None:
    team = watched(2, STANDING)
    for watchman in team.ranks:
        watchman.own.standing = lambda: Standing(True, True, (), 0)
    team.ranks[0].own.calls["backward"] += 1
    crossed(team)
    for rank in range(2):
        message = team.message(rank)
        assert f"rank {rank}, at tick {rank}, waited" in message and "ranks wait for each other: " in message
        assert "rank 0 (at tick 0, " in message and "b (number 2 of lane gather)" in message
        assert "rank 1 (at tick 1, " in message and "c (number 1 of lane reduce), to which rank 0 has not" in message
        assert "backward: 1 on rank 0, 0 on rank 1" in message


@pytest.mark.parametrize(
    "works",
    [
        Standing(False, True, (), 0),  # the user's thread computes
        Standing(True, False, (), 0),  # a lane copies
        Standing(True, True, (("gather",),), 0),  # a lane between ranks is on its way to a gather
    ],
)
def test_a_rank_that_works_is_waited_for(watched: Callable[..., Watched], works: Standing) -> None:
    team = watched(2, STANDING)
    team.ranks[0].own.standing = lambda: Standing(True, True, (), 0)
    team.ranks[1].own.standing = lambda: works
    crossed(team)
    time.sleep(4 * BEATS_OF_DOUBT * STANDING.beat_s)
    for rank in range(2):
        assert team.finds(rank) is None
        team.ranks[rank].check()
    team.ranks[1].own.standing = lambda: Standing(True, True, (("reduce",),), 0)
    assert "ranks wait for each other" in team.message(0)


def test_a_rank_that_has_done_something_since_is_waited_for(watched: Callable[..., Watched]) -> None:
    team, since_s = watched(2, STANDING), time.monotonic()
    team.ranks[0].own.standing = lambda: Standing(True, True, (), 0)
    team.ranks[1].own.standing = lambda: Standing(True, True, (), int((time.monotonic() - since_s) / 0.1))
    crossed(team)
    time.sleep(4 * BEATS_OF_DOUBT * STANDING.beat_s)
    team.ranks[0].check()
    team.ranks[1].check()


def test_a_gpu_may_compute_for_longer(watched: Callable[..., Watched]) -> None:
    team = watched(2, STANDING)
    for watchman in team.ranks:
        watchman.own.standing = lambda: Standing(True, True, (), 0, on_gpu=True)
    crossed(team)
    since_s = time.monotonic()
    assert "ranks wait for each other" in team.message(0)
    assert time.monotonic() - since_s >= BEATS_OF_GPU * STANDING.beat_s


def test_a_warning_that_is_an_error_is_told_to_all(watched: Callable[..., Watched]) -> None:
    team = watched(2, Patience(warn_s=0.1, silent_s=60.0, beat_s=0.02))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        team.ranks[1].issue("gather", "a")
        for rank in range(2):
            assert "rank 1 raised UserWarning: rank 1 has waited" in team.message(rank)


def test_a_failed_collective_is_explained_by_who_is_dead(watched: Callable[..., Watched]) -> None:
    patience = Patience(silent_s=60.0, beat_s=0.1)
    team = watched(3, patience)
    issued = team.ranks[0].issue("gather", "a")
    team.stores[2].hangs_at = {"set"}
    assert "rank 2 died" in str(team.ranks[0].explain(issued, RuntimeError("connection closed by peer")))
    assert "rank 2 died" in team.message(1)


def test_a_failed_collective_of_ranks_that_live_says_what_failed(watched: Callable[..., Watched]) -> None:
    team = watched(2, Patience(silent_s=60.0, beat_s=0.1))
    issued = team.ranks[0].issue("gather", "a")
    message = str(team.ranks[0].explain(issued, RuntimeError("out of buffers")))
    assert "rank 0 could not do a (number 1 of lane gather): RuntimeError: out of buffers" in message


def test_patience_that_takes_the_living_for_dead_is_refused() -> None:
    with pytest.raises(ValueError, match="silent_s=3 must be at least 6 times beat_s=1"):
        Patience(silent_s=3.0, beat_s=1.0)
    with pytest.raises(ValueError, match="timeout_s=0"):
        Patience(timeout_s=0.0)
