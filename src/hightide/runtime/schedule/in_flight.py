"""What the lanes owe: the latest transfers of each chunk, and how long compute waited for them."""

from __future__ import annotations

from collections import defaultdict

from hightide.ir.action import ActionKey
from hightide.ir.tier import Lane
from hightide.runtime.lanes.lanes import Lanes
from hightide.stores.ticket import Ticket


class InFlight:
    """Shared by what runs on the plan and what runs off it."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.stall_s: dict[Lane, float] = defaultdict(float)  # how long compute waited for each lane
        self.fetches: dict[int, Ticket] = {}  # the latest fetch of each chunk
        self.gradient_fetches: dict[int, Ticket] = {}
        self.latest: dict[ActionKey, Ticket] = {}  # actions of earlier passes that satisfy `after_prev`

    def wait(self, ticket: Ticket, lane: Lane) -> None:
        self.stall_s[lane] += self.lanes.wait(ticket, lane)

    def wait_for_gradients(self, chunks: list[int]) -> None:
        """A planned fetch takes its slot on its lane; off the plan the block may come before it."""
        for chunk in chunks:
            if chunk in self.gradient_fetches:
                self.wait(self.gradient_fetches[chunk], Lane.H2D)

    def moment(self, lane: Lane) -> list[Ticket]:
        """What compute has enqueued so far. A copy that is issued now may use memory that compute is still about to
        leave; so it stands behind that. The host's work does not."""
        fence = self.lanes.streams.fence() if not lane.on_host else None
        return [] if fence is None else [Ticket.completed("compute so far", fence=fence)]
