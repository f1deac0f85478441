"""Off the plan: what a block needs that no schedule brings. Slower, with one warning, never wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

from hightide.ir.action import ActionKey, Op
from hightide.ir.refusal import Refused
from hightide.ir.tier import ChunkKind, Lane
from hightide.runtime.chunks.residency import Residency
from hightide.runtime.schedule.in_flight import InFlight
from hightide.runtime.schedule.performer import LaneWork, Performer
from hightide.stores.ticket import Ticket

OFF_PLAN = (
    "block {name!r} was called in an order that the plan did not foresee (or more often). It is fetched on demand "
    "from now on: "
    "slower, but right. If this is how your model always runs, wrap it with an example batch that takes this path."
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

    # -- parameters -----------------------------------------------------------------------------------------------

    def fetch(self, chunk: int, next_use: Callable[[int], float], last_use: Callable[[int], float]) -> None:
        """`next_use` and `last_use` of a chunk decide who makes room."""
        table = self._chunks.param_slots
        states = {other: self._chunks.param_copies[other].state for other in table.everyone()}
        pinned = {other for other, state in states.items() if state is Residency.HELD}
        arriving = {other for other, state in states.items() if state is Residency.ARRIVING}
        slot = table.window_for(chunk, next_use, last_use, pinned | arriving)
        if slot is None:
            for other in arriving:
                self._flight.wait(self._flight.fetches[other], Lane.H2D)
            slot = table.window_for(chunk, next_use, last_use, pinned)
        if slot is None:
            raise Refused(
                f"chunk {chunk} needs {self._num_slots(chunk)} free consecutive slots; "
                f"the chunks {sorted(pinned)} are in use. Raise num_slots in the plan."
            )
        ticket = self._submit("fetch", Lane.H2D, chunk, self._performer.fetch_param(chunk, slot))
        self._flight.fetches[chunk] = ticket  # before it is awaited: an interrupt may end the wait
        self._flight.wait(ticket, Lane.H2D)

    def refresh(self, chunk: int) -> None:
        self._flight.wait(self._submit("refresh", Lane.H2D, chunk, self._performer.refresh(chunk)), Lane.H2D)

    # -- gradients ------------------------------------------------------------------------------------------------

    def gradient(self, chunk: int) -> None:
        """A slot for a gradient that the plan did not foresee: dirty ones leave until there is room."""
        if self._chunks.placed[chunk].stays:
            return self._bring_gradient(chunk, None)
        table = self._chunks.grad_slots
        self._flight.wait_for_gradients(list(self._flight.gradient_fetches))  # a queued one would take the room
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

    def _bring_gradient(self, chunk: int, slot: int | None) -> None:
        fetch = partial(self._performer.fetch_gradient, chunk, slot)
        ticket = self._flight.gradient_fetches[chunk] = self._submit("gradient", Lane.H2D, chunk, fetch)
        self._flight.wait(ticket, Lane.H2D)

    def send_away(self, chunk: int) -> None:
        """A gradient without a home is used up: its update is due anyway."""
        if self._chunks.placed[chunk].is_used_up:
            self.update(chunk)
        else:
            self.write_back(chunk)

    def write_back(self, chunk: int) -> None:
        ticket = self._submit("write_back", Lane.D2H, chunk, self._performer.write_back(chunk))
        self._flight.exits[chunk] = ticket

    def add_rows(self, chunk: int, send: LaneWork, add: LaneWork) -> None:
        """To a table's gradient, on the host."""
        flight, self._count = self._flight, self._count + 1
        earlier = [ticket[chunk] for ticket in (flight.exits, flight.updates) if chunk in ticket]
        leaves = flight.lanes.submit(
            f"demand.rows.{chunk}.{self._count}", Lane.D2H, 0, [*earlier, *flight.moment()], send
        )
        flight.rows[chunk] = leaves
        flight.exits[chunk] = flight.lanes.submit(
            f"demand.sum.{chunk}.{self._count}", Lane.CPU, 0, [*earlier, leaves], add
        )

    def update(self, chunk: int) -> None:
        flight = self._flight.fetches.get(chunk)  # a copy may still be reading what the update writes
        earlier = (self._flight.exits.get(chunk), *self._flight.changes(chunk), flight, *self._flight.reads_of(chunk))
        after = [ticket for ticket in earlier if ticket is not None]
        if self._performer.saving is not None:  # see [Note: copy on update]
            after += self._performer.saving.owed()
        work = self._performer.update(chunk)
        name = ActionKey(Op.UPDATE, chunk)
        if self._chunks.placed[chunk].is_updated_on_gpu:
            with self._chunks.gpu.meter("updates"):
                self._flight.lanes.run_inline(name, work)
            return
        ticket = self._flight.lanes.submit(name, Lane.CPU, 0, after, work)
        self._flight.latest[name] = self._flight.updates[chunk] = ticket
        if self._chunks.disk is not None and chunk in self._chunks.disk:  # it writes what it has changed by itself
            self._flight.latest[ActionKey(Op.WRITE, chunk, ChunkKind.STATE)] = self._flight.stored[chunk] = ticket

    def _submit(self, what: str, lane: Lane, chunk: int, work: LaneWork) -> Ticket:
        self._count += 1
        after = self._flight.changes(chunk)
        if what in ("gradient", "write_back") and chunk in self._flight.exits:  # what left before may not be home yet
            after.append(self._flight.exits[chunk])
        if what == "write_back":  # to where it may still be read from
            after += self._flight.reads_of(chunk)
        after += self._flight.moment()
        return self._flight.lanes.submit(f"demand.{what}.{chunk}.{self._count}", lane, 0, after, work)

    def _num_slots(self, chunk: int) -> int:
        return self._chunks.placed[chunk].num_slots
