"""The interface by which the runtime asks an optimizer for updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.schedule.lane_work import LaneWork


class Updates(Protocol):
    """The optimizer's side of an UPDATE."""

    @property
    def kernel(self) -> str:
        """What computes updates on the host: "c" or "torch"."""

    @property
    def moment(self) -> tuple[int, bool]:
        """Number of steps so far, and whether updates of one were issued that has not ended."""

    def prepare(self, chunk: int, in_parts: bool) -> tuple[LaneWork, LaneWork | None] | None:
        """Called in the user's thread when the update is issued: copies hyper-parameters by value. None: nothing to
        do. `in_parts`: the second may be left for later, and must be done then; else there is none. See [Note: states
        later] in optim/chunk_updates.py."""

    def begin_saving(self) -> Callable[[str], bool]:
        """What users have written to copies of states goes to its place. Returns what tells whether a parameter has
        states. Refuses where a part of a step's updates has run."""

    def move_to(self, chunks: Chunks) -> None:
        """Where the states are now."""

    def close(self) -> None:
        """Lets go of the stores' memory: the optimizer may be around for longer."""
