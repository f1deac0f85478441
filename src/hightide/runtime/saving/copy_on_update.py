"""Values of one moment, kept for a reader while updates go on.

[Note: copy on update] The reader takes tile after tile, in the order in which updates will come, and may have several
at once, which it gives back in any order. A tile on the host is handed out where it lies. Whoever is about to change a
chunk whose tiles were not read yet first copies them into host memory that the plan leaves free, and goes on; where
there is none, it waits until the reader has come by. Tiles on the GPU leave on the d2h lane, one after the other and
ahead of the reader while there is memory: the update on the GPU stands behind the copy by its fence, and the host does
not wait. Tiles on disk are read into one of two buffers; an update of them copies from the buffer in which it works.

Nobody waits for ever: a reader that takes nothing for as long as a lane may take is given up, one that fails or closes
lets everybody go on. Meanwhile nobody else's time counts (`Lanes.excuse`). An update of the following step stands
behind all updates of the saved one (`owed`): the reader may wait for one of those, which must not be queued behind it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from hightide.ir.tier import Lane, Tier
from hightide.process.forks import Birthplace
from hightide.process.interrupts import safe_point
from hightide.runtime.chunks.disk_homes import UpdateArrays
from hightide.runtime.lanes.lanes import Lanes
from hightide.runtime.lanes.update_threads import RunInThreads
from hightide.runtime.saving.copy_buffers import CopyBuffer, CopyBuffers, CopyStage, SnapshotTile
from hightide.runtime.saving.tiles import SaveCost, Tile
from hightide.stores.host_arena import HostArena
from hightide.stores.ticket import LOOK_S, Ticket


class CopyOnUpdate:
    def __init__(
        self,
        tiles: Iterable[Tile],
        owed: Mapping[int, Sequence[Ticket]],
        lanes: Lanes,
        host: HostArena,
        moment: Sequence[Ticket],
        updated_on_gpu: Callable[[int], bool],
        written: Callable[[int], str | None],
    ) -> None:
        """`owed`: by chunk, what its values of this moment wait for. `moment`: what compute has enqueued. `written`: a
        parameter of a chunk on the GPU to which somebody has written since."""
        self._kept = [
            SnapshotTile(tile, number, tile.array.store.tier is Tier.GPU and updated_on_gpu(tile.chunk))
            for number, tile in enumerate(tiles)
        ]
        self._by_chunk: dict[int, list[SnapshotTile]] = {}
        for one in self._kept:
            self._by_chunk.setdefault(one.tile.chunk, []).append(one)
        self._owed = {chunk: list(tickets) for chunk, tickets in owed.items() if tickets}
        self._lanes, self._moment, self._written = lanes, list(moment), written
        self._buffers = CopyBuffers(host)
        self._changed = threading.Condition()
        filled = [one for one in self._kept if one.tile.numel]
        self._elsewhere = deque(one for one in filled if one.tier is not Tier.HOST)  # what is to be brought
        self._ahead = deque(one for one in filled if one.runs_ahead)
        self._birthplace = Birthplace()
        self._at = 0  # the tile that the reader asks for next
        self._num_passed = 0
        self._is_leaving = False  # a tile that runs ahead is on the link
        self._progress_s = time.monotonic()
        self._error: BaseException | None = None
        self._waited_s, self._copied_bytes = 0.0, 0
        self._num_waiting, self._waiting_since_s = 0, 0.0
        self.is_over = not self._kept
        if not host.is_pinned:
            self._buffers.stage(self._most_bytes)

    @property
    def cost(self) -> SaveCost:
        return SaveCost(self._waited_s, self._copied_bytes)

    # -- for the reader -------------------------------------------------------------------------------------------

    def take(self, number: int) -> Tensor:
        """The values of the next tile, until `passed`. One thread takes them all."""
        with self._changed:
            self._check()
            assert number == self._at, "one reader takes each tile once"
            self._progress_s = time.monotonic()
            one = self._kept[number]
            owed = self._owed.get(one.tile.chunk, ())
        for ticket in owed:
            ticket.wait_through()
        with self._changed:
            self._check()
            if one.stage is CopyStage.HOME and (one.tier is Tier.HOST or not one.tile.numel):
                one.stage = CopyStage.HANDED
            else:
                while one.stage is CopyStage.HOME and not self._buffers.has_staged:
                    self._changed.wait(LOOK_S)  # until the reader gives one back
                    self._check()
                if one.stage is CopyStage.HOME:
                    self._bring(one, self._buffers.take_staged())
            self._at = number + 1
            self._bring_next()
            is_handed, copied, buffer = one.stage is CopyStage.HANDED, one.ticket, one.buffer
        if is_handed:
            return one.tile.source.view if one.tile.numel else torch.empty(0, dtype=one.tile.array.dtype)
        assert copied is not None and buffer is not None
        copied.wait_through()
        if one.tier is Tier.GPU:
            self._is_through(one)
            with self._changed:
                self._check()
        return buffer.of(one.tile)

    def passed(self, number: int) -> None:
        """The reader is done with a tile. In any thread."""
        with self._changed:
            self._check()
            one = self._kept[number]
            buffer, one.buffer, one.ticket = one.buffer, None, None
            if buffer is not None:
                self._buffers.give_back(buffer)
            one.stage, self._progress_s = CopyStage.READ, time.monotonic()
            self._num_passed += 1
            self._changed.notify_all()
        self._run_ahead()

    def lend(self, num_bytes: int) -> tuple[Tensor, Callable[[], None]] | None:
        """For the reader's own use; see Snapshot."""
        return self._buffers.lent_bytes(num_bytes)

    def start(self) -> None:
        """The reader is there. What leaves the GPU does so at full speed into memory that is pinned: that takes a
        while, the first time."""
        leaving_bytes = sum(one.tile.num_bytes for one in self._ahead)
        while not self.is_over and self._buffers.pin_more(leaving_bytes, self._most_bytes):
            self._run_ahead()
            with self._changed:
                self._changed.notify_all()
        with self._changed:
            self._buffers.pinning_is_over()
            self._changed.notify_all()
            self._progress_s = time.monotonic()
            if not self.is_over:
                self._buffers.stage(self._most_bytes)
        self._run_ahead()

    @property
    def _most_bytes(self) -> int:
        """Of a tile that is to be brought."""
        return max((one.tile.num_bytes for one in self._elsewhere), default=0)

    # -- for whoever changes values -------------------------------------------------------------------------------

    def owed(self) -> list[Ticket]:
        """What must be done before an update of the next step may begin, and wait."""
        return [ticket for tickets in self._owed.values() for ticket in tickets if not ticket.done]

    def secure(self, chunk: int, arrays: UpdateArrays | None = None, in_threads: RunInThreads | None = None) -> None:
        """Returns when a chunk's values may change. `arrays`: where they lie, if not at home. `in_threads`: they
        copy."""
        kept = self._by_chunk.get(chunk, ())
        while mine := self._claimed(kept):
            self._fill(mine, arrays, in_threads)
        for one in kept:
            self._await_copy(one)

    def secure_now(self, chunk: int | None = None) -> None:
        """As `secure`, of one chunk or all, for who is no update: the step whose values are read may still be making
        them. And copies are through when this returns."""
        for number in list(self._by_chunk) if chunk is None else [chunk]:
            for owed in self._owed.get(number, ()):
                owed.wait_through()
            self.secure(number)
            for one in self._by_chunk.get(number, ()):
                if one.tier is Tier.GPU and (ticket := one.ticket) is not None:
                    ticket.wait_through()
                    self._is_through(one)

    def wait(self) -> None:
        """Until all was read, or the reader is gone."""
        since_s = time.monotonic()
        with self._changed:
            while not self.is_over and self._num_passed < len(self._kept):
                self._hold_up(since_s)

    def _claimed(self, kept: Sequence[SnapshotTile]) -> list[SnapshotTile]:
        """Tiles that the caller must copy now; none if all are safe. Those on the GPU are on their way."""
        since_s = time.monotonic()
        with self._changed:
            while not self.is_over:
                unsafe = [one for one in kept if one.tile.numel and one.stage in (CopyStage.HOME, CopyStage.HANDED)]
                if not unsafe:
                    break
                mine = [one for one in unsafe if one.stage is CopyStage.HOME and self._set_aside(one)]
                here = [one for one in mine if one.tier is not Tier.GPU]
                if here:
                    return here
                if not mine:
                    self._lanes.check()
                    self._hold_up(since_s)
        return []

    def _set_aside(self, one: SnapshotTile) -> bool:
        buffer = self._buffers.lent_for(one)
        if buffer is None:
            return False
        if one.tier is Tier.GPU:
            self._bring(one, buffer)
        else:
            self._put(one, buffer, Ticket(f"copy of tile {one.number}"))
        return True

    def _fill(self, mine: Sequence[SnapshotTile], arrays: UpdateArrays | None, in_threads: RunInThreads | None) -> None:
        todo, lock = list(reversed(mine)), threading.Lock()

        def work(_: int) -> None:
            while True:
                with lock:
                    if not todo:
                        return
                    one = todo.pop()
                assert one.buffer is not None and one.ticket is not None
                source = one.tile.source if arrays is None else one.tile.source_in(arrays)
                try:
                    if source.is_memory:
                        one.buffer.of(one.tile).copy_(source.view)
                    else:
                        source.read(one.buffer.of(one.tile)).wait()
                except BaseException as error:
                    one.ticket.set_error(error)
                    raise
                one.ticket.set_result()

        try:
            if in_threads is None:
                work(0)
            else:
                in_threads(work, len(mine))
        except BaseException as error:
            for one in todo:
                assert one.ticket is not None
                one.ticket.set_error(error)
            raise

    def _await_copy(self, one: SnapshotTile) -> None:
        with self._changed:
            ticket = one.ticket if one.stage is CopyStage.ASIDE and not self.is_over else None
        if ticket is None:
            return
        if one.tier is Tier.GPU:
            self._lanes.wait(ticket, Lane.D2H)
            return
        try:
            ticket.wait(self._lanes.timeout_s)
        except Exception as error:
            self.fail(error)

    def _hold_up(self, since_s: float) -> None:
        """A moment, in which nobody else's time counts."""
        if not self._num_waiting:
            self._waiting_since_s = time.monotonic()
        self._num_waiting += 1
        self._changed.wait(LOOK_S)
        self._num_waiting -= 1
        if not self._num_waiting:
            self._waited_s += time.monotonic() - self._waiting_since_s
        self._lanes.excuse()
        idle_s = time.monotonic() - max(since_s, self._progress_s)
        if idle_s > self._lanes.timeout_s:
            self._end(
                TimeoutError(
                    f"who reads the values of a checkpoint has taken none for {idle_s:.0f} s, and training waits for "
                    "it: the checkpoint is given up"
                )
            )
        safe_point()

    # -- copies, under the lock -----------------------------------------------------------------------------------

    def _put(self, one: SnapshotTile, buffer: CopyBuffer, ticket: Ticket) -> None:
        one.stage, one.buffer, one.ticket = CopyStage.ASIDE, buffer, ticket
        self._copied_bytes += one.tile.num_bytes

    def _bring(self, one: SnapshotTile, buffer: CopyBuffer) -> None:
        """From the GPU or the disk: it is under way when this returns."""
        tile, target = one.tile, buffer.of(one.tile)
        source = tile.source
        if one.tier is Tier.DISK:
            self._put(one, buffer, source.read(target))
            return

        def copy() -> int:
            target.copy_(source.view, non_blocking=buffer.is_pinned)
            return target.nbytes

        name = f"save.{tile.chunk}.{one.number}"
        ticket = self._lanes.submit(name, Lane.D2H, 0, self._moment, copy)
        self._put(one, buffer, ticket)
        self._lanes.when_through(ticket, partial(self._is_through, one))

    def _is_through(self, one: SnapshotTile) -> None:
        """Nothing orders a copy and what users write in place."""
        with self._changed:
            if not one.is_through and not self.is_over and (key := self._written(one.tile.chunk)) is not None:
                self._end(
                    RuntimeError(
                        f"the parameter {key!r} was written to in place while its values were copied for a checkpoint, "
                        "which is given up; wait for the checkpoint before such writes, or use model.load_state_dict()"
                    )
                )
            one.is_through = True

    def _bring_next(self) -> None:
        """Of tiles that are not on the host the one that the reader asks for next, if it is not aside already."""
        one = self._first(self._elsewhere, self._at)
        if one is None or one.stage is not CopyStage.HOME or not self._buffers.has_staged:
            return
        if all(ticket.done for ticket in self._owed.get(one.tile.chunk, ())):
            self._bring(one, self._buffers.take_staged())

    def _first(self, waiting: deque[SnapshotTile], number: int) -> SnapshotTile | None:
        """From this tile on."""
        while waiting and waiting[0].number < number:
            waiting.popleft()
        return waiting[0] if waiting else None

    def _has_left(self) -> None:
        with self._changed:
            self._is_leaving = False
        self._run_ahead()

    def _run_ahead(self) -> None:
        """The next tile leaves the GPU when the one before it is through: others use the link meanwhile."""
        try:
            with self._changed:
                if self.is_over or self._is_leaving:
                    return
                one = self._first(self._ahead, self._at)
                while one is not None and one.stage is not CopyStage.HOME:
                    one = self._first(self._ahead, one.number + 1)
                buffer = None if one is None else self._buffers.lent_for(one)
                if one is None or buffer is None:
                    return
                self._bring(one, buffer)
                ticket, self._is_leaving = one.ticket, True
            assert ticket is not None
            self._lanes.when_through(ticket, self._has_left)
        except BaseException as error:
            self.fail(error)

    # -- the end --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self.is_over:
            raise RuntimeError("the snapshot is closed: its values are not kept any more")

    def fail(self, error: BaseException) -> None:
        if self._birthplace.is_here:  # a fork has neither readers nor updates, and perhaps somebody's lock
            with self._changed:
                self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if not self.is_over:
            self.is_over, self._error = True, error
            self._changed.notify_all()

    def close(self) -> None:
        """Everybody goes on, and the memory is given back. Idempotent."""
        if not self._birthplace.is_here:
            return
        with self._changed:
            self._end(None)
            kept, self._kept = self._kept, []
            self._by_chunk, self._owed, self._written = {}, {}, _nothing_written
            self._elsewhere.clear()
            self._ahead.clear()
        for one in kept:
            if one.buffer is None or one.ticket is None:
                continue
            with suppress(Exception):
                one.ticket.wait_through()
            if one.ticket.done:  # else somebody may still write there
                self._buffers.release(one.buffer)
        self._buffers.close()


def _nothing_written(_: int) -> None:
    """Of a snapshot that has let go of its chunks."""
