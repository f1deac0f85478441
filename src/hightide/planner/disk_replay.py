"""The replay of what passes through the disk and its buffers, as replay.py does it for the GPU: each order must be
enforced by a dependency, a lane or a tick. See [Note: rings of buffers] in lower/disk.py."""

from __future__ import annotations

from hightide.ir.action import Action, Mode, Op, Place, Schedule
from hightide.ir.tier import ChunkKind, Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.placement import ChunkPlace, Placement
from hightide.planner.precedence import Precedence


class _Ring:
    """Who stands in each buffer, and who came first and left last."""

    def __init__(self, num_buffers: int) -> None:
        self.entries: list[Action | None] = [None] * num_buffers
        self.exits: list[Action | None] = [None] * num_buffers
        self.firsts: list[Action | None] = [None] * num_buffers


class DiskReplay:
    def __init__(self, placement: Placement, schedule: Schedule, precedence: Precedence) -> None:
        self._placement, self._schedule, self._precedence = placement, schedule, precedence
        self._up, self._down, self._state = (_Ring(placement.plan.num_disk_buffers) for _ in range(3))
        self._written: dict[int, list[Action]] = {}  # chunk -> WRITEs of its gradient
        self._continued: dict[int, Action] = {}  # chunk -> the READ of its gradient from the pass before
        self._reads: dict[int, Action] = {}  # chunk -> the READ of its states
        self._updates: dict[int, Action] = {}
        self._stored: dict[int, Action] = {}  # chunk -> the WRITE of its states

    def run(self) -> None:
        verbs = {
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.FETCH: self._fetch,
            Op.WRITE_BACK: self._write_back,
            Op.UPDATE: self._update,
        }
        for action in self._schedule.actions:
            if action.op in verbs:
                verbs[action.op](action)
        self._check_end()

    def _read(self, action: Action) -> None:
        index = _index(action)
        if not self._lives_on_disk(action):
            self._fail(action, f"reads chunk {index}, whose {action.kind} does not live on disk")
        if action.kind is not ChunkKind.STATE:
            self._enter(self._up, action, action.target)
            self._check_content(action)
            return
        if index in self._reads:
            self._fail(action, f"reads the states of chunk {index} again")
        self._enter(self._state, action, action.target)
        self._follows(action, f"write.state.{index}", "reads states that may not be written yet")
        for write in self._written.get(index, []):
            self._after(action, write, "reads a gradient before it is on disk")
        self._reads[index] = action

    def _check_content(self, action: Action) -> None:
        index = _index(action)
        if action.kind is ChunkKind.PARAM:
            if self._place(action).chunk.optimised_numel:
                self._follows(action, f"write.state.{index}", "reads parameters that may not be written yet")
            return
        for write in self._written.get(index, []):
            self._after(action, write, "reads a gradient before it is on disk")
        if index not in self._written:
            if self._schedule.mode is not Mode.ACCUMULATE:
                self._fail(action, f"reads a gradient of chunk {index} that no earlier action has made")
            self._continued.setdefault(index, action)

    def _fetch(self, action: Action) -> None:
        if not self._lives_on_disk(action):
            self._has_no_buffer(action, action.source)
            return
        entry = self._leave(self._up, action, action.source, action.kind)
        self._after(action, entry, "fetches what is not read yet")

    def _write_back(self, action: Action) -> None:
        if self._place(action).states is not Tier.DISK:
            self._has_no_buffer(action, action.target)
            return
        if _index(action) in self._reads and self._lives_on_disk(action):
            self._fail(action, "brings home a gradient that its update has read already")
        self._enter(self._down, action, action.target)

    def _write(self, action: Action) -> None:
        index = _index(action)
        if not self._lives_on_disk(action):
            self._fail(action, f"writes chunk {index}, whose {action.kind} does not live on disk")
        if action.kind is ChunkKind.GRAD:
            entry = self._leave(self._down, action, action.source, ChunkKind.GRAD)
            self._after(action, entry, "writes a gradient that is not at home yet")
            self._written.setdefault(index, []).append(action)
            return
        self._leave(self._state, action, action.source, ChunkKind.STATE)
        self._after(action, self._updates.get(index), f"writes the states of chunk {index} before their update")
        self._stored[index] = action

    def _update(self, action: Action) -> None:
        index, place = _index(action), self._place(action)
        if place.states is not Tier.DISK:
            return
        self._after(action, self._reads.get(index), f"updates chunk {index} before its states are read")
        self._updates[index] = action
        if place.grad is None:
            buffer = self._buffer_of(self._down, index, ChunkKind.GRAD)
            self._leave(self._down, action, buffer, ChunkKind.GRAD)

    def _lives_on_disk(self, action: Action) -> bool:
        assert action.kind is not None
        return self._place(action).tier_of(action.kind) is Tier.DISK

    def _place(self, action: Action) -> ChunkPlace:
        return self._placement.chunks[_index(action)]

    def _enter(self, ring: _Ring, action: Action, place: Place | None) -> None:
        buffer = self._number(ring, action, place)
        entry, last_exit = ring.entries[buffer], ring.exits[buffer]
        if entry is not None:
            self._fail(action, f"goes to {place}, which chunk {entry.chunk} occupies")
        if last_exit is not None:
            self._after(action, last_exit, f"goes to {place} before chunk {last_exit.chunk} has left it")
        ring.entries[buffer] = action
        ring.firsts[buffer] = ring.firsts[buffer] or action

    def _leave(self, ring: _Ring, action: Action, place: Place | None, kind: ChunkKind | None) -> Action:
        buffer = self._number(ring, action, place)
        entry = ring.entries[buffer]
        if entry is None or (entry.chunk, entry.kind) != (action.chunk, kind):
            self._fail(action, f"leaves {place}, where the {kind} of chunk {action.chunk} is not")
        assert entry is not None
        ring.entries[buffer], ring.exits[buffer] = None, action
        return entry

    def _number(self, ring: _Ring, action: Action, place: Place | None) -> int:
        if place is None or place.tier is not Tier.HOST or not 0 <= _slot(place) < len(ring.entries):
            self._fail(action, f"passes through {place}; there are {len(ring.entries)} buffers on the host")
        assert place is not None
        return _slot(place)

    def _has_no_buffer(self, action: Action, place: Place | None) -> None:
        if place is not None and place.slot is not None:
            self._fail(action, f"passes through {place}, but what it moves does not live on disk")

    def _buffer_of(self, ring: _Ring, chunk: int, kind: ChunkKind) -> Place | None:
        entries = enumerate(ring.entries)
        return next((Place(Tier.HOST, b) for b, e in entries if e and (e.chunk, e.kind) == (chunk, kind)), None)

    def _after(self, action: Action, earlier: Action | None, message: str) -> None:
        if earlier is None or not self._precedence.before(earlier.id, action.id):
            self._fail(action, message)

    def _follows(self, action: Action, name: str, message: str) -> None:
        if name not in action.after_prev:
            self._fail(action, f"{message} (it does not wait for the previous {name})")

    def _fail(self, action: Action, message: str) -> None:
        raise InfeasiblePlan(f"the schedule is wrong: {action.id} {message}", action.id)

    def _check_end(self) -> None:
        for ring in (self._up, self._down, self._state):
            left = [entry.id for entry in ring.entries if entry is not None]
            if left:
                raise InfeasiblePlan(f"the schedule is wrong: {', '.join(left)} leave a buffer on the host full")
            for first, last_exit in zip(ring.firsts, ring.exits, strict=True):
                if first is not None and last_exit is not None:
                    self._follows(first, last_exit.id, "goes to a buffer that may not be free yet")
        for index, read in self._continued.items():
            self._follows(read, self._written[index][-1].id, "reads a gradient before it is on disk")
        lost = sorted(self._updates.keys() - self._stored.keys())
        if lost:
            raise InfeasiblePlan(f"the states of chunks {lost} are updated and never written to disk")


def _index(action: Action) -> int:
    assert action.chunk is not None
    return action.chunk


def _slot(place: Place) -> int:
    return -1 if place.slot is None else place.slot
