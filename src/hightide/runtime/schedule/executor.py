"""The interpreter of schedules.

The model drives: autograd calls `enter` and `leave` around every block. On enter the executor finds the tick, runs
what must precede it and waits for this tick's dependencies only; on leave it issues every action that the tick
opened. Issuing never waits. Its only freedoms: a lane's stated picking rule, and fetching on demand (demand.py) when
the model leaves the plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from hightide.ir.action import Action, ActionKey, Mode, Op, Schedule
from hightide.ir.plan import Update
from hightide.ir.refusal import Refused
from hightide.ir.tier import ChunkKind, Lane
from hightide.runtime.blocks.activations import Stash
from hightide.runtime.chunks.residency import Residency
from hightide.runtime.lanes.lanes import Begun
from hightide.runtime.schedule.demand import Demands
from hightide.runtime.schedule.in_flight import InFlight
from hightide.runtime.schedule.performer import Performer
from hightide.runtime.schedule.program import Program
from hightide.stores.ticket import Ticket

_DONE = Ticket.completed("done in the user's thread")  # one for all: it is done, without a fence


@dataclass
class Tick:
    """A block between enter and leave."""

    op: Op
    block: int
    index: int | None  # in the schedule; None: off the plan
    call: int | None
    began: Begun
    accumulate: bool = False


class Pass:
    """Where one pass over a schedule stands."""

    def __init__(self, program: Program, index: int) -> None:
        self.index = index
        self.cursor = 0  # the tick that the plan expects next
        self.tickets: dict[ActionKey, Ticket] = {}
        self.stashes: dict[ActionKey, Stash] = {}  # on their way to host, by the action that takes them there
        self.backward_begun = False
        self.backward_ended = False
        self.load(program)

    @property
    def is_cut_off(self) -> bool:
        """Its backward has ended with an exception, between two ticks."""
        return self.backward_begun and not self.backward_ended

    def load(self, program: Program) -> None:
        """Starts, or goes on after forward, with a program; what was issued already stays issued."""
        self.program = program
        self.pending = {
            lane: deque(action for action in actions if action.id not in self.tickets)
            for lane, actions in program.by_lane.items()
        }


class Executor:
    def __init__(
        self,
        schedules: Mapping[Mode, Schedule],
        flight: InFlight,
        performer: Performer,
        update: Update,
        names: list[str],
    ) -> None:
        self.programs = {mode: Program(schedule) for mode, schedule in schedules.items()}
        self.lanes = flight.lanes
        self.performer = performer
        self.chunks = performer.chunks
        self.gradients = performer.gradients
        self.num_deviations = 0
        self._flight = flight
        self._demands = Demands(self._flight, performer, names)
        self._update = update
        self._names = names
        self._pass: Pass | None = None
        self._num_begun = 0
        self._outlasting = {name for p in self.programs.values() for a in p.schedule.actions for name in a.after_prev}
        self._suspended: Pass | None = None
        self._last_use: dict[int, int] = {}
        self._owes_step = False  # in-backward updates have run, and step() was not called since
        self._was_abandoned = False  # the latest pass

    def go_on(self, before: Executor) -> None:
        """With what counts whatever the plan."""
        self.num_deviations, self._owes_step = before.num_deviations, before._owes_step
        self._demands.has_warned = before._demands.has_warned

    @property
    def stall_s(self) -> dict[Lane, float]:
        return self._flight.stall_s

    # -- passes ---------------------------------------------------------------------------------------------------

    def begin(self, mode: Mode) -> None:
        """Begins a pass. All slots are empty: the last step's update made their copies stale."""
        self.lanes.check()
        if self._was_abandoned or (self._pass is not None and self._pass.is_cut_off):
            self.lanes.drain()  # what it has still under way would take slots later, and leave in the new pass
            self._was_abandoned = False
        if mode is Mode.EVAL and self.mode is Mode.TRAIN and self._suspended is None:
            self._suspended = self._pass  # evaluation between forward and backward; backward goes on with this one
        elif mode is not Mode.EVAL:
            self._suspended = None
        self._settle_slots()
        self.lanes.begin_pass()
        self._pass = Pass(self.programs[mode], self.lanes.pass_index)
        if mode is not Mode.EVAL:
            self.gradients.begin_pass()
            self.performer.stashes.begin_pass()

    def start(self) -> None:
        """Hands out what need not wait for the first tick. Not before the batch is on its way: one engine copies
        everything to the GPU, in turn, and the first block would wait for the fetches of many others."""
        self._issue(-1)

    @property
    def mode(self) -> Mode | None:
        return None if self._pass is None else self._pass.program.mode

    def expects(self, mode: Mode, block: int) -> bool:
        """Whether the present pass is of this mode and still has a forward of this block to come."""
        current = self._pass
        return (
            current is not None
            and self.mode is mode
            and current.program.find_forward(block, current.cursor) is not None
        )

    def _settle_slots(self) -> None:
        for chunk in self.chunks.param_slots.everyone():
            if self.chunks.param_copies[chunk].state is Residency.ARRIVING:  # left over from an abandoned pass
                self.lanes.wait(self._flight.fetches[chunk], Lane.H2D)
            if self.chunks.param_copies[chunk].state is Residency.CLEAN:
                self.chunks.param_copies[chunk].move(Residency.ABSENT)
            if self.chunks.param_copies[chunk].state is Residency.ABSENT:
                self.chunks.param_slots.drop(chunk)
        for chunk in self.chunks.grad_slots.everyone():  # a backward that ended with an exception
            if self.chunks.grad_copies[chunk].state is Residency.ARRIVING:
                self.lanes.wait(self._flight.gradient_fetches[chunk], Lane.H2D)
            if self.chunks.grad_copies[chunk].state in (Residency.CLEAN, Residency.DIRTY):
                self._demands.send_away(chunk)

    # -- ticks ----------------------------------------------------------------------------------------------------

    def enter(self, op: Op, block: int, call: int | None = None, accumulate: bool = False) -> Tick:
        """Makes a block ready to compute: its parameters bound and, for an accumulating backward, its gradients."""
        self.lanes.check()
        if op is Op.BACKWARD and self._suspended is not None:
            self._pass, self._suspended = self._suspended, None
        current = self._pass
        if current is None:
            raise Refused("a block ran outside of a pass; call the model that hightide.wrap returned")
        if accumulate and not current.backward_begun:
            self._begin_backward(current)
        elif accumulate and current.backward_ended:
            self.gradients.any_valid()  # another backward through the same pass
            current.backward_ended = False
            self._owes_step = self._update is Update.IN_BACKWARD
        index = self._find(current, op, block, call)
        if index is None:
            self.num_deviations += 1
            self._demands.warn(block)
        else:
            self._skip_to(current, index)
            self._before(current, index, accumulate)
            call = current.program.ticks[index].call
        for chunk in self.chunks.by_block[block]:
            self._hold_params(chunk, block)
            if accumulate and self.gradients.is_trainable(chunk):
                self._hold_gradient(chunk, block)
        return Tick(op, block, index, call, self._begin_tick(), accumulate)

    def leave(self, tick: Tick) -> None:
        assert self._pass is not None
        cursor = self._pass.cursor if tick.index is None else tick.index
        for chunk in self.chunks.by_block[tick.block]:
            self._release_params(chunk, tick.block)
            self._last_use[chunk] = cursor
            if tick.accumulate and self.gradients.is_trainable(chunk):
                self._release_gradient(chunk, tick.block)
        if tick.index is None:
            self._send_home(tick)
        else:
            name = self._pass.program.ticks[tick.index].id
            self.lanes.record_inline(name, tick.began, self._gpu_bytes())
            self._complete(self._pass, tick.index)

    def _begin_tick(self) -> Begun:
        return self.lanes.begin_inline(self._gpu_bytes())

    def _gpu_bytes(self) -> int | None:
        """Asked for only while a recording is on."""
        return self.chunks.gpu.device_used_bytes if self.lanes.streams.recording else None

    def _send_home(self, tick: Tick) -> None:
        """No write-back is planned for a block that ran off the plan."""
        for chunk in self.chunks.by_block[tick.block] if tick.accumulate else ():
            if self.chunks.grad_copies[chunk].state is Residency.DIRTY:
                self._demands.send_away(chunk)

    def finish_backward(self) -> None:
        """At the end of autograd's backward: planned ticks that were not run are passed over, no gradient stays
        behind."""
        if self._pass is None:
            return
        step = self._pass.program.step_tick
        if step is not None:
            self._skip_to(self._pass, step)
        self._send_gradients_home()
        self.gradients.end_backward()
        self._pass.backward_ended = True

    def _send_gradients_home(self) -> None:
        for chunk in self.chunks.grad_slots.everyone():
            if self.chunks.grad_copies[chunk].state is Residency.DIRTY:
                self._demands.send_away(chunk)

    def step(self, leftovers: list[int]) -> None:
        """The user's optimizer.step(). `leftovers`: chunks with a gradient; those that no planned update covers run
        on demand."""
        self.lanes.check()
        if self._update is Update.DEFERRED:
            self.performer.updated.clear()
        elif not self._owes_step and any(self.gradients.is_trainable(chunk) for chunk in leftovers):
            raise Refused(
                "optimizer.step() came again without a backward since the last one, but this model was wrapped with "
                "update='in_backward': the promise of one step per backward. Wrap with update='deferred' (the default)."
            )
        self._send_gradients_home()  # a backward that ended with an exception has left some behind
        current = self._pass
        step = None if current is None else current.program.step_tick
        if current is not None and step is not None and current.cursor <= step and current.backward_begun:
            self._skip_to(current, step)
            self._before(current, step, accumulate=True)
            began = self._begin_tick()
            self.lanes.record_inline(current.program.ticks[step].id, began, self._gpu_bytes())
            self._complete(current, step)
        for chunk in leftovers:
            if chunk not in self.performer.updated:
                self._demands.update(chunk)
        self._owes_step = False
        self.performer.updated.clear()

    def wait_for_updates(self) -> None:
        for chunk in self._flight.updates:
            self.wait_for_update(chunk)

    def wait_for_update(self, chunk: int) -> None:
        if chunk in self._flight.updates:
            self._flight.wait(self._flight.updates[chunk], Lane.CPU)

    def wait_for_fetch(self, chunk: int) -> None:
        """Until no copy reads the chunk's home any more."""
        if chunk in self._flight.fetches:
            self._flight.fetches[chunk].settle()

    def settle(self) -> None:
        """Until nothing is under way, and every gradient is at home. A pass that has begun is given up."""
        self.abandon()
        self.wait_for_updates()
        self._settle_slots()
        if self._owes_step:
            self._use_up_gradients()
        for ticket in self._flight.exits.values():
            self._flight.wait(ticket, Lane.D2H)
        self.lanes.drain()

    def _use_up_gradients(self) -> None:
        """The updates of this backward have run, but for a few of the step's (loose parameters have theirs there): what
        `step()` finds afterwards it would take for new."""
        for spec in self.chunks.specs:
            if self.gradients.has_gradient(spec.index):
                if spec.optimised_numel and spec.index not in self.performer.updated:
                    self._demands.update(spec.index)
                self.gradients.drop_chunk(spec.index)
        self.wait_for_updates()

    @property
    def has_open_forward(self) -> bool:
        """Whether the latest pass may still have a backward to come: its graph may be alive."""
        latest = self._suspended or self._pass
        return latest is not None and latest.program.mode is not Mode.EVAL and not latest.backward_begun

    @property
    def num_begun(self) -> int:
        """Ticks of the latest pass that have begun."""
        return self._num_begun if self._pass is None else self._pass.cursor

    def abandon(self) -> None:
        """After an exception inside a block: nothing stays bound, and the next pass starts afresh."""
        if self._pass is not None:
            self._num_begun = self._pass.cursor + 1  # the one that failed, too
        for chunk, copy in enumerate(self.chunks.param_copies):
            if copy.state is Residency.HELD:
                self._release_params(chunk, None)
        for chunk, copy in enumerate(self.chunks.grad_copies):
            if copy.state is Residency.HELD:
                self.gradients.harvest(chunk, None)
                copy.move(Residency.DIRTY if self.chunks.placed[chunk].in_grad_slot else Residency.CLEAN)
        if self.mode is not Mode.EVAL:
            self._suspended = None  # an evaluation that fails leaves the forward before it as it is
        self._pass = None
        self._was_abandoned = True

    def _zeroing(self) -> str:
        """What would have dropped the gradients that there are."""
        unowned = self.gradients.valid_unowned()
        if unowned is None:
            return "optimizer.zero_grad()"
        return f"model.zero_grad() (the optimizer does not know {unowned!r}, so its zero_grad() leaves that gradient)"

    # -- inside a pass --------------------------------------------------------------------------------------------

    def _begin_backward(self, current: Pass) -> None:
        """Only now is it known whether gradients exist: users call zero_grad before or after forward."""
        exists = self.gradients.any_valid()
        if self._update is Update.IN_BACKWARD and (self._owes_step or exists):
            missing = "optimizer.step()" if self._owes_step else self._zeroing()
            raise Refused(
                f"backward() came again without {missing} since the last one, but this model was wrapped with "
                "update='in_backward': the promise of one step per backward. Wrap with update='deferred' (the "
                "default) to "
                "accumulate over several backwards or to skip steps."
            )
        current.backward_begun = True
        self.performer.updated.clear()
        self._owes_step = self._update is Update.IN_BACKWARD
        if exists and current.program.mode is Mode.TRAIN:
            current.load(self.programs[Mode.ACCUMULATE])
            self._issue(current.cursor - 1)

    def _find(self, current: Pass, op: Op, block: int, call: int | None) -> int | None:
        if op is Op.FORWARD:
            return current.program.find_forward(block, current.cursor)
        return current.program.find_backward(call, current.cursor)

    def _skip_to(self, current: Pass, index: int) -> None:
        """Passes over planned ticks that the model did not run (layer drop). Their transfers run as planned, so that
        the slots stay as the plan thinks they are; what has nothing to act on does nothing."""
        while current.cursor < index:
            self.num_deviations += 1
            for action in current.program.before_tick[current.cursor]:
                if action.op is Op.UPDATE:
                    self._run_inline(current, action)
            self._complete(current, current.cursor)

    def _before(self, current: Pass, index: int, accumulate: bool) -> None:
        for action in current.program.before_tick[index]:
            if accumulate or action.op is not Op.CLEAR:  # torch.autograd.grad must not touch parameters' gradients
                self._run_inline(current, action)
        for name in current.program.ticks[index].after:
            if name in current.tickets:
                self._wait(current, name)

    def _complete(self, current: Pass, index: int) -> None:
        name = current.program.ticks[index].id
        current.tickets[name] = _DONE
        current.cursor = index + 1
        for action in current.program.when_open[index]:
            self._run_inline(current, action)
        self._issue(index)

    def _issue(self, left: int) -> None:
        """Hands every open action to its lane, in the lane's order. An action whose dependency on another lane is
        itself not issued yet holds its lane until it is."""
        current = self._pass
        assert current is not None
        progress = True
        while progress:
            progress = False
            for lane, pending in current.pending.items():
                while (
                    pending and pending[0].opens <= left and all(name in current.tickets for name in pending[0].after)
                ):
                    self._submit(current, lane, pending.popleft())
                    progress = True

    def _submit(self, current: Pass, lane: Lane, action: Action) -> None:
        after = [current.tickets[name] for name in action.after]
        after += [self._flight.latest[name] for name in action.after_prev if name in self._flight.latest]
        if action.op is Op.UPDATE and action.chunk in self._flight.exits:  # it may have left off the plan
            after.append(self._flight.exits[action.chunk])
        if (
            action.op is Op.UPDATE and action.chunk in self._flight.fetches
        ):  # a copy may still be reading what it writes
            after.append(self._flight.fetches[action.chunk])
        work = self.performer.prepare(action)
        ticket = self.lanes.submit(action.id, lane, action.tick, [*after, *self._flight.moment(lane)], work)
        current.tickets[action.id] = ticket
        self._remember(action, ticket)

    def _remember(self, action: Action, ticket: Ticket) -> None:
        if action.id in self._outlasting:
            self._flight.latest[action.id] = ticket
        if action.op is Op.UPDATE and action.chunk is not None:
            self._flight.updates[action.chunk] = ticket
        elif action.op is Op.FETCH and action.chunk is not None:
            flight = self._flight
            (flight.fetches if action.kind is ChunkKind.PARAM else flight.gradient_fetches)[action.chunk] = ticket
        elif action.op is Op.WRITE_BACK and action.chunk is not None:
            self._flight.exits[action.chunk] = ticket
        elif action.op in (Op.STASH, Op.UNSTASH) and action.call is not None:
            stash = self.performer.stashes.of(action.call)
            if stash is not None:
                self.performer.stashes.is_moved_by(stash, ticket)
                if action.op is Op.STASH and self._pass is not None:
                    self._pass.stashes[action.id] = stash

    def _run_inline(self, current: Pass, action: Action) -> None:
        for name in action.after:
            if name in current.tickets:
                self._wait(current, name)
        for name in action.after_prev:
            if name in self._flight.latest:
                self._flight.wait(self._flight.latest[name], Lane.CPU)
        work = self.performer.prepare(action)
        with self.chunks.gpu.meter("updates"):
            self.lanes.run_inline(action.id, work)
        current.tickets[action.id] = _DONE
        self._remember(action, _DONE)

    def _wait(self, current: Pass, name: ActionKey) -> None:
        ticket = current.tickets[name]
        lane = current.program.schedule.by_id[name].lane
        self._flight.wait(ticket, lane)
        if name in current.stashes:
            self.performer.stashes.let_go(current.stashes.pop(name))

    # -- holding --------------------------------------------------------------------------------------------------

    def _hold_params(self, chunk: int, block: int) -> None:
        copy = self.chunks.param_copies[chunk]
        if chunk in self._flight.fetches:
            self._flight.wait(self._flight.fetches[chunk], Lane.H2D)
        if copy.state is Residency.ABSENT:
            self._demands.fetch(chunk, self._next_use, lambda other: self._last_use.get(other, -1))
        elif not self.chunks.placed[chunk].is_streamed:
            self.wait_for_update(chunk)  # the lane says with `stale` that there are newer values at home
            if self.chunks.stale[chunk]:
                self._demands.refresh(chunk)
        copy.move(Residency.HELD)
        self.chunks.bind(chunk, block)

    def _next_use(self, chunk: int) -> float:
        assert self._pass is not None
        return self._pass.program.next_use(self.chunks.specs[chunk].users, self._pass.cursor)

    def _release_params(self, chunk: int, block: int | None) -> None:
        self.chunks.unbind(chunk, block)
        self.chunks.param_copies[chunk].move(Residency.CLEAN)

    def _hold_gradient(self, chunk: int, block: int) -> None:
        copy = self.chunks.grad_copies[chunk]
        if self._update is Update.IN_BACKWARD and chunk in self.performer.updated:
            raise Refused(
                f"block {self._names[block]!r} ran backward again after its update, but this model was wrapped with "
                "update='in_backward': the promise of one backward per step. Wrap with update='deferred' (the default)."
            )
        if not self.chunks.placed[chunk].in_grad_slot:
            if copy.state is Residency.ABSENT:
                copy.move(Residency.CLEAN)  # its own place; the ledger clears what is not valid
        else:
            self._flight.wait_for_gradients([chunk])
            if copy.state is Residency.LEAVING:
                self._flight.wait(self._flight.exits[chunk], Lane.D2H)
            if copy.state is Residency.ABSENT:
                self._demands.gradient(chunk)
        copy.move(Residency.HELD)
        self.gradients.bind(chunk, block)

    def _release_gradient(self, chunk: int, block: int) -> None:
        self.gradients.harvest(chunk, block)
        in_slot = self.chunks.placed[chunk].in_grad_slot
        self.chunks.grad_copies[chunk].move(Residency.DIRTY if in_slot else Residency.CLEAN)
