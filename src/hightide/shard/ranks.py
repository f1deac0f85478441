"""Who we are among the ranks that train one model: which nodes they are on, and over what they talk.

[Note: groups with a copy each] A plan may divide the ranks into groups, each of which has a copy of everything in
shards: mostly the ranks of one node. Then `gather` and `reduce` are of one group, and `across` is of those ranks of all
groups that have the same shard: a mean is summed inside a group first, then across. Each rank still issues the same
collectives in the same order as all others, so logs of different groups can be compared.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from hightide.shard.communicators import ACROSS, ALONE, GATHER, NCCL, REDUCE, make_group
from hightide.shard.watchman import Watchman


class Circle(NamedTuple):
    """Who takes part in the collectives of a lane."""

    members: tuple[int, ...]  # ranks, in the order of their parts
    group: dist.ProcessGroup


class Ranks:
    """The ranks of one model. `alone` needs no torch.distributed."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: torch.device,
        backend: str,
        nodes: Sequence[int],
        watchman: Watchman | None,
        groups: dict[str, dist.ProcessGroup],
        close: Callable[[], object],
        members: Sequence[int] = (0,),
        portion_of_cores: float = 1.0,
    ) -> None:
        """`portion_of_cores`: of those that this process may use, where others of its node may use them too."""
        self.rank, self.world, self.device, self.backend = rank, world, device, backend
        self.nodes = tuple(nodes)  # that each rank is on, numbered from 0
        self.watchman = watchman
        self._groups = groups
        self._members = tuple(members)  # what torch.distributed calls them
        self._circles: dict[str, Circle] = {}  # of a division into groups
        self._num_divisions = 0
        self._portion_of_cores = portion_of_cores
        self._ends_first: list[Callable[[], object]] = []
        self._end = weakref.finalize(self, _end, self._ends_first, close)
        if watchman is not None:
            at_exit = partial(_at_exit, self._end, watchman, backend)
            atexit.register(at_exit)
            self._ends_first.append(partial(atexit.unregister, at_exit))

    # ---- who

    @property
    def is_alone(self) -> bool:
        """Nothing is exchanged."""
        return self.backend == ALONE

    @property
    def node(self) -> int:
        return self.nodes[self.rank]

    @property
    def num_nodes(self) -> int:
        return max(self.nodes) + 1

    @property
    def ranks_of_node(self) -> tuple[int, ...]:
        """Those that share this one's memory, disk and cores; itself too."""
        return tuple(rank for rank, node in enumerate(self.nodes) if node == self.node)

    @property
    def local_rank(self) -> int:
        """Among them."""
        return self.ranks_of_node.index(self.rank)

    def circle(self, lane: str) -> Circle:
        return self._circles.get(lane) or Circle(tuple(range(self.world)), self._groups[lane])

    def divided(self, replicas: int) -> list[tuple[int, ...]]:
        """Into so many groups of equal size, by rank in each: of one node, where that is possible."""
        if replicas < 1 or self.world % replicas:
            raise ValueError(
                f"{self.world} ranks cannot be divided into {replicas} equal groups; make a plan for as many groups as "
                "there are nodes with equally many ranks each, or for one"
            )
        by_node, size = sorted(range(self.world), key=lambda rank: (self.nodes[rank], rank)), self.world // replicas
        return [tuple(sorted(by_node[start : start + size])) for start in range(0, self.world, size)]

    def divide(self, replicas: int) -> None:
        """See [Note: groups with a copy each]. All ranks call it, while no collective is under way."""
        self._circles.clear()
        if self.watchman is not None:
            self.watchman.own.circles = {}
        if replicas == 1 or self.is_alone:
            return
        assert self.watchman is not None
        groups = self.divided(replicas)
        holders = [tuple(sorted(ranks)) for ranks in zip(*groups, strict=True)]  # of the same shard
        self._num_divisions += 1
        for lane, circles in ((GATHER, groups), (REDUCE, groups), (ACROSS, holders)):
            name = f"{lane} of division {self._num_divisions}"
            for circle in circles:  # all ranks take part in the making of each
                members = [self._members[rank] for rank in circle]
                made = make_group(members, self.backend, name, self.watchman.patience, len(self._members))
                if made is not None:
                    self._groups[name], self._circles[lane] = made, Circle(circle, made)
                    self.watchman.own.circles[lane] = circle

    def share_of_cores(self, cores: int) -> int:
        """Of so many that this process may use. Some launchers give each rank cores of its own, others all the same."""
        return max(1, int(cores * self._portion_of_cores))

    def ends_first(self, end: Callable[[], object]) -> None:
        """It is called before the others are told that this rank has ended, and communicators are given up."""
        self._ends_first.append(end)

    def close(self) -> None:
        """The others are told; nothing that was made here stays."""
        self._end()

    # ---- how one comes to be

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Ranks:
        return cls(0, 1, torch.device(device), ALONE, (0,), None, {}, lambda: None)


def _end(first: Sequence[Callable[[], object]], close: Callable[[], object]) -> None:
    for end in first:
        end()
    close()


def _at_exit(end: weakref.finalize, watchman: Watchman, backend: str) -> None:
    """Lanes issue what other ranks wait for while there are communicators, and the watchman is still there. After an
    exception the others are told at once; and what they have not come to would be waited for by NCCL, for ever."""
    if getattr(sys, "last_value", None) is not None:
        watchman.end_of_program()
        if backend == NCCL:
            watchman.break_off()
    end()
