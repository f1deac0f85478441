"""Several ranks that follow one schedule, each on lanes of its own random speed: an independent witness that they never
wait for each other forever, and that nobody uses a part of a chunk, or a gradient of one rank, for the whole.

A collective ends when all ranks have begun it; which one it is, is known by its turn on its lane alone, as NCCL knows
it. It knows nothing of Precedence."""

from __future__ import annotations

import random
from collections import deque

from hightide.ir.action import TICK_OPS, Action, Op, Schedule
from hightide.ir.plan import Plan
from hightide.ir.tier import COLLECTIVES, Lane, Tier
from hightide.planner.placement import Placement


class RandomRanks:
    def __init__(self, plan: Plan, schedules: list[Schedule], seed: int) -> None:
        """One schedule for each rank: the same, unless a test is to fail."""
        self.random = random.Random(seed)
        self.ranks = [_Rank(Placement(plan), schedule) for schedule in schedules]

    def run(self) -> list[tuple[str, ...]]:
        """The ids of collectives, as they ended."""
        ended = []
        while any(rank.is_busy for rank in self.ranks):
            moves = [(rank, lane) for rank in self.ranks for lane in rank.ready()]
            moves += [(None, lane) for lane in COLLECTIVES if all(rank.began(lane) for rank in self.ranks)]
            assert moves, f"all wait: {[rank.heads() for rank in self.ranks]}"
            rank, lane = self.random.choice(moves)
            if rank is not None:
                rank.move(lane)
                continue
            ended.append(tuple(rank.end(lane) for rank in self.ranks))
            assert len(set(ended[-1])) == 1, f"different ones meet: {ended[-1]}"
        return ended


class _Rank:
    def __init__(self, placement: Placement, schedule: Schedule) -> None:
        self.placement = placement
        self.queues: dict[Lane, deque[Action]] = {lane: deque(schedule.lane(lane)) for lane in Lane}
        self.running: dict[Lane, Action] = {}
        self.done: set[str] = set()
        self.left = -1
        self.whole = {chunk for chunk, _ in schedule.standing}  # chunks that compute may use
        stay = [place for place in placement.chunks if not place.is_streamed]
        fetched = set() if schedule.mode.continues_step else {one.chunk.index for one in stay if one.is_refreshed}
        self.whole |= {place.chunk.index for place in stay} - fetched
        self.own: set[int] = set()  # chunks whose gradient is this rank's own
        self.means: set[int] = set()

    @property
    def is_busy(self) -> bool:
        return bool(self.running) or any(self.queues.values())

    def heads(self) -> list[str]:
        return [queue[0].id for queue in self.queues.values() if queue]

    def ready(self) -> list[Lane]:
        """Lanes on which something can begin, or come to its end."""
        return [lane for lane in Lane if (lane in self.running and lane not in COLLECTIVES) or self._next(lane)]

    def began(self, lane: Lane) -> bool:
        return lane in self.running

    def _next(self, lane: Lane) -> Action | None:
        if lane in self.running:
            return None
        queue = self.queues[lane]
        for action in list(queue)[:1] if lane.is_in_order else list(queue):
            if self._may_begin(action):
                return action
        return None

    def _may_begin(self, action: Action) -> bool:
        return (action.op in TICK_OPS or action.opens <= self.left) and set(action.after) <= self.done

    def move(self, lane: Lane) -> None:
        if lane in self.running:
            self.end(lane)
            return
        action = self._next(lane)
        assert action is not None
        self.queues[lane].remove(action)
        self.running[lane] = action
        self._begin(action)

    def _begin(self, action: Action) -> None:
        place = None if action.chunk is None else self.placement.chunks[action.chunk]
        if action.op in (Op.FORWARD, Op.BACKWARD):
            assert action.block is not None
            for used in self.placement.by_block[action.block]:
                index = used.chunk.index
                assert index in self.whole, f"{action.id} uses chunk {index}, which is not whole"
                if action.op is Op.BACKWARD and used.chunk.trainable_numel:
                    assert index not in self.means or not used.in_grad_slot, f"{action.id} adds to a mean"
                    self.own.add(index)
        if place is None:
            return
        index = place.chunk.index
        if action.op is Op.EVICT:
            self.whole.remove(index)
        if action.op is Op.REDUCE:
            assert index in self.own or place.chunk.num_backwards == 0, f"{action.id}: nothing of this rank is there"
        if action.op in (Op.WRITE_BACK, Op.UPDATE):
            assert index not in self.own, f"{action.id} takes the gradient of one rank for that of all"
        if action.op is Op.GATHER and action.id.at is None:
            assert f"update.{index}" in self.done, f"{action.id}: before the update"

    def end(self, lane: Lane) -> str:
        action = self.running.pop(lane)
        self.done.add(action.id)
        if action.op in TICK_OPS:
            self.left = action.tick
        place = None if action.chunk is None else self.placement.chunks[action.chunk]
        if place is not None:
            index = place.chunk.index
            if action.op is Op.FETCH and action.kind == "param" and not place.is_gathered:
                self.whole.add(index)
            if action.op is Op.GATHER:
                fetched = action.id.replace("gather.", "fetch.param.")
                assert place.home is Tier.GPU or fetched in self.done, f"{action.id}: its shard is not there"
                self.whole.add(index)
            if action.op is Op.REDUCE:
                self.own.discard(index)
                self.means.add(index)
            if action.op in (Op.WRITE_BACK, Op.UPDATE, Op.CLEAR):
                self.means.discard(index)
        return action.id
