"""A little executor with lanes of random speed: an independent witness for what the planner claims about any timing.

It follows the rules of the real one (see runtime/schedule/executor.py) and nothing else: it knows nothing of
Precedence."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from hightide.ir.action import TICK_OPS, Action, Op, Schedule
from hightide.ir.plan import Plan, Update
from hightide.ir.tier import ChunkKind, Lane
from hightide.planner.placement import Placement


@dataclass(frozen=True)
class Done:
    lane: Lane
    id: str
    ready: tuple[str, ...] = ()
    ready_dues: tuple[int, ...] = ()


class RandomLanes:
    def __init__(self, plan: Plan, schedule: Schedule, seed: int) -> None:
        self.plan = plan
        self.placement = Placement(plan)
        self.schedule = schedule
        self._tables = [place.chunk for place in self.placement.chunks if place.is_looked_up]
        self.leaves = {action.call for action in schedule.actions if action.op is Op.STASH}
        self.slots: dict[tuple[ChunkKind, int], int] = {}  # (param or grad slots, slot) -> chunk
        for chunk, first in schedule.standing:
            width = self.placement.chunks[chunk].num_slots
            self.slots |= {(ChunkKind.PARAM, slot): chunk for slot in range(first, first + width)}
        self.buffers: dict[tuple[str, int], str] = {}  # (ring, buffer) -> what is in it; "": it is being filled
        self.random = random.Random(seed)
        self.done: set[str] = set()
        self.issued: set[str] = set()
        self.records: list[Done] = []
        self.queues: dict[Lane, deque[Action]] = {lane: deque() for lane in Lane if lane is not Lane.COMPUTE}
        self.running: dict[Lane, tuple[Action, list[Action]]] = {}
        self.gpu_bytes = self.gpu_peak_bytes = schedule.gpu_base_bytes
        self.host_bytes = self.host_peak_bytes = schedule.host_base_bytes

    def run(self) -> RandomLanes:
        self._leave(-1)
        compute = self.schedule.lane(Lane.COMPUTE)
        for tick in self.schedule.ticks:
            for action in compute:
                early = action.runs_when_open or action.op in TICK_OPS
                if action.tick == tick.tick and not early:
                    self._inline(action)
            self._inline(tick)
            self._leave(tick.tick)
        while self._can_step():
            self._step()
        assert len(self.done) == len(self.schedule.actions), "left over at the end"
        assert not self.buffers, f"{self.buffers} are left full"
        return self

    def _leave(self, tick: int) -> None:
        for action in self.schedule.lane(Lane.COMPUTE):
            if action.runs_when_open and action.opens == tick:
                self._inline(action)
        for lane, queue in self.queues.items():
            for action in self.schedule.lane(lane):
                if action.id in self.issued:
                    continue
                if action.opens > tick:
                    break
                self.issued.add(action.id)
                queue.append(action)

    def _inline(self, action: Action) -> None:
        for _ in range(self.random.choice([0, 0, 1, 5])):
            if self._can_step():
                self._step()
        while not set(action.after) <= self.done:
            assert self._can_step(), f"{action.id} waits forever for {set(action.after) - self.done}"
            self._step()
        self._start(action)
        self._end(action)
        self.records.append(Done(Lane.COMPUTE, action.id))

    def _can_step(self) -> bool:
        return bool(self.running) or any(self._ready(lane) for lane in self.queues)

    def _ready(self, lane: Lane) -> list[Action]:
        if lane in self.running:
            return []
        queue = self.queues[lane]
        candidates = list(queue)[:1] if lane.is_in_order else list(queue)
        return [action for action in candidates if set(action.after) <= self.done]

    def _step(self) -> None:
        """Either a lane begins an action, or one that runs comes to its end."""
        moves = [lane for lane in self.queues if lane in self.running or self._ready(lane)]
        lane = self.random.choice(moves)
        if lane in self.running:
            action, ready = self.running.pop(lane)
            self._end(action)
            ids = tuple(other.id for other in ready)
            self.records.append(Done(lane, action.id, ids, tuple(other.tick for other in ready)))
            return
        ready_now = self._ready(lane)
        action = min(ready_now, key=lambda action: action.tick)
        self.queues[lane].remove(action)
        self.running[lane] = (action, ready_now)
        self._start(action)

    def _start(self, action: Action) -> None:
        self.gpu_bytes += action.gpu_takes
        self.host_bytes += action.host_takes
        self.gpu_peak_bytes = max(self.gpu_peak_bytes, self.gpu_bytes + action.gpu_transient)
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        if action.op in (Op.FETCH, Op.CLEAR):
            for place in self._window(action):
                assert place not in self.slots, f"{action.id} overwrites chunk {self.slots[place]}"
                self.slots[place] = action.chunk
        if action.block is not None and action.op in (Op.FORWARD, Op.BACKWARD):
            self._check_residents(action)
        self._check_arrived(action)
        self._pass_buffers(action, starts=True)
        self._pass_rows(action, starts=True)

    def _pass_buffers(self, action: Action, starts: bool) -> None:
        """Between disk and host: who fills a buffer finds it empty when it starts, who empties it finds in it what it
        wants, whole, and leaves it empty when it ends."""
        spec = None if action.chunk is None else self.plan.layout.chunks[action.chunk]
        if action.call is not None and action.op in (Op.STASH, Op.UNSTASH, Op.READ, Op.WRITE):
            return self._pass_inputs(action, starts)
        if action.op in (Op.READ, Op.WRITE_BACK) and action.target is not None and action.target.slot is not None:
            ring = "state" if action.kind is ChunkKind.STATE else "up" if action.op is Op.READ else "down"
            place = (ring, action.target.slot)
            if starts:
                assert place not in self.buffers, f"{action.id} overwrites {self.buffers[place]}"
                self.buffers[place] = ""
            else:
                self.buffers[place] = f"{action.kind} {action.chunk}"
        emptied: list[tuple[str, int]] = []
        if action.op in (Op.FETCH, Op.WRITE) and action.source is not None and action.source.slot is not None:
            ring = "up" if action.op is Op.FETCH else "state" if action.kind is ChunkKind.STATE else "down"
            emptied = [(ring, action.source.slot)]
        if action.op is Op.UPDATE and spec is not None:
            inside, place = {what: at for at, what in self.buffers.items()}, self.placement.chunks[spec.index]
            if self.plan.blocks[spec.block].states == "disk":
                assert inside.get(f"state {spec.index}", ("",))[0] == "state", f"{action.id}: its states are not there"
            written = {other.rpartition("@")[0] for other in self.done}
            if place.passes_ring and f"write.grad.{spec.index}" not in written:
                assert f"grad {spec.index}" in inside, f"{action.id}: its gradient is not there"
                emptied = [inside[f"grad {spec.index}"]]
        kind = ChunkKind.GRAD if action.op is Op.UPDATE else action.kind
        for place in emptied:
            assert self.buffers.get(place) == f"{kind} {action.chunk}", f"{action.id}: {place} holds something else"
            if not starts:
                del self.buffers[place]
        if starts and action.op is Op.WRITE and action.kind is ChunkKind.STATE:
            assert f"update.{action.chunk}" in self.done, f"{action.id}: before the update"

    def _pass_inputs(self, action: Action, starts: bool) -> None:
        """Likewise, of block inputs that wait on disk."""
        place = action.target if action.op in (Op.STASH, Op.READ) else action.source
        if place is None or place.slot is None:
            return
        buffer, content = ("inputs", place.slot), f"inputs {action.call}"
        if action.op in (Op.STASH, Op.READ):
            assert not starts or buffer not in self.buffers, f"{action.id} overwrites {self.buffers[buffer]}"
            assert action.op is Op.STASH or f"write.{action.call}" in self.done, f"{action.id}: they are not on disk"
            self.buffers[buffer] = "" if starts else content
        elif starts:
            assert self.buffers.get(buffer) == content, f"{action.id}: {buffer} holds something else"
        else:
            del self.buffers[buffer]

    def _pass_rows(self, action: Action, starts: bool) -> None:
        """Of tables on the host: gradients of rows are made in one buffer and arrive in another."""
        table = next((c for c in self._tables if action.block in c.users), None)
        if table is None:
            return
        made, arrived = ("made", table.index), ("arrived", table.index)
        if action.op is Op.FORWARD and starts:
            assert f"look_up.{action.call}" in self.done, f"{action.id}: its rows are not there"
        fills = {Op.BACKWARD: made, Op.WRITE_BACK: arrived}.get(action.op)
        empties = {Op.WRITE_BACK: made, Op.SUM: arrived}.get(action.op)
        if action.op is Op.BACKWARD and not table.trainable_numel:
            fills = None
        if starts and fills is not None:
            assert fills not in self.buffers, f"{action.id} overwrites gradients of rows"
            self.buffers[fills] = ""
        if starts and empties is not None:
            assert self.buffers.get(empties) == "rows", f"{action.id}: no gradients of rows are there"
        if starts and action.op is Op.UPDATE:
            assert not {made, arrived} & self.buffers.keys(), f"{action.id}: rows are not summed"
        if not starts and fills is not None:
            self.buffers[fills] = "rows"
        if not starts and empties is not None:
            del self.buffers[empties]

    def _check_arrived(self, action: Action) -> None:
        """What it reads has come home, or back from there."""
        moving = {(other.kind, other.chunk) for other, _ in self.running.values() if other.op is Op.WRITE_BACK}
        on_gpu = {chunk for (kind, _), chunk in self.slots.items() if kind is ChunkKind.GRAD}
        if action.op is Op.UPDATE or (action.op is Op.FETCH and action.kind is ChunkKind.GRAD):
            assert (ChunkKind.GRAD, action.chunk) not in moving, f"{action.id}: its gradient is on its way home"
        if action.op is Op.UPDATE:
            used_up = self.placement.chunks[action.chunk or 0].is_used_up
            assert (action.chunk in on_gpu) == used_up, f"{action.id}: its gradient is not where it looks for it"
            if action.lane is Lane.CPU and self.plan.update is Update.DEFERRED:
                assert "step" in self.done, f"{action.id}: before step()"
        if action.op is Op.UNSTASH:
            assert f"stash.{action.call}" in self.done, action.id
        if action.op is Op.BACKWARD and action.call in self.leaves:
            assert f"unstash.{action.call}" in self.done, action.id

    def _end(self, action: Action) -> None:
        self.gpu_bytes -= action.gpu_gives
        self.host_bytes -= action.host_gives
        self._pass_buffers(action, starts=False)
        self._pass_rows(action, starts=False)
        used_up = action.op is Op.UPDATE and self.placement.chunks[action.chunk or 0].is_used_up
        if action.op in (Op.EVICT, Op.WRITE_BACK) or used_up:
            kind = ChunkKind.GRAD if used_up else action.kind
            held = [place for place, chunk in self.slots.items() if place[0] is kind and chunk == action.chunk]
            place = self.placement.chunks[action.chunk or 0]
            own = action.op is Op.WRITE_BACK and (place.stays or place.is_looked_up)
            assert bool(held) != own, f"{action.id}: not there"
            for place in held:
                del self.slots[place]
        self.done.add(action.id)

    def _window(self, action: Action) -> list[tuple[ChunkKind, int]]:
        assert action.target is not None and action.chunk is not None and action.kind is not None
        if action.target.slot is None:
            return []
        layout, chunk = self.plan.layout, self.plan.layout.chunks[action.chunk]
        width = layout.num_slots(chunk) if action.kind is ChunkKind.PARAM else layout.num_grad_slots(chunk)
        return [(action.kind, action.target.slot + step) for step in range(width)]

    def _check_residents(self, tick: Action) -> None:
        """Reads are whole: the chunk stands in a slot and nothing is still on its way into it."""
        arriving = {(action.kind, action.chunk) for action, _ in self.running.values() if action.op is Op.FETCH}
        for chunk in self.plan.layout.chunks:
            if tick.block not in chunk.users or chunk in self._tables:
                continue
            owner = self.plan.blocks[chunk.block]
            stays = owner.params == "gpu" or (owner.states == "gpu" and chunk.trainable_numel)
            if not stays:
                assert chunk.index in [c for (kind, _), c in self.slots.items() if kind is ChunkKind.PARAM], tick.id
            in_slot = self.placement.chunks[chunk.index].in_grad_slot
            if owner.states != "gpu" and tick.op is Op.BACKWARD and chunk.trainable_numel and in_slot:
                assert chunk.index in [c for (kind, _), c in self.slots.items() if kind is ChunkKind.GRAD], tick.id
                assert (ChunkKind.GRAD, chunk.index) not in arriving
            assert (ChunkKind.PARAM, chunk.index) not in arriving
