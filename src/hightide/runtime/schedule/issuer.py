"""Actions of a pass on their way to the lanes, in the order of the schedule. Issuing never waits; what runs in the
user's thread does, for its dependencies only."""

from __future__ import annotations

from collections.abc import Iterable

from hightide.ir.action import Action, ActionKey, Op
from hightide.ir.tier import ChunkKind, Lane
from hightide.runtime.chunks.residency import Residency
from hightide.runtime.schedule.in_flight import InFlight, LaneWork, nothing
from hightide.runtime.schedule.performer import Performer
from hightide.runtime.schedule.program import Pass, Program
from hightide.stores.ticket import Ticket

_DONE = Ticket.completed("done in the user's thread")  # one for all: it is done, without a fence


class Issuer:
    def __init__(self, programs: Iterable[Program], flight: InFlight, performer: Performer) -> None:
        self._flight, self._lanes = flight, flight.lanes
        self._performer, self._chunks, self._prepare = performer, performer.chunks, performer.prepare
        self._outlasting = {name for p in programs for a in p.schedule.actions for name in a.after_prev}
        self._staying = {chunk for chunk, place in enumerate(self._chunks.placed) if place.stays}
        self._rings = None if self._chunks.disk is None else self._chunks.disk.rings
        # Of several ranks: chunks whose gradients plain autograd makes, and is through with at the end of backward.
        self._loose = {chunk for chunk in range(len(self._chunks.specs)) if performer.gradients.has_loose(chunk)}
        self._is_alone = not any(place.is_averaged for place in self._chunks.placed)
        self._moment: list[Ticket] | None = None  # what compute had enqueued when issuing began

    def run_before(self, current: Pass, index: int, accumulate: bool, without: Op | None = None) -> None:
        """What must precede a tick; then waits for what the tick needs and no other. `without`: that was done."""
        for action in current.program.before_tick[index]:
            if action.op is without:
                continue
            opens_sum = action.op is Op.CLEAR or (action.op is Op.FETCH and action.kind is ChunkKind.GRAD)
            if accumulate or not opens_sum:  # torch.autograd.grad must not touch parameters' gradients
                self.run_inline(current, action)
        for name in current.program.ticks[index].after:
            if name in current.tickets:
                self.wait(current, name)

    def complete(self, current: Pass, index: int) -> None:
        """A tick has run, or was passed over."""
        current.tickets[current.program.ticks[index].id] = _DONE
        current.cursor = index + 1
        self.open(current, index)

    def open(self, current: Pass, index: int) -> None:
        if not self._is_alone:  # updates wait for what is averaged
            self.issue(current, index)
        for action in current.program.when_open[index]:
            self.run_inline(current, action)
        self.issue(current, index)

    def issue(self, current: Pass, left: int) -> None:
        """Hands every open action to its lane, in the lane's order. An action whose dependency on another lane is
        itself not issued yet holds its lane until it is."""
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
        if action.op is Op.REDUCE and action.chunk in self._loose and not current.is_agreed:
            return False
        if action.kind is ChunkKind.GRAD and action.op in (Op.FETCH, Op.READ) and not current.is_going_back:
            return False
        for name in action.after:  # noqa: SIM110 (asked for every action of every step)
            if name not in current.tickets:
                return False
        return True

    def _submit(self, current: Pass, action: Action) -> None:
        flight, tickets, lane = self._flight, current.tickets, action.lane
        after = [*map(tickets.__getitem__, action.after)]
        for name in action.after_prev:
            if name in flight.latest:
                after.append(flight.latest[name])
        is_of_rows = action.op is Op.WRITE_BACK and action.chunk in self._chunks.tables
        if action.op is Op.UPDATE or is_of_rows:
            # It may have left off the plan, and a copy may still be reading what it writes.
            earlier = (flight.exits.get(action.chunk), flight.fetches.get(action.chunk))  # type: ignore[arg-type]
            after += [ticket for ticket in earlier if ticket is not None]
        if action.op is Op.UPDATE and self._performer.updating.saving is not None:  # see [Note: copy on update]
            after += self._performer.updating.saving.owed()
        is_of_sum = action.op in (Op.READ, Op.FETCH) and action.kind is not ChunkKind.PARAM
        if self._rings is not None and is_of_sum and action.chunk in flight.exits:  # it may have left off the plan
            after.append(flight.exits[action.chunk])
        if action.op is Op.FETCH and action.kind is ChunkKind.GRAD and not self._is_alone:
            after += self._leaving(action)
        spots = [] if self._rings is None else self._rings.spots(action)
        if self._rings is not None and spots:  # see [Note: what is in a buffer] in chunks/rings.py
            after = list(dict.fromkeys((*after, *self._rings.users(spots))))
        work = self._work(current, action)
        if action.op is Op.UPDATE:
            after += self._performer.gradients.awaited_factors()
        if not lane.on_host:
            # Inputs may have been copied together just now; and where torch fills new memory (deterministic
            # algorithms), that is compute's work too.
            if self._moment is None or action.op in (Op.STASH, Op.UNSTASH):
                self._moment = flight.moment()
            after += self._moment
        ticket = tickets[action.id] = self._lanes.submit(action.id, lane, current.first_due + action.tick, after, work)
        self._remember(current, action, ticket)
        if self._rings is not None and spots:
            self._rings.used_by(action, spots, ticket)

    def _leaving(self, action: Action) -> list[Ticket]:
        """What takes sums out of the slot, off the plan: see [Note: how far lanes are] in demand.py."""
        assert action.chunk is not None and action.target is not None
        slot, exits = action.target.slot, self._flight.exits
        there = () if slot is None else (action.chunk, *self._chunks.grad_slots.occupants(slot, action.chunk))
        return [exits[chunk] for chunk in there if chunk in exits]

    def _work(self, current: Pass, action: Action) -> LaneWork:
        """A pass without a backward that adds to gradients (torch.autograd.grad) uses no sums up. One that stays leaves
        as planned if its block has added to it in this pass; else a later backward may still do so, and it has until
        the step."""
        if action.op is Op.UPDATE and not current.backward_begun:
            return nothing
        if action.op is not Op.UPDATE and action.chunk in self._chunks.tables:
            return current.works.pop(action.id, nothing)
        if action.chunk in self._staying:
            if action.op is Op.WRITE_BACK and action.chunk not in current.summed and self._is_alone:
                return nothing
            if action.op is Op.UPDATE and self._chunks.grad_copies[action.chunk].state is Residency.DIRTY:
                return nothing
        return self._prepare[action.op](action)

    def _remember(self, current: Pass, action: Action, ticket: Ticket) -> None:
        flight, op, chunk = self._flight, action.op, action.chunk
        is_param, is_grad = action.kind is ChunkKind.PARAM, action.kind is ChunkKind.GRAD
        if action.id in self._outlasting:
            flight.latest[action.id] = ticket
        if chunk is None:
            stash = None if action.call is None else self._performer.stashes.of(action.call)
            if stash is not None:
                self._performer.stashes.is_moved_by(stash, ticket)
                if op is Op.STASH:
                    current.stashes[action.id] = stash
        elif op is Op.UPDATE:
            flight.updates[chunk] = ticket
        elif op is Op.SETTLE:
            flight.settled[chunk] = ticket
        elif op is Op.GATHER:  # the last that a use waits for
            flight.fetches[chunk] = ticket
        elif op is Op.FETCH:
            (flight.fetches if is_param else flight.gradient_fetches)[chunk] = ticket
        elif op is Op.READ:
            assert action.kind is not None
            flight.reads[chunk, action.kind] = ticket
            current.buffers[action.id] = action.target
        elif op is Op.WRITE:
            (flight.exits if is_grad else flight.stored)[chunk] = ticket
        elif op in (Op.WRITE_BACK, Op.SUM, Op.REDUCE):
            is_of_rows = op is Op.WRITE_BACK and chunk in self._chunks.tables
            (flight.rows if is_of_rows else flight.exits)[chunk] = ticket

    def run_inline(self, current: Pass, action: Action) -> None:
        for name in action.after:
            if name in current.tickets:
                self.wait(current, name)
        for name in action.after_prev:
            if name in self._flight.latest:
                self._flight.wait(self._flight.latest[name], Lane.CPU)
        if action.op is Op.UPDATE and action.chunk in self._flight.exits and not self._is_alone:  # off the plan, too
            self._flight.wait(self._flight.exits[action.chunk], Lane.REDUCE)
        work = self._work(current, action)
        began = self._lanes.begin_inline()
        if action.op is Op.UPDATE:  # nothing else allocates
            with self._chunks.gpu.meter("updates"):
                work()
        else:
            work()
        self._lanes.record_inline(action.id, began)
        current.tickets[action.id] = _DONE
        self._remember(current, action, _DONE)

    def wait(self, current: Pass, name: ActionKey) -> None:
        self._flight.wait(current.tickets[name], current.program.schedule.by_id[name].lane)
        if name in current.stashes:
            self._performer.stashes.let_go(current.stashes.pop(name))
