"""UPDATE and SETTLE: the optimizer's update of a chunk, once all that reads its values before is through. As in
performer.py, an update is prepared in the user's thread when it is issued, and the work runs on its lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.residency import Residency
from hightide.runtime.lanes.update_threads import RunInThreads
from hightide.runtime.saving.copy_on_update import CopyOnUpdate
from hightide.runtime.schedule.disk_performer import DiskPerformer
from hightide.runtime.schedule.in_flight import LaneWork, nothing


class Updates(Protocol):
    """The optimizer's side of an UPDATE: how the runtime asks for it."""

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


class UpdatePerformer:
    def __init__(
        self, chunks: Chunks, disk: DiskPerformer | None, in_threads: RunInThreads, drop_gradient: Callable[[int], None]
    ) -> None:
        self._chunks, self._disk, self._in_threads, self._drop_gradient = chunks, disk, in_threads, drop_gradient
        self.updates: Updates | None = None  # set by the optimizer
        self._unsettled: dict[int, LaneWork] = {}  # by chunk, what its planned update leaves for SETTLE
        self._saving: CopyOnUpdate | None = None
        self.num_updates: Counter[int] = Counter()  # issued, per chunk
        self.updated: set[int] = set()  # chunks whose update was issued since the last backward began, or step

    def update(self, chunk: int, is_planned: bool = False) -> LaneWork:
        assert self.updates is not None, "a schedule with updates needs an optimizer"
        place = self._chunks.placed[chunk]
        used_up = place.is_used_up
        if used_up and self._chunks.grad_slots.first(chunk) is None:
            return nothing
        prepared = self.updates.prepare(chunk, in_parts=is_planned and place.settles)
        if prepared is None:
            return (lambda: self._drop_gradient(chunk)) if used_up else lambda: self._chunks.unpark(chunk)
        apply, states = prepared
        if states is not None:
            self._unsettled[chunk] = states
        if self._saving is not None:
            apply = self._saved_first(chunk, apply)
        if self._disk is not None and (self._disk.has_states(chunk) or place.passes_ring):
            apply = self._disk.updating(chunk, apply, is_planned)
        self.updated.add(chunk)
        self.num_updates[chunk] += 1
        home = self._chunks.home_copies[chunk]

        def work() -> None:
            home.move(Residency.HELD)
            apply()
            home.move(Residency.CLEAN)
            self._chunks.stale[chunk] = not place.is_updated_on_gpu
            if used_up:
                self._drop_gradient(chunk)
            self._chunks.unpark(chunk)

        return work

    def settle(self, chunk: int) -> LaneWork:
        return self._unsettled.pop(chunk, nothing)

    @property
    def unsettled(self) -> list[int]:
        """Chunks of which an update was issued whose second part was not."""
        return list(self._unsettled)

    @property
    def saving(self) -> CopyOnUpdate | None:
        """Values that somebody still reads: who changes them asks here first."""
        if self._saving is not None and self._saving.is_over:
            self._saving.close()
            self._saving = None
        return self._saving

    @saving.setter
    def saving(self, saving: CopyOnUpdate) -> None:
        self._saving = saving

    def _saved_first(self, chunk: int, apply: LaneWork) -> LaneWork:
        """The update, once the chunk's values before it are read or copied."""
        saving = self.saving
        if saving is None:
            return apply
        on_gpu = self._chunks.placed[chunk].is_updated_on_gpu

        def work() -> None:
            if on_gpu:
                saving.secure(chunk)
            else:
                saving.secure(chunk, self._chunks.update_arrays(chunk), self._in_threads)
            apply()

        return work
