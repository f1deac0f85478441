"""The interpreter of schedules.

The model drives: autograd calls `enter` and `leave` around every block. On enter the executor finds the tick, runs
what must precede it and waits for this tick's dependencies only; on leave it issues every action that the tick
opened (issuer.py). Its only freedoms: a lane's stated picking rule, and fetching on demand (demand.py) when the model
leaves the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hightide.ir.action import ActionKey, Mode, Op, Schedule
from hightide.ir.plan import Update
from hightide.ir.refusal import Refused
from hightide.ir.tier import Lane
from hightide.planner.predict.save_forecast import update_order
from hightide.runtime.chunks.residency import Residency
from hightide.runtime.lanes.lanes import Begun
from hightide.runtime.schedule.demand import Demands
from hightide.runtime.schedule.home_waits import HomeWaits
from hightide.runtime.schedule.in_flight import InFlight
from hightide.runtime.schedule.in_use import InUse
from hightide.runtime.schedule.issuer import Issuer
from hightide.runtime.schedule.performer import Performer
from hightide.runtime.schedule.program import Pass, Program
from hightide.runtime.schedule.promises import Promises
from hightide.runtime.schedule.ranked_pass import RankedPass
from hightide.shard.watchman import Watchman


@dataclass
class Tick:
    """A block between enter and leave."""

    op: Op
    block: int
    index: int | None  # in the schedule; None: off the plan
    call: int | None
    began: Begun
    accumulate: bool = False


class Executor(HomeWaits):
    def __init__(
        self,
        schedules: Mapping[Mode, Schedule],
        flight: InFlight,
        performer: Performer,
        update: Update,
        names: list[str],
        accumulate: int = 1,
        watchman: Watchman | None = None,
    ) -> None:
        """`accumulate`: backwards that the user has promised before each step. `watchman`: of several ranks."""
        super().__init__(flight, performer)
        self.programs = {mode: Program(schedule) for mode, schedule in schedules.items()}
        self.promises = Promises(self.programs, performer, update, accumulate, names, flight.lanes)
        self.num_deviations = 0
        self._lanes, self._gradients = flight.lanes, performer.gradients
        self._demands = Demands(flight, performer, names)
        self._issuer = Issuer(self.programs.values(), flight, performer)
        self._in_use = InUse(flight, performer, self._demands, self.promises)
        self._ranked: RankedPass | None = None
        if watchman is not None:
            about = (flight, performer, self._demands, self._issuer, self._in_use)
            self._ranked = RankedPass(watchman, *about, update, names)
        self._update = update
        self._optimised = [spec.index for spec in self._chunks.specs if spec.optimised_numel]
        self._staying = [chunk for chunk, place in enumerate(self._chunks.placed) if place.stays]
        self._next_due = 0  # when the first tick of the next pass is due: ticks of all passes before it
        self._pass: Pass | None = None
        self._suspended: Pass | None = None
        self._num_begun = 0
        self._was_abandoned = False  # the latest pass

    def go_on(self, before: Executor) -> None:
        """With what counts whatever the plan."""
        self.num_deviations = before.num_deviations
        self._demands.has_warned = before._demands.has_warned
        self.promises.go_on(before.promises)

    # -- a pass begins --------------------------------------------------------------------------------------------

    def begin(self, mode: Mode) -> None:
        """Begins a pass, of training or of evaluation. Slots are empty, but for what a pass of the same step has left
        in them."""
        self._lanes.check()
        if self._was_abandoned or (self._pass is not None and self._pass.is_cut_off):
            self._lanes.drain()  # what it has still under way would take slots later, and leave in the new pass
            self._was_abandoned = False
        if not mode.trains and self.is_training and self._suspended is None:
            self._suspended = self._pass  # evaluation between forward and backward; backward goes on with this one
        elif mode.trains:
            self._suspended = None
        program = self.promises.program() if mode.trains else self.programs[mode]
        self._empty_slots(() if self.promises.owes_step else program.schedule.standing)  # updates have made them stale
        self._lanes.begin_pass()
        self._pass = Pass(program, self._next_due)
        if self._ranked is not None:
            self._ranked.count("forward" if mode.trains else "evaluation", is_evaluating=not mode.trains)
        self._next_due += len(program.ticks)
        if mode.trains:
            self._gradients.begin_pass()
            self._performer.stashes.begin_pass()
            self._unpark()
            if self._rings is not None:
                self._rings.drop()  # what a pass that was given up has read ahead

    def _unpark(self) -> None:
        """Gradients of a backward that was cut off, which the user has dropped since: no update takes their place."""
        for chunk in self._chunks.parked:
            update = self._flight.updates.get(chunk)
            if not self._gradients.has_gradient(chunk) and (update is None or update.done):
                self._chunks.unpark(chunk)

    def start(self) -> None:
        """Hands out what need not wait for the first tick. Not before the batch is on its way: one engine copies
        everything to the GPU, in turn, and the first block would wait for the fetches of many others."""
        assert self._pass is not None
        self._issuer.open(self._pass, -1)

    @property
    def is_training(self) -> bool:
        return self._pass is not None and self._pass.program.mode.trains

    def expects(self, mode: Mode, block: int) -> bool:
        """Whether the present pass is of this kind and still has a forward of this block to come."""
        current = self._pass
        if current is None or current.program.mode.trains != mode.trains:
            return False
        return current.program.find_forward(block, current.cursor) is not None

    def _empty_slots(self, standing: Sequence[tuple[int, int]] = ()) -> None:
        """`standing`: parameters that stay where they are."""
        slots, copies = self._chunks.param_slots, self._chunks.param_copies
        for chunk in slots.everyone():
            if copies[chunk].state is Residency.ARRIVING:  # left over from an abandoned pass
                self._flight.wait(self._flight.fetches[chunk], Lane.H2D)
            if (chunk, slots.first(chunk)) in standing:
                continue
            if copies[chunk].state is Residency.CLEAN:
                copies[chunk].move(Residency.ABSENT)
            if copies[chunk].state is Residency.ABSENT:
                slots.drop(chunk)
        copies = self._chunks.grad_copies
        for chunk in self._chunks.grad_slots.everyone():  # a backward that ended with an exception
            if copies[chunk].state is Residency.ARRIVING:
                self._flight.wait(self._flight.gradient_fetches[chunk], Lane.H2D)
            if copies[chunk].state in (Residency.CLEAN, Residency.DIRTY):
                self._demands.send_away(chunk)

    # -- ticks ----------------------------------------------------------------------------------------------------

    def enter(self, op: Op, block: int, call: int | None = None, accumulate: bool = False) -> Tick:
        """Makes a block ready to compute: its parameters bound and, for an accumulating backward, its gradients."""
        self._lanes.check()
        if op is Op.BACKWARD:
            self._resume()
        current = self._pass
        if current is None:
            raise Refused("a block ran outside of a pass; call the model that hightide.wrap returned")
        if self._ranked is not None:
            self._ranked.enter(op, block, current.program.mode)
        if accumulate and not current.backward_begun:
            self._begin_backward(current)
        elif op is Op.BACKWARD and not current.is_going_back:
            current.is_going_back = True
            self._issuer.issue(current, current.cursor - 1)
        elif accumulate and current.backward_ended:
            self._gradients.any_valid()  # another backward through the same pass
            current.backward_ended = False
            self.promises.uses_up(current.program)
        if op is Op.FORWARD:
            index = current.program.find_forward(block, current.cursor)
        else:
            index = current.program.find_backward(call, current.cursor)
        if index is None:
            self.num_deviations += 1
            self._demands.warn(block)
        else:
            if current.cursor < index:
                self._skip_to(current, index)
            self._issuer.run_before(current, index, accumulate)
            call = current.program.ticks[index].call
        self._in_use.take(current, block, accumulate)
        return Tick(op, block, index, call, self._lanes.begin_inline(self._gpu_bytes), accumulate)

    def leave(self, tick: Tick) -> None:
        current = self._pass
        assert current is not None
        self._in_use.release(current, tick.block, tick.index, tick.accumulate)
        if tick.index is not None:
            self._lanes.record_inline(current.program.ticks[tick.index].id, tick.began, self._gpu_bytes)
            if self._ranked is not None:
                self._ranked.agree_in_backward(current, tick.index)
            self._issuer.complete(current, tick.index)
        elif tick.accumulate:  # no write-back is planned; what stays has until the step
            self._send_away(chunk for chunk in self._chunks.by_block[tick.block] if chunk not in self._staying)

    def begin_backward(self) -> None:
        """Of all blocks that are trained, though the first that runs is not."""
        self._resume()
        if self._pass is not None and not self._pass.backward_begun:
            self._begin_backward(self._pass)

    def _resume(self) -> None:
        """The pass whose backward an evaluation has kept waiting."""
        if self._suspended is not None:
            self._pass, self._suspended = self._suspended, None

    def _begin_backward(self, current: Pass) -> None:
        program, exists = self.promises.begin_backward()
        current.backward_begun = current.is_going_back = True
        self._performer.updating.updated.clear()
        if program is not current.program:
            current.load(program)
        if exists:
            self._issuer.issue(current, current.cursor - 1)

    def _skip_to(self, current: Pass, index: int) -> None:
        """Passes over planned ticks that the model did not run (layer drop). Their transfers run as planned, so that
        the slots stay as the plan thinks they are; what has nothing to act on does nothing."""
        while current.cursor < index:
            self.num_deviations += 1
            for action in current.program.before_tick[current.cursor]:
                if action.op is Op.UPDATE:
                    self._issuer.run_inline(current, action)
            if self._ranked is not None:
                self._ranked.pass_over(current, current.cursor)
            self._issuer.complete(current, current.cursor)

    def _gpu_bytes(self) -> int:
        """Asked for only while a recording is on."""
        return self._chunks.gpu.device_used_bytes

    def _send_away(self, chunks: Iterable[int]) -> None:
        """Their gradients, if anything was added to them."""
        for chunk in chunks:
            if self._chunks.grad_copies[chunk].state is Residency.DIRTY:
                self._demands.send_away(chunk)

    # -- tables on the host ---------------------------------------------------------------------------------------

    def look_up(self, tick: Tick, chunk: int, ids: Tensor, into: Tensor) -> None:
        """Rows of a table, which are on the GPU for whatever compute enqueues from now on. Inside its tick."""
        self.wait_for_update(chunk)
        copy, current = self._performer.look_up(chunk, ids, into), self._pass
        assert current is not None
        name = ActionKey(Op.LOOK_UP, tick.call)
        if tick.index is not None:
            current.works[name] = copy
            self._issuer.issue(current, tick.index - 1)
        if tick.index is not None and name in current.tickets:
            self._issuer.wait(current, name)
        else:
            current.works.pop(name, None)
            copy()
        self._chunks.tables[chunk].arriving = None

    def add_rows(self, tick: Tick, chunk: int, ids: Tensor, gradients: Tensor, padding: int | None) -> None:
        """To the gradient of a table. Inside its tick."""
        current = self._pass
        assert current is not None
        self.promises.check_update(chunk, tick.block)
        if chunk in self._flight.rows:  # they would be overwritten on the GPU
            self._flight.wait(self._flight.rows[chunk], Lane.D2H)
        is_final = self.promises.is_final(chunk, current, tick.index)
        works = self._performer.add_rows(chunk, ids, gradients, padding, is_final)
        current.summed.add(chunk)
        if tick.index is None:
            self._demands.add_rows(chunk, *works)
        else:
            at = current.program.ticks[tick.index].id
            names = (ActionKey(Op.WRITE_BACK, chunk, at=at), ActionKey(Op.SUM, chunk, at=at))
            current.works.update(zip(names, works, strict=True))

    # -- a pass ends ----------------------------------------------------------------------------------------------

    def finish_backward(self) -> bool:
        """At the end of autograd's backward: planned ticks that were not run are passed over, no gradient stays
        behind. Returns whether it was one that adds to gradients: ranks have met, then."""
        if self._pass is None or not self._pass.backward_begun:
            return False
        step = self._pass.program.step_tick
        if step is not None:
            self._skip_to(self._pass, step)
        self._send_away(self._chunks.grad_slots.everyone())
        if self._ranked is not None:
            self._ranked.count("backward")
            self._ranked.average_the_rest(self._pass)
        self._gradients.end_backward()
        self._pass.backward_ended = True
        self.promises.end_backward()
        if self.promises.has_kept_backward:
            self._chunks.binding.hide_updated()
        return True

    def step(self) -> None:
        """The user's optimizer.step(). Chunks with a gradient that no planned update covers run on demand."""
        self._lanes.check()
        try:
            self._step()
        finally:  # one that was refused in the middle of it, by a gradient that cannot be used
            for chunk in self._performer.updating.unsettled:
                self._demands.settle(chunk)

    def _step(self) -> None:
        if self._update is Update.DEFERRED:
            self._performer.updating.updated.clear()
        self.promises.begin_step(self._leftovers)
        self._send_away(self._chunks.grad_slots.everyone())  # a backward that ended with an exception has left some
        if self._ranked is not None:
            self._ranked.begin_step(self.promises.owes_step)
        self._send_away(self._staying)  # it comes earlier than was promised, or its last pass left out a block
        current = self._pass
        step = None if current is None else current.program.step_tick
        if current is not None and step is not None and current.cursor <= step and current.backward_begun:
            self._skip_to(current, step)
            self._issuer.run_before(current, step, accumulate=True)
            began = self._lanes.begin_inline(self._gpu_bytes)
            self._lanes.record_inline(current.program.ticks[step].id, began, self._gpu_bytes)
            self._issuer.complete(current, step)
        for chunk in self._leftovers():
            self._demands.update(chunk)
        self.promises.end_step()
        self._chunks.binding.show_updated()
        self._performer.updating.updated.clear()

    def _leftovers(self) -> list[int]:
        """Chunks with a gradient that no update has used."""
        done, ready = self._performer.updating.updated, self._gradients.ready
        return [chunk for chunk in self._optimised if chunk not in done and ready(chunk)]

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
        self._in_use.release_all()
        if self._pass is None and self._was_abandoned:
            return  # by the block that has failed; whoever called it says so once more
        if self._pass is None or self.is_training:
            self._suspended = None  # an evaluation that fails leaves the forward before it as it is
        self._pass = None
        self._was_abandoned = True

    # -- between passes -------------------------------------------------------------------------------------------

    def update_order(self) -> list[int]:
        """All chunks, in the order in which the next step updates them; those that it does not update are last."""
        ends = next(program for mode, program in self.programs.items() if mode.trains and mode.ends_step)
        return update_order(ends.schedule, len(self._chunks.specs))

    def come_to_rest(self) -> None:
        """Until nothing is under way, and every gradient is at home. A pass that has begun is given up."""
        self.abandon()
        self.wait_for_updates()
        self._empty_slots()
        if self.promises.owes_step:
            self._use_up_gradients()
        for ticket in self._flight.exits.values():
            self._flight.wait(ticket, Lane.D2H)
        for ticket in [] if self._rings is None else self._rings.under_way():
            self._flight.wait(ticket, Lane.DISK_READ)
        self._lanes.drain()

    def _use_up_gradients(self) -> None:
        """The updates of this backward have run, but for a few of the step's (loose parameters have theirs there): what
        `step()` finds afterwards it would take for new."""
        self.promises.give_up_gradients()
        for spec in self._chunks.specs:
            if self._gradients.has_gradient(spec.index):
                if spec.optimised_numel and spec.index not in self._performer.updating.updated:
                    self._demands.update(spec.index)
                self._gradients.drop_chunk(spec.index)
        self.wait_for_updates()
