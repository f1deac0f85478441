"""Off the plan: what a block needs that no schedule brings. Slower, with one warning, never wrong.

[Note: how far lanes are] Of several ranks all must gather and reduce the same, off the plan too. What each has issued
is the same on all, how far its lanes have come is not: a copy that is still arriving on one rank is there on another.
So what decides who makes room is not asked before lanes have done what they were given.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial

from hightide.ir.action import ActionKey, Op
from hightide.ir.refusal import Refused
from hightide.ir.tier import ChunkKind, Lane
from hightide.runtime.chunks.residency import Residency
from hightide.runtime.gradients.ranked_gradients import RankedGradients
from hightide.runtime.schedule.in_flight import InFlight, LaneWork
from hightide.runtime.schedule.performer import Performer
from hightide.runtime.schedule.program import Pass
from hightide.stores.ticket import Ticket

OFF_PLAN = (
    "block {name!r} was called in an order that the plan did not foresee (or more often). It is fetched on demand from "
    "now on: slower, but right. If this is how your model always runs, wrap it with an example batch that takes this "
    "path."
)


class Demands:
    def __init__(self, flight: InFlight, performer: Performer, names: list[str]) -> None:
        self._flight = flight
        self._performer = performer
        self._chunks, self._gradients = performer.chunks, performer.gradients
        self._names = names
        self._count = 0
        self.has_warned = False

    def warn(self, block: int) -> None:
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(OFF_PLAN.format(name=self._names[block]), stacklevel=2)

    @property
    def _ranked(self) -> RankedGradients:
        assert self._performer.ranked is not None
        return self._performer.ranked

    # -- parameters -----------------------------------------------------------------------------------------------

    def fetch(self, chunk: int, current: Pass, last_uses: Mapping[int, int]) -> None:
        """The next use of a chunk in this pass, and the last, decide who makes room."""

        def next_use(other: int) -> float:
            return current.program.next_use(self._chunks.specs[other].users, current.cursor)

        def last_use(other: int) -> float:
            return last_uses.get(other, -1)

        table = self._chunks.param_slots
        if self._performer.ranked is not None:
            self._wait_for_arriving()
        states = {other: self._chunks.param_copies[other].state for other in table.everyone()}
        pinned = {other for other, state in states.items() if state is Residency.HELD}
        arriving = {other for other, state in states.items() if state is Residency.ARRIVING}
        slot = table.window_for(chunk, next_use, last_use, pinned | arriving)
        if slot is None:
            self._wait_for_arriving()
            slot = table.window_for(chunk, next_use, last_use, pinned)
        if slot is None:
            name = self._names[self._chunks.specs[chunk].block]
            raise Refused(
                f"the plan has no room on the GPU for {name!r} (chunk {chunk}): it needs {table.width(chunk)} free "
                f"consecutive slots, and the chunks {sorted(pinned)} are in use. If the example batch did not call it, "
                "wrap the model with one that does; or raise num_slots of the plan"
            )
        place = self._chunks.placed[chunk]
        lane = Lane.GATHER if place.is_gathered else Lane.H2D
        if not (place.is_gathered and place.is_home_on_gpu):
            ticket = self._submit("fetch", Lane.H2D, chunk, self._performer.fetch_param(chunk, slot))
            self._flight.fetches[chunk] = ticket  # before it is awaited: an interrupt may end the wait
        if place.is_gathered:
            self._gather(chunk, slot)
        self._flight.wait(self._flight.fetches[chunk], lane)

    def _wait_for_arriving(self) -> None:
        """See [Note: how far lanes are]."""
        for chunk in self._chunks.param_slots.everyone():
            if self._chunks.param_copies[chunk].state is Residency.ARRIVING:
                self._flight.wait(self._flight.fetches[chunk], Lane.H2D)

    def _gather(self, chunk: int, slot: int | None) -> None:
        """After what was fetched."""
        work = self._performer.gather(chunk, slot)
        self._flight.fetches[chunk] = self._submit("gather", Lane.GATHER, chunk, work)

    def refresh(self, chunk: int) -> None:
        ticket = self._submit("refresh", Lane.H2D, chunk, self._performer.refresh(chunk))
        if self._chunks.placed[chunk].is_gathered:
            self._flight.fetches[chunk] = ticket
            self._gather(chunk, None)
            ticket = self._flight.fetches[chunk]
        self._flight.wait(ticket, Lane.H2D)

    # -- gradients ------------------------------------------------------------------------------------------------

    def gradient(self, chunk: int) -> None:
        """A slot for a gradient that the plan did not foresee: dirty ones leave until there is room."""
        if self._chunks.placed[chunk].is_reduced_home:
            self._ranked.freshen_home(chunk)
        if self._chunks.placed[chunk].stays:
            return self._bring_gradient(chunk, None)
        table = self._chunks.grad_slots
        self._flight.wait_for_gradients(list(self._flight.gradient_fetches))  # a queued one would take the room
        if self._performer.ranked is not None:
            self._wait_for_leaving()
        for _ in range(2):
            slot = table.window_for(chunk, lambda _: 0.0, lambda _: 0.0, set(table.everyone()))
            if slot is not None:
                break
            for other in table.everyone():
                if self._chunks.grad_copies[other].state in (Residency.DIRTY, Residency.CLEAN):
                    self.send_away(other)
                if other in self._flight.exits:
                    self._flight.wait(self._flight.exits[other], Lane.D2H)
        else:
            raise Refused(
                f"the gradient of chunk {chunk} needs {table.width(chunk)} free consecutive grad slots; raise "
                "num_grad_slots in the plan."
            )
        self._bring_gradient(chunk, slot)

    def _wait_for_leaving(self) -> None:
        """See [Note: how far lanes are]."""
        leaving = [
            c for c in self._chunks.grad_slots.everyone() if self._chunks.grad_copies[c].state is Residency.LEAVING
        ]
        self._ranked.wait_for_all(leaving)

    def _bring_gradient(self, chunk: int, slot: int | None) -> None:
        fetch = partial(self._performer.fetch_gradient, chunk, slot)
        if self._chunks.placed[chunk].is_rounded_home:
            self._flight.lanes.run_inline(f"demand.gradient.{chunk}", fetch)
            return
        ticket = self._flight.gradient_fetches[chunk] = self._submit("gradient", Lane.H2D, chunk, fetch)
        self._flight.wait(ticket, Lane.H2D)

    def send_away(self, chunk: int) -> None:
        """A gradient without a home is used up: its update is due anyway."""
        if chunk in self._gradients.unreduced:
            self.reduce(chunk)
        if self._chunks.placed[chunk].is_reduced_home:
            return
        if self._chunks.placed[chunk].is_used_up:
            self.update(chunk)
        else:
            self.write_back(chunk)

    def reduce(self, chunk: int) -> None:
        """Averages it over all ranks."""
        is_loose = self._gradients.has_loose(chunk)
        if is_loose:
            self._ranked.begin_averaging(chunk)
        ticket = self._submit("reduce", Lane.REDUCE, chunk, self._performer.reduce(chunk))
        self._flight.exits[chunk] = ticket
        if is_loose:
            self._flight.wait(ticket, Lane.REDUCE)
            self._ranked.end_averaging(chunk)

    def sum_norms(self) -> Ticket:
        """Of gradients, once they are averaged."""
        self._count += 1
        return self._flight.lanes.submit(
            f"norms.{self._count}", Lane.REDUCE, 0, self._flight.moment(), self._ranked.norms_to_sum()
        )

    def write_back(self, chunk: int) -> None:
        work = self._performer.write_back(chunk)
        if self._chunks.placed[chunk].is_rounded_home:
            self._flight.lanes.run_inline(f"demand.write_back.{chunk}", work)
            return
        ticket = self._submit("write_back", Lane.D2H, chunk, work)
        self._flight.exits[chunk] = ticket

    def add_rows(self, chunk: int, send: LaneWork, add: LaneWork) -> None:
        """To a table's gradient, on the host."""
        flight, self._count = self._flight, self._count + 1
        earlier = [ticket[chunk] for ticket in (flight.exits, flight.updates) if chunk in ticket]
        submit, name = flight.lanes.submit, f"{chunk}.{self._count}"
        leaves = submit(f"demand.rows.{name}", Lane.D2H, 0, [*earlier, *flight.moment()], send)
        flight.rows[chunk] = leaves
        flight.exits[chunk] = submit(f"demand.sum.{name}", Lane.CPU, 0, [*earlier, leaves], add)

    def update(self, chunk: int) -> None:
        flight = self._flight.fetches.get(chunk)  # a copy may still be reading what the update writes
        earlier = (self._flight.exits.get(chunk), *self._flight.changes(chunk), flight, *self._flight.reads_of(chunk))
        after = [ticket for ticket in earlier if ticket is not None]
        if self._performer.updating.saving is not None:  # see [Note: copy on update]
            after += self._performer.updating.saving.owed()
        work = self._performer.updating.update(chunk)
        name = ActionKey(Op.UPDATE, chunk)
        if self._chunks.placed[chunk].is_updated_on_gpu:
            if self._chunks.placed[chunk].is_reduced and chunk in self._flight.exits:
                self._flight.wait(self._flight.exits[chunk], Lane.REDUCE)
            with self._chunks.gpu.meter("updates"):
                self._flight.lanes.run_inline(name, work)
            if self._chunks.placed[chunk].is_gathered_after_update:
                self._gather(chunk, None)
                self._flight.latest[ActionKey(Op.GATHER, chunk)] = self._flight.fetches[chunk]
            return
        ticket = self._flight.lanes.submit(name, Lane.CPU, 0, after, work)
        self._flight.latest[name] = self._flight.updates[chunk] = ticket
        self._flight.latest[ActionKey(Op.SETTLE, chunk)] = ticket  # it has left nothing
        if self._chunks.disk is not None and chunk in self._chunks.disk:  # it writes what it has changed by itself
            self._flight.latest[ActionKey(Op.WRITE, chunk, ChunkKind.STATE)] = self._flight.stored[chunk] = ticket

    def settle(self, chunk: int) -> None:
        """The second part of an update that was issued."""
        name, flight = ActionKey(Op.SETTLE, chunk), self._flight
        ticket = flight.lanes.submit(name, Lane.CPU, 0, flight.changes(chunk), self._performer.updating.settle(chunk))
        flight.latest[name] = flight.settled[chunk] = ticket

    def _submit(self, what: str, lane: Lane, chunk: int, work: LaneWork) -> Ticket:
        self._count += 1
        after = self._flight.changes(chunk)
        if what == "gather" and chunk in self._flight.fetches:
            after.append(self._flight.fetches[chunk])
        if what in ("gradient", "write_back") and chunk in self._flight.exits:  # what left before may not be home yet
            after.append(self._flight.exits[chunk])
        if what == "write_back":  # to where it may still be read from
            after += self._flight.reads_of(chunk)
        after += self._flight.moment()
        return self._flight.lanes.submit(f"demand.{what}.{chunk}.{self._count}", lane, 0, after, work)
