"""The replay of a schedule, action by action, which objects to the first that would be wrong.

That one action is listed after another proves nothing when lanes overlap, so each rule is checked against `Precedence`:
the order must be enforced by a dependency, a lane or a tick. The memory that actions give and take is checked for
balance; how much a block needs inside is a fact of the profile, which only measuring can check. Here are ticks,
gradients and updates; parameters are in param_replay.py, what passes through the disk in disk_replay.py."""

from __future__ import annotations

from collections.abc import Callable

from hightide.ir.action import TICK_OPS, Action, ActionKey, Op, Place, Schedule
from hightide.ir.block import ModelProfile
from hightide.ir.plan import Update
from hightide.ir.tier import ChunkKind, Lane, Tier
from hightide.planner.chunk_place import ChunkPlace
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.placement import Placement
from hightide.planner.verify.action_form import objection
from hightide.planner.verify.ordered_replay import OrderedPlaces, OrderedReplay
from hightide.planner.verify.param_replay import ParamReplay
from hightide.planner.verify.precedence import Precedence
from hightide.planner.waiting import away


class Replay(OrderedReplay):
    def __init__(self, profile: ModelProfile, placement: Placement, schedule: Schedule, precedence: Precedence) -> None:
        super().__init__(placement, schedule, precedence)
        self.profile = profile
        self.updates: dict[int, Action] = {}  # by chunk
        self.settled: set[int] = set()  # chunks whose states were written after their parameters
        self.params = ParamReplay(placement, schedule, precedence, self.updates)
        self.grad_slots = OrderedPlaces("slot", placement.plan.num_grad_slots)
        self.cleared: set[int] = set()  # gradients that live on the GPU
        self.dirty: dict[int, Action] = {}  # gradient in a grad slot that is not at home -> the tick that added last
        self.continued: dict[int, Action] = {}  # chunk -> the fetch of its gradient from the pass before
        self.summed: set[int] = set()  # chunks with a gradient from this pass
        self.write_backs: dict[int, list[Action]] = {}
        self.stashed: dict[tuple[Op, int | None], Action] = {}
        self.first_rows: dict[int, Action] = {}  # table on the host -> the first tick that adds to its gradient
        self.left: dict[int, Action] = {}  # table on the host -> the latest copy of its rows' gradients
        self.rows: dict[int, Action] = {}  # and that which is not summed yet
        self.unreduced: dict[int, Action] = {}  # chunk whose gradient is this rank's own -> the tick that added last
        self.reduced: dict[int, Action] = {}  # chunk -> the latest reduction of its gradient
        self.means: set[int] = set()  # chunks of which a grad slot holds the mean over ranks

    def run(self) -> None:
        self._check_ticks()
        verbs: dict[Op, Callable[[Action], None]] = {
            Op.FORWARD: self.params.use,
            Op.BACKWARD: self._backward,
            Op.FETCH: self._fetch,
            Op.EVICT: self.params.evict,
            Op.CLEAR: self._clear,
            Op.WRITE_BACK: self._write_back,
            Op.STASH: self._stash,
            Op.UNSTASH: self._stash,
            Op.UPDATE: self._update,
            Op.SETTLE: self._settle,
            Op.LOOK_UP: self.params.look_up,
            Op.SUM: self._sum_rows,
            Op.GATHER: self.params.gather,
            Op.REDUCE: self._reduce,
        }  # READ and WRITE: DiskReplay
        left = -1  # the last tick so far
        for action in self.schedule.actions:
            for name in action.after:
                if not self.precedence.listed_before(name, action.id):
                    self.fail(action, f"is listed before {name}, for which it waits")
            if message := objection(self.profile, self.placement, action):
                self.fail(action, message)
            self._check_moment(action, left)
            if action.op in verbs:
                verbs[action.op](action)
            left = action.tick if action.op in TICK_OPS else left
        self._check_end()

    def _check_moment(self, action: Action, left: int) -> None:
        """It is listed where the executor comes to it: what opens later is not issued yet, and what runs in the user's
        thread runs when it opens or right before its tick."""
        if action.op in TICK_OPS:
            return
        if action.opens > left:
            self.fail(action, f"opens after tick {action.opens}, but is listed after tick {left}")
        runs_after = action.opens if action.runs_when_open else action.tick - 1
        if action.lane is Lane.COMPUTE and runs_after != left:
            self.fail(action, f"runs after tick {runs_after}, but is listed after tick {left}")

    def _check_ticks(self) -> None:
        calls = self.profile.calls
        expected: list[tuple[Op, int | None]] = [(Op.FORWARD, index) for index in range(len(calls))]
        if self.schedule.mode.trains:
            expected += [(Op.BACKWARD, index) for index in reversed(range(len(calls))) if calls[index].needs_backward]
            expected.append((Op.STEP, None))
        found = [(tick.op, tick.call) for tick in self.schedule.ticks]
        if found != expected:
            raise InfeasiblePlan(f"the schedule's ticks do not follow the model's {len(calls)} calls")
        for place, tick in enumerate(self.schedule.ticks):
            if tick.tick != place or (tick.call is not None and calls[tick.call].block != tick.block):
                self.fail(tick, f"is tick {place} but says tick={tick.tick} block={tick.block}")

    def _backward(self, tick: Action) -> None:
        self.params.use(tick)
        assert tick.block is not None and tick.call is not None
        for place in self.placement.by_block[tick.block]:
            if place.chunk.trainable_numel:
                self._sum(tick, place)
        call = self.profile.calls[tick.call]
        if away(self.plan, call).num_bytes:
            self.after(tick, self.stashed.get((Op.UNSTASH, tick.call)), "runs before its inputs are back from the host")

    def _sum(self, tick: Action, place: ChunkPlace) -> None:
        chunk = place.chunk
        if chunk.index in self.updates:
            self.fail(tick, f"adds to the gradient of chunk {chunk.index} after its update")
        if chunk.index in self.means:
            self.fail(tick, f"adds to the gradient of chunk {chunk.index}, which is the mean over ranks by now")
        if place.is_reduced:
            self.unreduced[chunk.index] = tick
        self.summed.add(chunk.index)
        if place.is_looked_up:
            if (earlier := self.left.get(chunk.index)) is not None:
                self.after(tick, earlier, f"makes gradients of rows of chunk {chunk.index} where others are")
            self.first_rows.setdefault(chunk.index, tick)
            self.dirty[chunk.index] = tick
            return
        if place.in_grad_slot:
            entry = self.grad_slots.entry(chunk.index, ChunkKind.GRAD)
            self.after(tick, entry, f"adds to the gradient of chunk {chunk.index}, which is not in a grad slot then")
            self.dirty[chunk.index] = tick
            return
        if place.stays:
            self.dirty[chunk.index] = tick
        loose = self.profile.blocks[chunk.block].loose  # the runtime clears these itself
        if self.schedule.mode.starts_sums and chunk.index not in self.cleared and not loose:
            self.fail(tick, f"adds to the gradient of chunk {chunk.index}, which was not cleared")

    def _reduce(self, action: Action) -> None:
        place = self.place(action)
        chunk = place.chunk
        is_loose = self.profile.blocks[chunk.block].loose  # plain autograd adds to it, which no tick tells
        if not place.is_reduced or (
            chunk.index not in self.unreduced and (not is_loose or chunk.index in self.reduced)
        ):
            self.fail(action, f"reduces the gradient of chunk {chunk.index}, which has nothing new on this rank")
        if not place.in_grad_slot and not self.schedule.mode.ends_step:
            self.fail(action, f"reduces the gradient of chunk {chunk.index}, to which more is added")
        if (last_sum := self.unreduced.pop(chunk.index, None)) is not None:
            self.after(action, last_sum, f"reduces the gradient of chunk {chunk.index} before it is summed")
        if action.target != (Place(Tier.GPU) if place.is_reduced_home else action.source):
            self.fail(
                action, f"leaves the gradient of chunk {chunk.index} in {action.target}, where nobody looks for it"
            )
        if place.is_reduced_home:
            if chunk.optimised_numel:
                self.follows(action, ActionKey(Op.UPDATE, chunk.index), "overwrites a gradient that may still be read")
            self.leave_window(self.grad_slots, action)
        elif place.in_grad_slot:
            window = self.grad_slots.holding(chunk.index, ChunkKind.GRAD)
            if action.source is None or not window or action.source.slot != window[0]:
                self.fail(action, f"reduces {action.source}, where the gradient of chunk {chunk.index} is not")
            self.means.add(chunk.index)
        elif action.source != Place(Tier.GPU):
            self.fail(action, f"reduces {action.source}, but the gradient of chunk {chunk.index} has its own place")
        if not place.leaves and not place.is_used_up:
            self.dirty.pop(chunk.index, None)
        self.reduced[chunk.index] = action

    def _is_mean(self, action: Action, place: ChunkPlace) -> None:
        """The gradient that it reads is that of all ranks."""
        if not place.is_reduced:
            return
        index = place.chunk.index
        if index in self.unreduced:
            self.fail(action, f"reads the gradient of chunk {index}, which is not reduced")
        self.after(action, self.reduced.get(index), f"reads the gradient of chunk {index} before it is reduced")
        self.means.discard(index)

    def _sum_rows(self, action: Action) -> None:
        chunk = self.place(action).chunk
        self.after(action, self.rows.pop(chunk.index, None), f"adds rows of chunk {chunk.index} that are not there")
        if chunk.optimised_numel:
            self.follows(action, ActionKey(Op.UPDATE, chunk.index), "overwrites a gradient that may still be read")
        self.write_backs.setdefault(chunk.index, []).append(action)

    def _rows_leave(self, action: Action, chunk: int) -> None:
        if chunk in self.rows:
            self.fail(action, f"overwrites gradients of rows of chunk {chunk} that are not summed")
        for summed in self.write_backs.get(chunk, []):
            self.after(action, summed, f"overwrites gradients of rows of chunk {chunk} that may still be read")
        self.rows[chunk] = self.left[chunk] = action

    def _fetch(self, action: Action) -> None:
        place = self.place(action)
        chunk = place.chunk
        if place.is_looked_up:
            self.fail(action, f"fetches chunk {chunk.index}, whose rows are looked up on the host")
        comes_from_gpu = action.kind is ChunkKind.GRAD and place.is_rounded_home
        if place.tier_of(action.kind or ChunkKind.PARAM) is Tier.GPU and not comes_from_gpu:
            self.fail(action, f"fetches the {action.kind} of chunk {chunk.index}, which lives on the GPU")
        if action.kind is ChunkKind.PARAM:
            return self.params.fetch(action)
        if self.schedule.mode.starts_sums and chunk.index not in self.write_backs:
            self.fail(action, f"fetches a gradient of chunk {chunk.index} that no earlier action has made")
        for write_back in self.write_backs.get(chunk.index, []):
            self.after(action, write_back, "fetches a gradient before it is at home")
        if not self.schedule.mode.starts_sums and chunk.index not in self.continued:
            self.continued[chunk.index] = action
        self.enter_window(self.grad_slots, action, place.num_grad_slots)

    def _clear(self, action: Action) -> None:
        place = self.place(action)
        chunk = place.chunk
        holds_sums = not self.schedule.mode.starts_sums or chunk.index in self.summed
        if (holds_sums and not place.is_reduced_home) or chunk.index in self.unreduced or place.is_looked_up:
            self.fail(action, f"clears the gradient of chunk {chunk.index}, which holds sums")
        if not place.in_grad_slot:
            if chunk.index in self.cleared:
                self.fail(action, f"clears the gradient of chunk {chunk.index} again")
            if place.stays and place.leaves:
                key = self._last_of(Op.WRITE_BACK, place)
                self.follows(action, key, "clears a gradient that may still be on its way")
            elif chunk.optimised_numel:
                self.follows(action, ActionKey(Op.UPDATE, chunk.index), "clears a gradient that may still be read")
            elif place.is_reduced:
                self.follows(action, self._last_of(Op.REDUCE, place), "clears a gradient that may still be reduced")
            self.cleared.add(chunk.index)
        else:
            self.enter_window(self.grad_slots, action, place.num_grad_slots)

    def _last_of(self, op: Op, place: ChunkPlace) -> ActionKey:
        """The write-back, or reduction, of a sum that has stayed on the GPU, in the last pass of a step."""
        users = [tick for tick in self.schedule.ticks if tick.op is Op.BACKWARD and tick.block in place.chunk.users]
        return ActionKey(op, place.chunk.index, at=users[-1].id)

    def _write_back(self, action: Action) -> None:
        place = self.place(action)
        chunk = place.chunk
        if chunk.index not in self.dirty:
            self.fail(action, f"writes back the gradient of chunk {chunk.index}, which has nothing new on the GPU")
        if place.stays and not self.schedule.mode.ends_step:
            self.fail(action, f"writes back the gradient of chunk {chunk.index}, which is to stay")
        last_sum = self.dirty.pop(chunk.index)
        self.after(action, last_sum, f"writes back the gradient of chunk {chunk.index} before it is summed")
        if place.is_looked_up:
            return self._rows_leave(action, chunk.index)
        self._is_mean(action, place)
        if chunk.optimised_numel:
            self.follows(action, place.last_of_update, "overwrites a gradient that may still be read")
        if place.is_rounded_home and action.target != Place(Tier.GPU):
            self.fail(action, f"goes to {action.target}, but the gradient of chunk {chunk.index} has its own place")
        if place.stays and action.source != Place(Tier.GPU):
            self.fail(action, f"leaves {action.source}, but the gradient of chunk {chunk.index} has its own place")
        if not place.stays:
            self.leave_window(self.grad_slots, action)
        self.write_backs.setdefault(chunk.index, []).append(action)

    def _stash(self, action: Action) -> None:
        tick = next((tick for tick in self.schedule.ticks if tick.op is Op.FORWARD and tick.call == action.call), None)
        earlier = tick if action.op is Op.STASH else self.stashed.get((Op.STASH, action.call))
        self.after(action, earlier, f"moves the inputs of call {action.call} before they are there")
        if (action.op, action.call) in self.stashed:
            self.fail(action, f"moves the inputs of call {action.call} again")
        self.stashed[action.op, action.call] = action

    def _update(self, action: Action) -> None:
        place = self.place(action)
        chunk = place.chunk
        if not self.schedule.mode.ends_step:
            self.fail(action, f"updates chunk {chunk.index} before the last pass of the step")
        if place.is_used_up:
            last_sum = self.dirty.pop(chunk.index, None)
            self.after(action, last_sum, f"uses up the gradient of chunk {chunk.index} before it is summed")
            self.grad_slots.leave(action, self.grad_slots.holding(chunk.index, ChunkKind.GRAD))
        self._is_mean(action, place)
        for gather in self.params.gathers.get(chunk.index, []):
            self.after(action, gather, f"updates chunk {chunk.index} while it is gathered")
        if chunk.index in self.dirty or chunk.index in self.rows:
            self.fail(action, f"reads the gradient of chunk {chunk.index}, which is not written back")
        if chunk.index in self.updates:
            self.fail(action, f"updates chunk {chunk.index} again")
        for write_back in self.write_backs.get(chunk.index, []):
            self.after(action, write_back, f"reads the gradient of chunk {chunk.index} before it is at home")
        if self.plan.update is Update.DEFERRED:
            self._check_step(action)
        self.updates[chunk.index] = action

    def _settle(self, action: Action) -> None:
        place = self.place(action)
        chunk = place.chunk
        if not place.settles or chunk.index in self.settled:
            self.fail(action, f"writes the states of chunk {chunk.index}, which its update has written")
        update = self.updates.get(chunk.index)
        self.after(action, update, f"writes the states of chunk {chunk.index} before its parameters")
        self.settled.add(chunk.index)

    def _check_step(self, update: Action) -> None:
        """On the host after the step, on the GPU as its first part."""
        step = self.schedule.ticks[-1]
        if update.lane is Lane.CPU:
            self.after(update, step, "runs before step() was called")
        elif update.runs_when_open or update.tick != step.tick:
            self.fail(update, "runs before step() was called")

    def _check_end(self) -> None:
        mode, places = self.schedule.mode, self.placement.chunks
        lost = [index for index in sorted(self.dirty) if mode.ends_step or not places[index].stays]
        lost += sorted(self.rows)
        if lost:
            raise InfeasiblePlan(f"the gradients of chunks {lost} are never written back")
        if not mode.trains:
            return
        self.check_next_pass(self.grad_slots)
        for index, tick in self.first_rows.items():
            sums, copy = self.write_backs[index], self.left[index]
            first = next(one for one in self.schedule.lane(Lane.D2H) if one.chunk == index)
            self.follows(tick, copy.id, f"makes gradients of rows of chunk {index} where others may be")
            self.follows(first, sums[-1].id, f"overwrites gradients of rows of chunk {index} that may still be read")
        for index, fetch in self.continued.items():
            self.follows(fetch, self.write_backs[index][-1].id, "fetches a gradient before it is at home")
        self._check_balance()
        if not mode.ends_step:
            return
        optimised = [chunk for chunk in self.plan.layout.chunks if chunk.optimised_numel]
        loose = {chunk.index for chunk in optimised if self.profile.blocks[chunk.block].loose}
        due = loose | {chunk.index for chunk in optimised if chunk.index in self.summed}
        if due - self.updates.keys():
            raise InfeasiblePlan(
                f"the chunks {sorted(due - self.updates.keys())} have a gradient and are never updated"
            )
        if owing := {index for index in self.updates if places[index].settles} - self.settled:
            raise InfeasiblePlan(f"the chunks {sorted(owing)} are updated, and their states are never written")
        if self.unreduced:
            raise InfeasiblePlan(f"the gradients of chunks {sorted(self.unreduced)} are never reduced")
        self.params.check_gathered()

    def _check_balance(self) -> None:
        """What a step takes it gives back, or the next one would begin with less."""
        for tier in (Tier.GPU, Tier.HOST):
            taken, given = (
                sum(getattr(action, f"{tier}_{verb}") for action in self.schedule.actions)
                for verb in ("takes", "gives")
            )
            if taken != given:
                raise InfeasiblePlan(
                    f"the schedule is wrong: its actions take {taken} bytes of {tier} memory and give {given} back",
                    tier=tier,
                    num_bytes=taken - given,
                )
