"""Ranks that meet in a store in which there is something of before."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from hightide.shard.attempt import fresh


def meet(store: dist.Store, world: int, late: int | None = None) -> list[dist.Store]:
    found: dict[int, dist.Store] = {}

    def come(rank: int) -> None:
        found[rank] = fresh(store, rank, world, 20.0)

    threads = [threading.Timer(0.3 if rank == late else 0.0, come, [rank]) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world)]


@pytest.mark.parametrize("late", [None, 0, 2])
def test_what_was_put_there_before_is_not_seen(late: int | None) -> None:
    store = dist.HashStore()
    for attempt in range(3):
        ranks = meet(store, 3, late if attempt else None)
        assert not any(one.check(["key"]) for one in ranks)
        ranks[attempt].set("key", str(attempt))
        assert [one.get("key") for one in ranks] == [str(attempt).encode()] * 3


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(ValueError, match=r"rank 1 has waited 0.1 s for rank 0"):
        fresh(dist.HashStore(), 1, 2, 0.1)
