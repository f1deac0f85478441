"""The effect of each kind of action on bytes. Bookkeeping happens in the user's thread when an action is issued
(`prepare`); the work that it returns runs on the action's lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from hightide.ir.action import Action, Op
from hightide.ir.tier import ChunkKind, Lane
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.residency import Residency
from hightide.runtime.gradients.gradients import Gradients
from hightide.runtime.gradients.ranked_gradients import RankedGradients
from hightide.runtime.lanes.update_threads import RunInThreads
from hightide.runtime.schedule.disk_performer import DiskPerformer
from hightide.runtime.schedule.in_flight import LaneWork, nothing
from hightide.runtime.schedule.update_performer import UpdatePerformer
from hightide.runtime.waiting.activations import Stashes
from hightide.stores.array import Array
from hightide.stores.ticket import Fence

Filled = Callable[[], Array]  # a buffer with its content, for the lane that empties it


class Performer:
    def __init__(
        self,
        chunks: Chunks,
        gradients: Gradients,
        stashes: Stashes,
        fence: Callable[[], Fence | None],
        in_threads: RunInThreads,
    ) -> None:
        """`fence`: this moment in the caller's stream; `in_threads`: runs work of the cpu lane in several threads."""
        self.ranked = gradients if isinstance(gradients, RankedGradients) else None  # of several ranks
        self._fence, self._in_threads = fence, in_threads
        self._left: dict[int, Fence] = {}  # when the latest gradient of each chunk has reached home
        self.chunks = chunks
        self.gradients = gradients
        self.stashes = stashes
        self.moved_bytes: Counter[Lane] = Counter()
        self.num_evictions = 0
        self.prepare: dict[Op, Callable[[Action], LaneWork]] = {
            Op.FETCH: self._fetch,
            Op.EVICT: self._evict,
            Op.CLEAR: self._clear,
            Op.WRITE_BACK: self._write_back,
            Op.STASH: self._stash,
            Op.UNSTASH: self._unstash,
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.UPDATE: self._update,
            Op.SETTLE: self._settle,
            Op.GATHER: self._gather,
            Op.REDUCE: self._reduce,
        }
        self._ungathered: set[int] = set()  # chunks whose slots are reserved, and whose gather is still to be issued
        self._disk: DiskPerformer | None = None
        if chunks.disk is not None:
            self._disk = DiskPerformer(chunks, chunks.disk, gradients, self._count, fence)
        self.updating = UpdatePerformer(chunks, self._disk, in_threads, self.drop_gradient)

    def go_on(self, before: Performer) -> None:
        """With the counters of the plan before, and its updates."""
        self.updating.updates = before.updating.updates
        self.moved_bytes, self.num_evictions = before.moved_bytes, before.num_evictions

    # -- parameters -----------------------------------------------------------------------------------------------

    def _fetch(self, action: Action) -> LaneWork:
        assert action.chunk is not None and action.target is not None
        chunk, slot = action.chunk, action.target.slot
        buffer = None if self._disk is None else self._disk.arriving(action)
        if action.kind is ChunkKind.GRAD:
            is_late = self.ranked is not None and slot is not None and not self._will_be_free(chunk, slot)
            return nothing if is_late else lambda: self.fetch_gradient(chunk, slot, buffer)
        if slot is None:
            return self.refresh(chunk)
        return self.fetch_param(chunk, slot) if buffer is None else self.fetch_param(chunk, slot, buffer)

    def fetch_param(self, chunk: int, slot: int, buffer: Filled | None = None) -> LaneWork:
        """Reserves the slots now; nothing to do if the chunk is there already or the slots are in use (off the plan).
        `buffer`: where its values wait; None: they come from its home."""
        if not self._reserve(chunk, slot):
            return nothing
        copy, is_gathered = self.chunks.param_copies[chunk], self.chunks.placed[chunk].is_gathered

        def work() -> int:
            num_bytes = self._copy_home_to_gpu(chunk, buffer)
            if not is_gathered:
                copy.move(Residency.CLEAN)
            return num_bytes

        return work

    def _reserve(self, chunk: int, slot: int) -> bool:
        """Slots for what arrives, unless it is there already or they are in use."""
        copies, table = self.chunks.param_copies, self.chunks.param_slots
        copy = copies[chunk]
        if copy.state is not Residency.ABSENT or not table.fits(slot, chunk):
            return False
        if others := table.occupants(slot, chunk):
            if any(copies[other].state is not Residency.CLEAN for other in others):
                return False
            for other in others:
                self.evict(other)
        table.take(slot, chunk)
        copy.move(Residency.ARRIVING)
        if self.chunks.placed[chunk].is_gathered:
            self._ungathered.add(chunk)
        return True

    def refresh(self, chunk: int) -> LaneWork:
        """A persistent chunk whose update runs on host gets its new values."""

        def work() -> int:
            if not self.chunks.stale[chunk]:
                return 0
            self.chunks.param_copies[chunk].move(Residency.ARRIVING)
            num_bytes = self._copy_home_to_gpu(chunk)
            if not self.chunks.placed[chunk].is_gathered:
                self.chunks.param_copies[chunk].move(Residency.CLEAN)
                self.chunks.stale[chunk] = False
            return num_bytes

        return work

    def _gather(self, action: Action) -> LaneWork:
        assert action.chunk is not None and action.target is not None
        return self.gather(action.chunk, action.target.slot)

    def gather(self, chunk: int, slot: int | None) -> LaneWork:
        """The rest of a chunk of which this rank's shard was fetched, or is on the GPU. `slot` None: to where all of it
        stays: after a fetch, or an update of the shard there."""
        assert self.ranked is not None
        between, copy, place = self.ranked.between, self.chunks.param_copies[chunk], self.chunks.placed[chunk]
        if slot is not None and place.is_home_on_gpu and not self._reserve(chunk, slot):
            return nothing
        if slot is not None and chunk not in self._ungathered:  # what is on its way is gathered once, however long
            return nothing
        self._ungathered.discard(chunk)
        when = between.moment

        def work() -> int:
            if place.is_refreshed and copy.state is not Residency.ARRIVING:  # there was nothing new to fetch
                return 0
            num_bytes = self._count(Lane.GATHER, between.gather(chunk, when))
            if copy.state is Residency.ARRIVING:
                copy.move(Residency.CLEAN)
                self.chunks.stale[chunk] = False
            return num_bytes

        return work

    def _copy_home_to_gpu(self, chunk: int, buffer: Filled | None = None) -> int:
        assert self.chunks.home_copies[chunk].state is Residency.CLEAN, f"chunk {chunk} was fetched during its update"
        return self._count(Lane.H2D, self.chunks.bring_param(chunk, None if buffer is None else buffer()))

    def _evict(self, action: Action) -> LaneWork:
        assert action.chunk is not None
        chunk = action.chunk

        def work() -> None:
            if self.chunks.param_copies[chunk].state is Residency.CLEAN:
                self.evict(chunk)

        return work

    def evict(self, chunk: int) -> None:
        self.chunks.param_copies[chunk].move(Residency.ABSENT)
        self.chunks.param_slots.drop(chunk)
        self.num_evictions += 1

    # -- gradients ------------------------------------------------------------------------------------------------

    def _clear(self, action: Action) -> LaneWork:
        assert action.chunk is not None and action.target is not None
        return partial(self._open_at_zero, action.chunk, action.target.slot)

    def _open_at_zero(self, chunk: int, slot: int | None) -> None:
        """Opens a gradient at zero: at its own place on the GPU, or in a slot. Not if a call that the plan did not
        foresee has added to it in this pass already: then the block's hold brings that sum back."""
        is_reduced_home = self.chunks.placed[chunk].is_reduced_home
        if self.gradients.is_open(chunk) and not is_reduced_home:
            return
        if is_reduced_home:
            assert self.ranked is not None
            self.ranked.freshen_home(chunk)
        copy = self.chunks.grad_copies[chunk]
        if slot is None and chunk in self._left:  # it may still be on its way home from there
            self._left.pop(chunk).join()
        if slot is None and self.ranked is not None:  # or be averaged there: nobody has asked for it
            self.ranked.wait_for(chunk)
        if slot is not None and self.ranked is not None:  # else ranks whose lanes are slower had no room
            self.ranked.wait_for_all((chunk, *self.chunks.grad_slots.occupants(slot, chunk)))
        if slot is not None and not self._take_gradient_slot(chunk, slot):
            return
        try:
            self.chunks.grad_on_gpu(chunk).zero_()
        except BaseException:
            self.chunks.grad_slots.drop(chunk)  # nobody else knows yet that it is there
            raise
        self.gradients.cleared(chunk)
        if copy.state is Residency.ABSENT:
            copy.move(Residency.CLEAN)

    def fetch_gradient(self, chunk: int, slot: int | None, buffer: Filled | None = None) -> int:
        """Brings the sum so far back to the GPU, so that the GPU always sees the whole sum. `slot` None: to a place of
        its own. `buffer`: where it waits; None: it comes from its home."""
        if slot is not None and not self._take_gradient_slot(chunk, slot):
            return 0
        copy = self.chunks.grad_copies[chunk]
        copy.move(Residency.ARRIVING)
        if chunk in self._left:
            self._left[chunk].join()
        num_bytes = 0
        if self.gradients.is_summed(chunk) and not self.chunks.placed[chunk].is_reduced_home:
            waiting = None if buffer is None else buffer()
            num_bytes = self.chunks.bring_gradient(chunk, waiting)
            if not self.chunks.placed[chunk].is_rounded_home:
                self._count(Lane.H2D, num_bytes)
        else:
            self.chunks.grad_on_gpu(chunk).zero_()
        self.chunks.grad_slots.used_until(chunk, self._fence())
        copy.move(Residency.CLEAN)
        return num_bytes

    def _take_gradient_slot(self, chunk: int, slot: int) -> bool:
        table = self.chunks.grad_slots
        if table.first(chunk) is not None or not table.fits(slot, chunk) or table.occupants(slot, chunk):
            return False
        for fence in table.take(slot, chunk):
            fence.join()
        return True

    def _will_be_free(self, chunk: int, slot: int) -> bool:
        """Once what is leaving has left: see [Note: how far lanes are] in demand.py."""
        there = (chunk, *self.chunks.grad_slots.occupants(slot, chunk))
        gone = (Residency.LEAVING, Residency.ABSENT)
        return all(self.chunks.grad_copies[other].state in gone for other in there)

    def _write_back(self, action: Action) -> LaneWork:
        assert action.chunk is not None
        return self.write_back(action.chunk) if self._disk is None else self.write_back(action.chunk, action)

    def write_back(self, chunk: int, action: Action | None = None) -> LaneWork:
        """Sends a finished sum home, which may be on the GPU, or where the planned `action` says, and frees its slot. A
        gradient that nobody touched just leaves."""
        copy = self.chunks.grad_copies[chunk]
        if copy.state is Residency.CLEAN:  # opened, then its block was skipped
            self.drop_gradient(chunk)
        assert chunk not in self.gradients.unreduced, f"the gradient of chunk {chunk} leaves before it is averaged"
        if copy.state is not Residency.DIRTY:
            return nothing
        copy.move(Residency.LEAVING)
        if action is None and self._disk is not None:
            self._disk.forget_sum(chunk)
        buffer = None if self._disk is None or action is None else self._disk.leaving(action)
        if self.chunks.placed[chunk].parks:
            self.chunks.park(chunk)
        elif self.chunks.disk is not None and self.chunks.placed[chunk].grad is None:
            if buffer is None:
                self.chunks.disk.open_stray(chunk)
            else:  # what was never used is obsolete: the update would take it for this one
                self.chunks.unpark(chunk)

        def work() -> int:
            num_bytes = self.chunks.send_gradient(chunk, buffer)
            if not self.chunks.placed[chunk].is_rounded_home:
                self._count(Lane.D2H, num_bytes)
            if (fence := self._fence()) is not None:
                self._left[chunk] = fence
                self.chunks.grad_slots.used_until(chunk, fence)
            copy.move(Residency.ABSENT)
            self.chunks.grad_slots.drop(chunk)
            return num_bytes

        return work

    def _reduce(self, action: Action) -> LaneWork:
        assert action.chunk is not None
        return self.reduce(action.chunk)

    def reduce(self, chunk: int) -> LaneWork:
        """Averages a gradient over all ranks. Also one to which this rank has added nothing: others have."""
        assert self.ranked is not None
        gradients, copy = self.ranked, self.chunks.grad_copies[chunk]
        place = self.chunks.placed[chunk]
        # It has left off the plan. Whether its lane is through with that says nothing: other ranks' may not be.
        if place.in_grad_slot and copy.state in (Residency.LEAVING, Residency.ABSENT):
            return nothing
        gradients.will_be_averaged(chunk)
        if copy.state is Residency.CLEAN and (place.in_grad_slot or place.leaves):
            copy.move(Residency.HELD)
            copy.move(Residency.DIRTY)
        if place.is_reduced_home:
            copy.move(Residency.LEAVING)
        is_finished = gradients.is_finished(chunk)

        def work() -> int:
            num_bytes = self._count(Lane.REDUCE, gradients.between.reduce(chunk))
            gradients.averaged(chunk, is_finished)
            self.chunks.grad_slots.used_until(chunk, self._fence())
            if place.is_reduced_home:
                copy.move(Residency.ABSENT)
                self.chunks.grad_slots.drop(chunk)
            return num_bytes

        return work

    def drop_gradient(self, chunk: int) -> None:
        """Frees the slot of a gradient that nobody needs any more."""
        copy = self.chunks.grad_copies[chunk]
        if copy.state is Residency.DIRTY:
            copy.move(Residency.LEAVING)
        copy.move(Residency.ABSENT)
        self.chunks.grad_slots.used_until(chunk, self._fence())
        self.chunks.grad_slots.drop(chunk)

    # -- block inputs ---------------------------------------------------------------------------------------------

    def _stash(self, action: Action) -> LaneWork:
        assert action.call is not None and action.target is not None
        stash, buffer = self.stashes.of(action.call), action.target.slot
        return nothing if stash is None else self._counted(Lane.D2H, self.stashes.prepare_store(stash, buffer))

    def _unstash(self, action: Action) -> LaneWork:
        assert action.call is not None
        stash = self.stashes.of(action.call)
        return nothing if stash is None else self._counted(Lane.H2D, self.stashes.prepare_restore(stash))

    def _read(self, action: Action) -> LaneWork:
        assert self._disk is not None
        if action.call is None:
            return self._disk.read(action)
        assert action.target is not None and action.target.slot is not None
        stash = self.stashes.of(action.call)
        work = None if stash is None else self.stashes.prepare_read(stash, action.target.slot)
        return nothing if work is None else self._counted(Lane.DISK_READ, work)

    def _write(self, action: Action) -> LaneWork:
        assert self._disk is not None
        if action.call is None:
            return self._disk.write(action)
        stash = self.stashes.of(action.call)
        work = None if stash is None else self.stashes.prepare_write(stash)
        return nothing if work is None else self._counted(Lane.DISK_WRITE, work)

    def _counted(self, lane: Lane, copy: Callable[[], int]) -> LaneWork:
        return lambda: self._count(lane, copy())

    def _count(self, lane: Lane, num_bytes: int) -> int:
        """Bytes that a lane has moved. Works return them, so that they get into the records."""
        self.moved_bytes[lane] += num_bytes
        return num_bytes

    # -- tables on the host ---------------------------------------------------------------------------------------

    def look_up(self, chunk: int, ids: Tensor, into: Tensor) -> LaneWork:
        """Gathers rows now; the work takes them to the GPU."""
        return self._counted(Lane.H2D, self.chunks.tables[chunk].look_up(ids, into, self._fence))

    def add_rows(
        self, chunk: int, ids: Tensor, gradients: Tensor, padding: int | None, is_final: bool
    ) -> tuple[LaneWork, LaneWork]:
        """Two pieces of work: one takes the gradients of rows to the host, the other adds them to their table's."""
        table = self.chunks.tables[chunk]
        assert table.sums is not None
        rows, send = table.leave(gradients)
        new = replace(self.gradients.open_rows(chunk, is_final), ids=ids, rows=rows, padding=padding)
        return self._counted(Lane.D2H, send), partial(table.sums.add, new, self._in_threads)

    # -- updates --------------------------------------------------------------------------------------------------

    def _update(self, action: Action) -> LaneWork:
        assert action.chunk is not None
        return self.updating.update(action.chunk, True)

    def _settle(self, action: Action) -> LaneWork:
        """Nothing, where there was no update."""
        assert action.chunk is not None
        return self.updating.settle(action.chunk)
