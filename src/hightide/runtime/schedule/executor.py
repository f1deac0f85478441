"""The interpreter of schedules.

The model drives: autograd calls `enter` and `leave` around every block. On enter the executor finds the tick, runs
what must precede it and waits for this tick's dependencies only; on leave it issues every action that the tick
opened. Issuing never waits. Its only freedoms: a lane's stated picking rule, and fetching on demand (demand.py) when
the model leaves the plan.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hightide.ir.action import Action, ActionKey, Mode, Op, Place, Schedule
from hightide.ir.plan import Update
from hightide.ir.refusal import Refused
from hightide.ir.tier import ChunkKind, Lane
from hightide.planner.predict.saving import update_order
from hightide.runtime.blocks.activations import Stash
from hightide.runtime.chunks.residency import Residency
from hightide.runtime.lanes.lanes import Begun
from hightide.runtime.schedule.demand import Demands
from hightide.runtime.schedule.in_flight import InFlight
from hightide.runtime.schedule.performer import LaneWork, Performer, nothing
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
        self.buffers: dict[ActionKey, Place | None] = {}  # of READs that were issued: which they fill
        self.works: dict[ActionKey, LaneWork] = {}  # of tables on the host: what a block has left to be done
        self.stashes: dict[ActionKey, Stash] = {}  # on their way to host, by the action that takes them there
        self.summed: set[int] = set()  # chunks to whose gradients it has added
        self.is_going_back = False  # a block has begun its backward, whether it adds to gradients or not
        self.backward_begun = False
        self.backward_ended = False
        self.load(program)

    @property
    def is_cut_off(self) -> bool:
        """Its backward has ended with an exception, between two ticks, or added to no gradients."""
        return (self.is_going_back or self.backward_begun) and not self.backward_ended

    def load(self, program: Program) -> None:
        """Starts, or goes on after forward, with a program; what was issued already stays issued. But what was read
        ahead from disk into a buffer that is now for something else is read again."""
        self.program = program
        for action in program.by_lane[Lane.DISK_READ]:
            if self.buffers.get(action.id, action.target) != action.target:
                del self.tickets[action.id]
        self.pending = [
            deque(action for action in actions if action.id not in self.tickets)
            for actions in program.by_lane.values()
            if actions
        ]

    def has_issued(self, names: tuple[ActionKey, ...]) -> bool:
        return all([name in self.tickets for name in names])


class Executor:
    def __init__(
        self,
        schedules: Mapping[Mode, Schedule],
        flight: InFlight,
        performer: Performer,
        update: Update,
        names: list[str],
        accumulate: int = 1,
    ) -> None:
        """`accumulate`: backwards that the user has promised before each step."""
        self.programs = {mode: Program(schedule) for mode, schedule in schedules.items()}
        self._accumulate = accumulate
        self.lanes = flight.lanes
        self.performer = performer
        self.chunks = performer.chunks
        self.gradients = performer.gradients
        self.num_deviations = 0
        self._flight = flight
        self._demands = Demands(self._flight, performer, names)
        self._update = update
        self._names = names
        self._optimised = [spec.index for spec in self.chunks.specs if spec.optimised_numel]
        self._pass: Pass | None = None
        self._num_begun = 0
        self._outlasting = {name for p in self.programs.values() for a in p.schedule.actions for name in a.after_prev}
        self._suspended: Pass | None = None
        self._last_use: dict[int, int] = {}
        self._num_backwards = 0  # of the present step
        self._was_told = False  # that the promise was not kept
        self._final = self._last_backwards()
        self._held = [
            tuple(chunk for chunk in used if chunk not in self.chunks.tables) for used in self.chunks.by_block
        ]
        self._staying = {chunk for chunk, place in enumerate(self.chunks.placed) if place.stays}
        self._rings = None if self.chunks.disk is None else self.chunks.disk.rings
        self._moment: list[Ticket] | None = None  # what compute had enqueued when issuing began
        self._owes_step = False  # in-backward updates have run, and step() was not called since
        self._was_abandoned = False  # the latest pass

    def go_on(self, before: Executor) -> None:
        """With what counts whatever the plan."""
        self.num_deviations, self._owes_step = before.num_deviations, before._owes_step
        self._demands.has_warned = before._demands.has_warned
        self._num_backwards, self._was_told = before._num_backwards, before._was_told

    def _last_backwards(self) -> dict[int, int]:
        """By chunk, the tick of the last pass of a step with which its sum is final. Empty: every pass is the last."""
        if self._accumulate == 1:
            return {}
        ticks = self.programs[Mode.LAST].ticks
        backward = [(tick.block, index) for index, tick in enumerate(ticks) if tick.op is Op.BACKWARD]
        return {chunk: index for block, index in backward if block is not None for chunk in self.chunks.by_block[block]}

    @property
    def stall_s(self) -> dict[Lane, float]:
        return self._flight.stall_s

    # -- passes ---------------------------------------------------------------------------------------------------

    def begin(self, mode: Mode) -> None:
        """Begins a pass, of training or of evaluation. Slots are empty, but for what a pass of the same step has left
        in them."""
        self.lanes.check()
        if self._was_abandoned or (self._pass is not None and self._pass.is_cut_off):
            self.lanes.drain()  # what it has still under way would take slots later, and leave in the new pass
            self._was_abandoned = False
        if not mode.trains and self.is_training and self._suspended is None:
            self._suspended = self._pass  # evaluation between forward and backward; backward goes on with this one
        elif mode.trains:
            self._suspended = None
        program = self._program(exists=self._num_backwards > 0) if mode.trains else self.programs[mode]
        self._settle_slots(() if self._owes_step else program.schedule.standing)  # updates have made them stale
        self.lanes.begin_pass()
        self._pass = Pass(program, self.lanes.pass_index)
        if mode.trains:
            self.gradients.begin_pass()
            self.performer.stashes.begin_pass()
            self._unpark()
            if self._rings is not None:
                self._rings.drop()  # what a pass that was given up has read ahead

    def _unpark(self) -> None:
        """Gradients of a backward that was cut off, which the user has dropped since: no update takes their place."""
        for chunk in self.chunks.parked:
            update = self._flight.updates.get(chunk)
            if not self.gradients.has_gradient(chunk) and (update is None or update.done):
                self.chunks.unpark(chunk)

    def start(self) -> None:
        """Hands out what need not wait for the first tick. Not before the batch is on its way: one engine copies
        everything to the GPU, in turn, and the first block would wait for the fetches of many others."""
        assert self._pass is not None
        for action in self._pass.program.when_open[-1]:
            self._run_inline(self._pass, action)
        self._issue(-1)

    def _program(self, exists: bool) -> Program:
        """Of the next training pass. `exists`: whether there are gradients to which it adds. A step of several passes
        that goes on beyond its last adds to it as that did; one of a single pass learns of it when backward begins."""
        if self._accumulate == 1:
            return self.programs[Mode.TRAIN]
        if not exists:
            return self.programs[Mode.FIRST]
        is_last = self._num_backwards >= self._accumulate - 1 or Mode.MIDDLE not in self.programs
        return self.programs[Mode.LAST if is_last else Mode.MIDDLE]

    @property
    def mode(self) -> Mode | None:
        return None if self._pass is None else self._pass.program.mode

    @property
    def is_training(self) -> bool:
        return self.mode is not None and self.mode.trains

    def expects(self, mode: Mode, block: int) -> bool:
        """Whether the present pass is of this kind and still has a forward of this block to come."""
        current = self._pass
        return (
            current is not None
            and self.is_training == mode.trains
            and current.program.find_forward(block, current.cursor) is not None
        )

    def _settle_slots(self, standing: Sequence[tuple[int, int]] = ()) -> None:
        """`standing`: parameters that stay where they are."""
        for chunk in self.chunks.param_slots.everyone():
            if self.chunks.param_copies[chunk].state is Residency.ARRIVING:  # left over from an abandoned pass
                self.lanes.wait(self._flight.fetches[chunk], Lane.H2D)
            if (chunk, self.chunks.param_slots.first(chunk)) in standing:
                continue
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
        elif op is Op.BACKWARD and not current.is_going_back:
            current.is_going_back = True
            self._issue(current.cursor - 1)
        elif accumulate and current.backward_ended:
            self.gradients.any_valid()  # another backward through the same pass
            current.backward_ended = False
            self._owes_step = self._update is Update.IN_BACKWARD and current.program.mode.ends_step
        index = self._find(current, op, block, call)
        if index is None:
            self.num_deviations += 1
            self._demands.warn(block)
        else:
            self._skip_to(current, index)
            self._before(current, index, accumulate)
            call = current.program.ticks[index].call
        for chunk in self._held[block]:
            self._hold_params(chunk, block)
            if accumulate and self.gradients.is_trainable(chunk):
                self._hold_gradient(chunk, block)
        return Tick(op, block, index, call, self._begin_tick(), accumulate)

    def leave(self, tick: Tick) -> None:
        assert self._pass is not None
        cursor = self._pass.cursor if tick.index is None else tick.index
        for chunk in self._held[tick.block]:
            self._release_params(chunk, tick.block)
            self._last_use[chunk] = cursor
            if tick.accumulate and self.gradients.is_trainable(chunk):
                self._release_gradient(chunk, tick)
        if tick.index is None:
            self._send_home(tick)
        else:
            name = self._pass.program.ticks[tick.index].id
            self.lanes.record_inline(name, tick.began, self._gpu_bytes())
            self._complete(self._pass, tick.index)

    # -- tables on the host ---------------------------------------------------------------------------------------

    def look_up(self, tick: Tick, chunk: int, ids: Tensor, into: Tensor) -> None:
        """Rows of a table, which are on the GPU for whatever compute enqueues from now on. Inside its tick."""
        self.wait_for_update(chunk)
        copy, current = self.performer.look_up(chunk, ids, into), self._pass
        assert current is not None
        name = ActionKey(Op.LOOK_UP, tick.call)
        if tick.index is not None:
            current.works[name] = copy
            self._issue(tick.index - 1)
        if tick.index is not None and name in current.tickets:
            self._wait(current, name)
        else:
            current.works.pop(name, None)
            copy()
        self.chunks.tables[chunk].arriving = None

    def add_rows(self, tick: Tick, chunk: int, ids: Tensor, gradients: Tensor, padding: int | None) -> None:
        """To the gradient of a table. Inside its tick."""
        current = self._pass
        assert current is not None
        self._check_update(chunk, tick.block)
        if chunk in self._flight.rows:  # they would be overwritten on the GPU
            self._flight.wait(self._flight.rows[chunk], Lane.D2H)
        works = self.performer.add_rows(chunk, ids, gradients, padding, self._is_final(chunk, tick))
        current.summed.add(chunk)
        if tick.index is None:
            self._demands.add_rows(chunk, *works)
        else:
            at = current.program.ticks[tick.index].id
            names = (ActionKey(Op.WRITE_BACK, chunk, at=at), ActionKey(Op.SUM, chunk, at=at))
            current.works.update(zip(names, works, strict=True))

    def _begin_tick(self) -> Begun:
        return self.lanes.begin_inline(self._gpu_bytes())

    def _gpu_bytes(self) -> int | None:
        """Asked for only while a recording is on."""
        return self.chunks.gpu.device_used_bytes if self.lanes.streams.recording else None

    def _send_home(self, tick: Tick) -> None:
        """No write-back is planned for a block that ran off the plan. What stays has until the step."""
        for chunk in self.chunks.by_block[tick.block] if tick.accumulate else ():
            if chunk not in self._staying and self.chunks.grad_copies[chunk].state is Residency.DIRTY:
                self._demands.send_away(chunk)

    def finish_backward(self) -> None:
        """At the end of autograd's backward: planned ticks that were not run are passed over, no gradient stays
        behind."""
        if self._pass is None or not self._pass.backward_begun:
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

    def _send_those_that_stayed(self) -> None:
        """Before a step that comes earlier than was promised, or whose last pass left out a block."""
        for chunk in sorted(self._staying):
            if self.chunks.grad_copies[chunk].state is Residency.DIRTY:
                self._demands.send_away(chunk)

    def step(self) -> None:
        """The user's optimizer.step(). Chunks with a gradient that no planned update covers run on demand."""
        self.lanes.check()
        if self._update is Update.DEFERRED:
            self.performer.updated.clear()
        elif (
            not self._owes_step and not self._num_backwards and any(map(self.gradients.is_trainable, self._leftovers()))
        ):
            raise Refused(
                "optimizer.step() came again without a backward since the last one, but this model was wrapped with "
                "update='in_backward': the promise of one step per backward. Wrap with update='deferred' (the default)."
            )
        if self._num_backwards not in (0, self._accumulate):
            self._tell(f"step() came after {self._num_backwards}")
        self._send_gradients_home()  # a backward that ended with an exception has left some behind
        self._send_those_that_stayed()
        current = self._pass
        step = None if current is None else current.program.step_tick
        if current is not None and step is not None and current.cursor <= step and current.backward_begun:
            self._skip_to(current, step)
            self._before(current, step, accumulate=True)
            began = self._begin_tick()
            self.lanes.record_inline(current.program.ticks[step].id, began, self._gpu_bytes())
            self._complete(current, step)
        for chunk in self._leftovers():
            self._demands.update(chunk)
        self._owes_step = False
        self._num_backwards = 0
        self.performer.updated.clear()

    def _tell(self, what: str) -> None:
        """Of a promise that was not kept. A step of one backward has none."""
        if self._accumulate == 1 or self._was_told:
            return
        self._was_told = True
        warnings.warn(
            f"{what} backwards, but this model was wrapped with accumulate={self._accumulate}: as many before every "
            "step. Results are the same, but such a step is slower than planned; if this is how your loop is, wrap "
            "with the number that it has",
            stacklevel=4,
        )

    def _leftovers(self) -> list[int]:
        """Chunks with a gradient that no update has used."""
        done, ready = self.performer.updated, self.gradients.ready
        return [chunk for chunk in self._optimised if chunk not in done and ready(chunk)]

    def update_order(self) -> list[int]:
        """All chunks, in the order in which the next step updates them; those that it does not update are last."""
        ends = next(program for mode, program in self.programs.items() if mode.trains and mode.ends_step)
        return update_order(ends.schedule, len(self.chunks.specs))

    def wait_for_updates(self) -> None:
        for chunk in self._flight.updates:
            self.wait_for_update(chunk)

    def wait_for_update(self, chunk: int) -> None:
        """Until its home has the values."""
        if chunk in self._flight.updates:
            self._flight.wait(self._flight.updates[chunk], Lane.CPU)
        if chunk in self._flight.stored:
            self._flight.wait(self._flight.stored[chunk], Lane.DISK_WRITE)

    def settle_home(self, chunk: int) -> None:
        """The same, and nothing reads them there. Whoever asks may change them: what was read ahead is read again."""
        self.wait_for_update(chunk)
        if self._rings is not None:
            for ticket in self._flight.reads_of(chunk):
                self._flight.wait(ticket, Lane.DISK_READ)
            self._rings.forget(chunk)

    def wait_for_fetch(self, chunk: int) -> None:
        """Until no copy reads the chunk's home any more."""
        if chunk in self._flight.fetches:
            self._flight.fetches[chunk].settle()

    def forget_slot(self, chunk: int) -> None:
        """There are new values at home: a copy in a slot is stale."""
        if self.chunks.placed[chunk].is_streamed and self.chunks.param_copies[chunk].state is Residency.CLEAN:
            self.performer.evict(chunk)

    def settle(self) -> None:
        """Until nothing is under way, and every gradient is at home. A pass that has begun is given up."""
        self.abandon()
        self.wait_for_updates()
        self._settle_slots()
        if self._owes_step:
            self._use_up_gradients()
        for ticket in self._flight.exits.values():
            self._flight.wait(ticket, Lane.D2H)
        for ticket in [] if self._rings is None else self._rings.under_way():
            self._flight.wait(ticket, Lane.DISK_READ)
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
                self.gradients.harvest(chunk, is_final=not self._final)
                copy.move(self._summed_state(chunk))
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
        if not exists:
            self._num_backwards = 0
        if self._update is Update.IN_BACKWARD and (self._owes_step or (exists and not self._num_backwards)):
            missing = "optimizer.step()" if self._owes_step else self._zeroing()
            raise Refused(
                f"backward() came again without {missing} since the last one, but this model was wrapped with "
                "update='in_backward': the promise of one step per backward. Wrap with update='deferred' (the "
                "default) to "
                "accumulate over several backwards or to skip steps."
            )
        current.backward_begun = current.is_going_back = True
        self.performer.updated.clear()
        program = self._program(exists) if self._accumulate > 1 or not exists else self.programs[Mode.ACCUMULATE]
        if program is not current.program:
            current.load(program)
        if exists:
            self._issue(current.cursor - 1)
        self._owes_step = self.gradients.are_used_up = self._update is Update.IN_BACKWARD and program.mode.ends_step
        if self._num_backwards == self._accumulate:
            self._tell(f"a backward followed {self._num_backwards}")
        self._num_backwards += 1

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
        self._moment = None
        progress = True
        while progress:
            progress = False
            for pending in current.pending:
                while pending and pending[0].opens <= left and self._may_issue(current, pending[0]):
                    self._submit(current, pending.popleft())
                    progress = True

    def _may_issue(self, current: Pass, action: Action) -> bool:
        """The user may change a sum of earlier passes until backward begins. Which rows are looked up is known when the
        block is called."""
        if action.op is Op.LOOK_UP and action.tick >= current.cursor and action.id not in current.works:
            return False
        is_sum = action.op in (Op.FETCH, Op.READ) and action.kind is ChunkKind.GRAD
        waits = is_sum and not current.is_going_back
        return not waits and current.has_issued(action.after)

    def _submit(self, current: Pass, action: Action) -> None:
        flight, tickets, lane = self._flight, current.tickets, action.lane
        after = [tickets[name] for name in action.after]
        after += [flight.latest[name] for name in action.after_prev if name in flight.latest]
        is_of_rows = action.op is Op.WRITE_BACK and action.chunk in self.chunks.tables
        if (
            action.op is Op.UPDATE or is_of_rows
        ):  # it may have left off the plan, and a copy may still be reading what it writes
            earlier = (flight.exits.get(action.chunk), flight.fetches.get(action.chunk))  # type: ignore[arg-type]
            after += [ticket for ticket in earlier if ticket is not None]
        if action.op is Op.UPDATE and self.performer.saving is not None:  # see [Note: copy on update]
            after += self.performer.saving.owed()
        is_of_sum = action.op in (Op.READ, Op.FETCH) and action.kind is not ChunkKind.PARAM
        if self._rings is not None and is_of_sum and action.chunk in flight.exits:  # it may have left off the plan
            after.append(flight.exits[action.chunk])
        spots = [] if self._rings is None else self._rings.spots(action)
        if self._rings is not None and spots:  # see [Note: what is in a buffer] in chunks/rings.py
            after = list(dict.fromkeys((*after, *self._rings.users(spots))))
        work = self._work(current, action)
        if not lane.on_host:
            # Inputs may have been copied together just now; and where torch fills new memory (deterministic
            # algorithms), that is compute's work too.
            if self._moment is None or action.op in (Op.STASH, Op.UNSTASH):
                self._moment = flight.moment()
            after += self._moment
        ticket = tickets[action.id] = self.lanes.submit(action.id, lane, action.tick, after, work)
        self._remember(action, ticket)
        if self._rings is not None and spots:
            self._rings.used_by(action, spots, ticket)

    def _work(self, current: Pass, action: Action) -> LaneWork:
        """A pass without a backward that adds to gradients (torch.autograd.grad) uses no sums up. One that stays leaves
        as planned if its block has added to it in this pass; else a later backward may still do so, and it has until
        the step."""
        if action.op is Op.UPDATE and not current.backward_begun:
            return nothing
        if action.op is not Op.UPDATE and action.chunk in self.chunks.tables:
            return current.works.pop(action.id, nothing)
        if action.chunk in self._staying:
            if action.op is Op.WRITE_BACK and action.chunk not in current.summed:
                return nothing
            if action.op is Op.UPDATE and self.chunks.grad_copies[action.chunk].state is Residency.DIRTY:
                return nothing
        return self.performer.prepare(action)

    def _remember(self, action: Action, ticket: Ticket) -> None:
        if action.id in self._outlasting:
            self._flight.latest[action.id] = ticket
        if action.op is Op.UPDATE and action.chunk is not None:
            self._flight.updates[action.chunk] = ticket
        elif action.op is Op.FETCH and action.chunk is not None:
            flight = self._flight
            (flight.fetches if action.kind is ChunkKind.PARAM else flight.gradient_fetches)[action.chunk] = ticket
        elif action.op is Op.READ and action.chunk is not None and action.kind is not None:
            self._flight.reads[action.chunk, action.kind] = ticket
            if self._pass is not None:
                self._pass.buffers[action.id] = action.target
        elif action.op is Op.WRITE and action.chunk is not None:
            is_grad = action.kind is ChunkKind.GRAD
            (self._flight.exits if is_grad else self._flight.stored)[action.chunk] = ticket
        elif action.op in (Op.WRITE_BACK, Op.SUM) and action.chunk is not None:
            is_sum = action.op is Op.SUM or action.chunk not in self.chunks.tables
            (self._flight.exits if is_sum else self._flight.rows)[action.chunk] = ticket
        elif action.op in (Op.STASH, Op.UNSTASH, Op.READ, Op.WRITE) and action.call is not None:
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
        work = self._work(current, action)
        began = self.lanes.begin_inline()
        if action.op is Op.UPDATE:  # nothing else allocates
            with self.chunks.gpu.meter("updates"):
                work()
        else:
            work()
        self.lanes.record_inline(action.id, began)
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
            if chunk in self._flight.updates:  # the lane says with `stale` that there are newer values at home
                self._flight.wait(self._flight.updates[chunk], Lane.CPU)
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
        self._check_update(chunk, block)
        place = self.chunks.placed[chunk]
        if place.leaves or place.in_grad_slot:
            self._flight.wait_for_gradients([chunk])
            if copy.state is Residency.LEAVING:
                self._flight.wait(self._flight.exits[chunk], Lane.D2H)
            if copy.state is Residency.ABSENT:
                self._demands.gradient(chunk)
        elif copy.state is Residency.ABSENT:
            copy.move(Residency.CLEAN)  # its own place; the ledger clears what is not valid
        copy.move(Residency.HELD)
        self.gradients.bind(chunk, block)

    def _check_update(self, chunk: int, block: int) -> None:
        if self._update is Update.IN_BACKWARD and chunk in self.performer.updated:
            raise Refused(
                f"block {self._names[block]!r} ran backward again after its update, but this model was wrapped with "
                "update='in_backward': the promise of one backward per step. Wrap with update='deferred' (the default)."
            )

    def _release_gradient(self, chunk: int, tick: Tick) -> None:
        assert self._pass is not None
        self._pass.summed.add(chunk)
        self.gradients.harvest(chunk, self._is_final(chunk, tick))
        self.chunks.grad_copies[chunk].move(self._summed_state(chunk))

    def _is_final(self, chunk: int, tick: Tick) -> bool:
        """Whether no later tick of the step adds to the gradient."""
        if not self._final:
            return True
        assert self._pass is not None
        return self._pass.program.mode.ends_step and tick.index is not None and self._final.get(chunk) == tick.index

    def _summed_state(self, chunk: int) -> Residency:
        """Of a gradient on the GPU that was added to."""
        place = self.chunks.placed[chunk]
        return Residency.DIRTY if place.leaves or place.in_grad_slot else Residency.CLEAN
