"""The replay of parameters: each is where a tick uses it, as a whole and with the values of its last update."""

from __future__ import annotations

from collections.abc import Mapping

from hightide.ir.action import Action, ActionKey, Op, Place, Schedule
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.placement import Placement
from hightide.planner.verify.ordered_replay import OrderedPlaces, OrderedReplay
from hightide.planner.verify.precedence import Precedence


class ParamReplay(OrderedReplay):
    def __init__(
        self, placement: Placement, schedule: Schedule, precedence: Precedence, updates: Mapping[int, Action]
    ) -> None:
        """`updates`: of this pass so far, by chunk; somebody else adds them."""
        super().__init__(placement, schedule, precedence)
        self._updates = updates
        self._slots = OrderedPlaces("slot", placement.plan.num_slots)
        self._refreshed: dict[int, Action] = {}  # persistent chunk -> the fetch of its new values
        self._looked_up: dict[int | None, Action] = {}  # rows of tables on the host, by call
        self._whole: dict[int, Action] = {}  # chunk -> who made it whole, where the tick finds it
        self.gathers: dict[int, list[Action]] = {}  # of its shards, in slots or after a fetch
        self._used: set[int] = set()
        self._regathered: set[int] = set()  # chunks that were gathered after their update
        self._standing: set[str] = set()  # ids of who let in what is in slots from the pass before
        for chunk, slot in schedule.standing:
            self._let_stand(chunk, slot)

    def _let_stand(self, chunk: int, slot: int) -> None:
        """In a slot from the pass before, which nothing has made stale."""
        key = ActionKey(Op.FETCH, chunk, ChunkKind.PARAM)
        entry = Action(key, Op.FETCH, Lane.H2D, tick=0, chunk=chunk, kind=ChunkKind.PARAM)
        width = self.placement.chunks[chunk].num_slots if 0 <= chunk < len(self.placement.chunks) else 0
        window = self._slots.entries[slot : slot + width]
        if not self.schedule.mode.continues_step or not width or len(window) < width or any(window):
            self.fail(entry, f"cannot stand in slot {slot} when the pass begins")
        self._slots.entries[slot : slot + width] = [entry] * width
        self._whole[chunk] = entry
        self._standing.add(key)

    def after(self, action: Action, earlier: Action | None, message: str) -> None:
        if earlier is None or earlier.id not in self._standing:
            super().after(action, earlier, message)

    @property
    def standing(self) -> tuple[tuple[int, int], ...]:
        """What is in slots at the end."""
        found: dict[int, int] = {}
        for slot, entry in enumerate(self._slots.entries):
            if entry is not None and entry.chunk is not None:
                found.setdefault(entry.chunk, slot)
        return tuple(found.items())

    def use(self, tick: Action) -> None:
        """By the block that runs."""
        assert tick.block is not None
        for place in self.placement.by_block[tick.block]:
            index = place.chunk.index
            if place.is_looked_up:
                if tick.op is Op.FORWARD:
                    rows = self._looked_up.get(tick.call)
                    self.after(tick, rows, f"uses rows of chunk {index} that are not on the GPU then")
            elif place.is_streamed:
                entry = self._slots.entry(index, ChunkKind.PARAM)
                self.after(tick, entry, f"uses chunk {index}, which is not in a slot then")
            elif place.is_refreshed and not self.schedule.mode.continues_step:
                self.after(tick, self._refreshed.get(index), f"uses chunk {index} before its new values are fetched")
            self._is_whole(tick, place)
            self._used.add(index)

    def _is_whole(self, tick: Action, place: ChunkPlace) -> None:
        """All shards of what it uses are there."""
        index = place.chunk.index
        if place.is_gathered_after_update:
            if index not in self._used:
                self.follows(tick, ActionKey(Op.GATHER, index), f"uses chunk {index} before it is gathered")
        elif place.is_gathered and (place.is_streamed or not self.schedule.mode.continues_step):
            self.after(tick, self._whole.get(index), f"uses chunk {index} before it is gathered")

    def fetch(self, action: Action) -> None:
        place = self.place(action)
        chunk = place.chunk
        if chunk.index in self._updates:
            self.fail(action, f"fetches chunk {chunk.index} in the pass that has updated it")
        if chunk.optimised_numel:
            self.follows(action, ActionKey(Op.UPDATE, chunk.index), f"fetches chunk {chunk.index} before it is updated")
        if not place.is_streamed:
            if chunk.index in self._refreshed:
                self.fail(action, f"fetches the new values of chunk {chunk.index} again")
            self._refreshed[chunk.index] = action
        else:
            self.enter_window(self._slots, action, place.num_slots)

    def evict(self, action: Action) -> None:
        chunk = self.place(action).chunk
        self.after(
            action,
            self._slots.entry(chunk.index, ChunkKind.PARAM),
            f"drops chunk {chunk.index}, which is not in a slot then",
        )
        if self.place(action).is_gathered:
            self.after(action, self._whole.pop(chunk.index, None), f"drops chunk {chunk.index} while it is gathered")
        self.leave_window(self._slots, action)

    def gather(self, action: Action) -> None:
        place = self.place(action)
        chunk = place.chunk
        if not place.is_gathered:
            self.fail(action, f"gathers chunk {chunk.index}, of which each rank has all that it needs")
        if place.is_gathered_after_update:
            self.after(action, self._updates.get(chunk.index), f"gathers chunk {chunk.index} before its update")
            if chunk.index in self._regathered or action.target != Place(Tier.GPU):
                self.fail(action, f"gathers chunk {chunk.index} again, or elsewhere than where it stays")
            self._regathered.add(chunk.index)
            return
        if chunk.index in self._updates:
            self.fail(action, f"gathers chunk {chunk.index} in the pass that has updated it")
        if place.home is Tier.GPU:
            if chunk.optimised_numel:
                key = ActionKey(Op.UPDATE, chunk.index)
                self.follows(action, key, f"gathers chunk {chunk.index} before it is updated")
            self.enter_window(self._slots, action, place.num_slots)
        else:
            entry = self._slots.entry(chunk.index, ChunkKind.PARAM)
            shard = entry if place.is_streamed else self._refreshed.get(chunk.index)
            self.after(action, shard, f"gathers chunk {chunk.index} before its shard is there")
            if chunk.index in self._whole or shard is None or action.target != shard.target:
                self.fail(action, f"gathers chunk {chunk.index} again, or elsewhere than where its shard is")
        if action.source != (Place(Tier.GPU) if place.home is Tier.GPU else action.target):
            self.fail(action, f"gathers chunk {chunk.index} from {action.source}, where its shard is not")
        self._whole[chunk.index] = action
        self.gathers.setdefault(chunk.index, []).append(action)

    def look_up(self, action: Action) -> None:
        chunk = self.place(action).chunk
        if chunk.optimised_numel:
            self.follows(action, ActionKey(Op.UPDATE, chunk.index), f"reads chunk {chunk.index} before it is updated")
        if action.call in self._looked_up or chunk.index in self._updates:
            self.fail(action, f"looks up rows of call {action.call} again, or after the update")
        self._looked_up[action.call] = action

    def check_gathered(self) -> None:
        """At the end of a step: what was updated in shards is whole again."""
        chunks = self.placement.chunks
        scattered = {index for index in self._updates if chunks[index].is_gathered_after_update} - self._regathered
        if scattered:
            raise InfeasiblePlan(f"the chunks {sorted(scattered)} are updated and never gathered")
