"""The replay of what passes through the disk and the host's buffers, as replay.py does it for the GPU: each order must
be enforced by a dependency, a lane or a tick. See [Note: rings of buffers] and [Note: parked gradients] in
lower/pass_through_disk.py."""

from __future__ import annotations

from collections.abc import Sequence

from hightide.ir.action import Action, ActionKey, Op, Place, Schedule
from hightide.ir.chunk import region_bytes
from hightide.ir.tier import ChunkKind, Tier
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.placement import Placement
from hightide.planner.verify.action_form import is_of_inputs
from hightide.planner.verify.ordered_replay import OrderedPlaces, OrderedReplay
from hightide.planner.verify.precedence import Precedence


class DiskReplay(OrderedReplay):
    def __init__(self, placement: Placement, schedule: Schedule, precedence: Precedence) -> None:
        super().__init__(placement, schedule, precedence)
        self._up, self._down, self._state = (OrderedPlaces("buffer", count) for count in placement.num_buffers.values())
        self._inputs = OrderedPlaces("buffer", placement.plan.num_input_buffers)
        self._input_writes: dict[int | None, Action] = {}  # by call
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
            Op.STASH: self._inputs_enter,
            Op.UNSTASH: self._inputs_leave,
        }
        of_inputs = {Op.READ: self._inputs_enter, Op.WRITE: self._inputs_leave}
        for action in self.schedule.actions:
            if action.op in verbs:
                (of_inputs if is_of_inputs(action) else verbs)[action.op](action)
        self._check_end()

    def _inputs_enter(self, action: Action) -> None:
        """A buffer, from the GPU or from the disk."""
        if not self._wait_on_disk(action):
            return self._has_no_buffer(action, action.target)
        self.enter(self._inputs, action, [self._buffer(self._inputs, action, action.target)])
        if action.op is Op.READ:
            self.after(action, self._input_writes.get(action.call), "reads inputs before they are on disk")

    def _inputs_leave(self, action: Action) -> None:
        if not self._wait_on_disk(action):
            return self._has_no_buffer(action, action.source)
        buffer = self._buffer(self._inputs, action, action.source)
        entry = self._inputs.entries[buffer]
        if entry is None or entry.call != action.call:
            self.fail(action, f"leaves {action.source}, where the inputs of call {action.call} are not")
        self.after(action, entry, "takes inputs out of a buffer before they are in it")
        self._inputs.leave(action, [buffer])
        if action.op is Op.WRITE:
            self._input_writes[action.call] = action

    def _wait_on_disk(self, action: Action) -> bool:
        """Only such inputs are read and written."""
        assert action.block is not None
        on_disk = self.plan.blocks[action.block].inputs is Tier.DISK
        if not on_disk and is_of_inputs(action):
            self.fail(action, f"moves inputs of call {action.call}, which do not wait on disk")
        return on_disk

    def _read(self, action: Action) -> None:
        index = self.place(action).chunk.index
        if not self._lives_on_disk(action):
            self.fail(action, f"reads chunk {index}, whose {action.kind} does not live on disk")
        if action.kind is not ChunkKind.STATE:
            self.enter(self._up, action, [self._buffer(self._up, action, action.target)])
            self._check_content(action)
            return
        if index in self._reads:
            self.fail(action, f"reads the states of chunk {index} again")
        self.enter(self._state, action, [self._buffer(self._state, action, action.target)])
        self.follows(action, ActionKey(Op.WRITE, index, ChunkKind.STATE), "reads states that may not be written yet")
        for write in self._written.get(index, []):
            self.after(action, write, "reads a gradient before it is on disk")
        self._reads[index] = action

    def _check_content(self, action: Action) -> None:
        index = self.place(action).chunk.index
        if action.kind is ChunkKind.PARAM:
            if self.place(action).chunk.optimised_numel:
                self.follows(
                    action, ActionKey(Op.WRITE, index, ChunkKind.STATE), "reads parameters that may not be written yet"
                )
            return
        for write in self._written.get(index, []):
            self.after(action, write, "reads a gradient before it is on disk")
        if index not in self._written:
            if self.schedule.mode.starts_sums:
                self.fail(action, f"reads a gradient of chunk {index} that no earlier action has made")
            self._continued.setdefault(index, action)

    def _fetch(self, action: Action) -> None:
        if not self._lives_on_disk(action):
            self._has_no_buffer(action, action.source)
            return
        entry = self._leave(self._up, action, action.source, action.kind)
        self.after(action, entry, "fetches what is not read yet")

    def _write_back(self, action: Action) -> None:
        if not self.place(action).passes_ring:
            self._has_no_buffer(action, action.target)
            self._check_parking(action, action.host_takes)
            return
        if self.place(action).chunk.index in self._reads and self._lives_on_disk(action):
            self.fail(action, "brings home a gradient that its update has read already")
        self.enter(self._down, action, [self._buffer(self._down, action, action.target)])

    def _write(self, action: Action) -> None:
        index = self.place(action).chunk.index
        if not self._lives_on_disk(action):
            self.fail(action, f"writes chunk {index}, whose {action.kind} does not live on disk")
        if action.kind is ChunkKind.GRAD:
            entry = self._leave(self._down, action, action.source, ChunkKind.GRAD)
            self.after(action, entry, "writes a gradient that is not at home yet")
            self._written.setdefault(index, []).append(action)
            return
        self._leave(self._state, action, action.source, ChunkKind.STATE)
        self.after(action, self._updates.get(index), f"writes the states of chunk {index} before their update")
        self._stored[index] = action

    def _update(self, action: Action) -> None:
        place = self.place(action)
        index = place.chunk.index
        self._check_parking(action, action.host_gives)
        if place.states is Tier.DISK:
            self.after(action, self._reads.get(index), f"updates chunk {index} before its states are read")
            self._updates[index] = action
        if place.passes_ring and place.grad is None:
            buffers = self._down.holding(index, ChunkKind.GRAD)
            self._leave(self._down, action, Place(Tier.HOST, buffers[0]) if buffers else None, ChunkKind.GRAD)

    def _check_parking(self, action: Action, num_bytes: int) -> None:
        """What comes and goes on the host is counted by these two."""
        place = self.place(action)
        right = region_bytes(place.grad_bytes) if place.parks else 0
        if num_bytes != right:
            self.fail(action, f"takes or gives {num_bytes} bytes of the host; its gradient parks in {right}")

    def _lives_on_disk(self, action: Action) -> bool:
        assert action.kind is not None
        return self.place(action).tier_of(action.kind) is Tier.DISK

    def _leave(self, ring: OrderedPlaces, action: Action, place: Place | None, kind: ChunkKind | None) -> Action:
        buffer = self._buffer(ring, action, place)
        entry = ring.entries[buffer]
        if entry is None or (entry.chunk, entry.kind) != (action.chunk, kind):
            self.fail(action, f"leaves {place}, where the {kind} of chunk {action.chunk} is not")
        ring.leave(action, [buffer])
        return entry

    def _buffer(self, ring: OrderedPlaces, action: Action, place: Place | None) -> int:
        if place is None or place.tier is not Tier.HOST or place.slot not in range(len(ring.entries)):
            self.fail(action, f"passes through {place}; there are {len(ring.entries)} buffers on the host")
        assert place.slot is not None
        return place.slot

    def _has_no_buffer(self, action: Action, place: Place | None) -> None:
        if place is not None and place.slot is not None:
            self.fail(action, f"passes through {place}, but what it moves goes through no buffer")

    def check_followed(self, earlier: Sequence[DiskReplay]) -> None:
        """That no buffer is filled before it was emptied. `earlier`: passes that come before it, the latest first."""
        for number, ring in enumerate(self._rings):
            self.check_next_pass(ring, [one._rings[number] for one in earlier])

    @property
    def _rings(self) -> tuple[OrderedPlaces, ...]:
        return self._up, self._down, self._state, self._inputs

    def _check_end(self) -> None:
        for ring in self._rings:
            left = [entry.id for entry in ring.entries if entry is not None]
            if left:
                raise InfeasiblePlan(f"the schedule is wrong: {', '.join(left)} leave a buffer on the host full")
        if self.schedule.mode.is_alone:
            self.check_followed([])
        for index, read in self._continued.items():
            self.follows(read, self._written[index][-1].id, "reads a gradient before it is on disk")
        lost = sorted(self._updates.keys() - self._stored.keys())
        if lost:
            raise InfeasiblePlan(f"the states of chunks {lost} are updated and never written to disk")
