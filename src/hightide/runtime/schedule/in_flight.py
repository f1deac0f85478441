"""The one home of what lanes have under way: the latest work on each chunk, and how long compute waited for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from hightide.ir.action import ActionKey
from hightide.ir.tier import ChunkKind, Lane
from hightide.runtime.lanes.lanes import Lanes
from hightide.stores.ticket import Ticket

LaneWork = Callable[[], object]  # what an action leaves for its lane; a number that it returns is of bytes moved


def nothing() -> None:
    """An action that the model's path through this pass made unnecessary."""


class Tickets:
    """By chunk, the latest of each kind."""

    def __init__(self) -> None:
        self.fetches: dict[int, Ticket] = {}
        self.gradient_fetches: dict[int, Ticket] = {}
        self.exits: dict[int, Ticket] = {}  # write-backs of gradients
        self.updates: dict[int, Ticket] = {}
        self.settled: dict[int, Ticket] = {}  # states that are written after parameters
        self.stored: dict[int, Ticket] = {}  # of chunks on disk: when what their update has changed is written there
        self.reads: dict[tuple[int, ChunkKind], Ticket] = {}  # from disk
        self.rows: dict[int, Ticket] = {}  # copies of gradients of rows to the host; their sums are `exits`
        self.latest: dict[ActionKey, Ticket] = {}  # actions of earlier passes that satisfy `after_prev`

    def forget(self) -> None:
        """Nothing is under way, and chunks are others now."""
        arriving, leaving = (self.fetches, self.gradient_fetches), (self.exits, self.rows)
        for tickets in (*arriving, *leaving, self.updates, self.settled, self.stored):
            tickets.clear()
        self.reads.clear()
        self.latest.clear()

    def changes(self, chunk: int) -> list[Ticket]:
        """What makes the values of a chunk others, at home."""
        found = (self.updates.get(chunk), self.settled.get(chunk), self.stored.get(chunk))
        return [ticket for ticket in found if ticket is not None]

    def reads_of(self, chunk: int) -> list[Ticket]:
        """From disk, of any kind."""
        found = (self.reads.get((chunk, kind)) for kind in ChunkKind)
        return [ticket for ticket in found if ticket is not None]


class InFlight(Tickets):
    """Shared by what runs on the plan, what runs off it, and gradients that are read or changed at home."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self.lanes, self._state = lanes, lanes.state
        self.stall_s: dict[Lane, float] = defaultdict(float)  # how long compute waited for each lane
        self.num_waits = 0  # compute has begun so many
        self.is_waiting = False  # now

    def wait(self, ticket: Ticket, lane: Lane) -> None:
        """A failure of any lane is raised here, however long ago this ticket was done."""
        if ticket.done and ticket.fence is None and ticket.error is None and self._state.failure is None:
            return
        self.num_waits += 1
        self.is_waiting = True
        try:
            self.stall_s[lane] += self.lanes.wait(ticket, lane)
        finally:
            self.is_waiting = False

    def wait_for_gradients(self, chunks: list[int]) -> None:
        """A planned fetch takes its slot on its lane; off the plan the block may come before it."""
        for chunk in chunks:
            if chunk in self.gradient_fetches:
                self.wait(self.gradient_fetches[chunk], Lane.H2D)

    def moment(self) -> list[Ticket]:
        """What compute has enqueued so far. A copy that is issued now may use memory that compute is still about to
        leave; so it stands behind that. The host's work does not."""
        fence = self.lanes.streams.fence()
        return [] if fence is None else [Ticket.completed("compute so far", fence=fence)]
