"""READ and WRITE, and what the actions before and after them do otherwise for what lives on disk. As in performer.py,
buffers are looked up in the user's thread when an action is issued, and the work runs on its lane. See [Note: what is
in a buffer] in chunks/rings.py."""

from __future__ import annotations

from collections.abc import Callable

from hightide.ir.action import Action, Place
from hightide.ir.tier import ChunkKind, Lane
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.disk_homes import DiskHomes, UpdateArrays
from hightide.runtime.chunks.rings import BufferContent
from hightide.runtime.gradients.gradients import Gradients
from hightide.runtime.schedule.in_flight import LaneWork
from hightide.stores.array import Array
from hightide.stores.ticket import Fence


class DiskPerformer:
    def __init__(
        self,
        chunks: Chunks,
        disk: DiskHomes,
        gradients: Gradients,
        count: Callable[[Lane, int], int],
        fence: Callable[[], Fence | None],
    ) -> None:
        """`count`: notes the bytes that a lane has moved, and returns them."""
        self._chunks, self._disk, self._rings = chunks, disk, disk.rings
        self._gradients, self._count, self._fence = gradients, count, fence

    def read(self, action: Action) -> LaneWork:
        chunk, buffer = _of(action, action.target)
        ring = self._rings.state if action.kind is ChunkKind.STATE else self._rings.up
        assert action.kind is not None
        content = ring.fill(buffer, chunk, action.kind)

        def work() -> int:
            if content.kind is ChunkKind.GRAD and not self._gradients.is_summed(chunk):
                return 0
            return self._count(Lane.DISK_READ, self._disk.read(content))

        return work

    def write(self, action: Action) -> LaneWork:
        """A gradient that did not leave, and states that nothing has updated, are not written."""
        chunk, buffer = _of(action, action.source)
        assert action.kind is not None
        is_grad = action.kind is ChunkKind.GRAD
        ring = self._rings.down if is_grad else self._rings.state
        content = ring.holding(buffer, chunk, action.kind)
        if content is None:
            return lambda: 0
        ring.leave(content)

        def work() -> int:
            if is_grad:
                return self._count(Lane.DISK_WRITE, self._disk.write_gradient(content))
            if not content.is_changed:
                return 0
            num_bytes = self._count(Lane.DISK_WRITE, self._disk.write_updated(content))
            self._rings.up.forget(chunk)
            return num_bytes

        return work

    def arriving(self, action: Action) -> Callable[[], Array] | None:
        """For a FETCH: gives the buffer with its content, in the lane. None: it comes from somewhere else."""
        if action.source is None or action.source.slot is None:
            return None
        chunk, buffer = _of(action, action.source)
        assert action.kind is not None
        content = self._rings.up.holding(buffer, chunk, action.kind)
        if content is None:
            content = self._rings.up.fill(buffer, chunk, action.kind)
        self._rings.up.leave(content)
        return lambda: self._filled(content)

    def _filled(self, content: BufferContent) -> Array:
        """Others may have been copied out of this buffer by this very lane, which has only enqueued that."""
        if not content.is_good:
            if (fence := self._fence()) is not None:
                fence.synchronize()
            self._count(Lane.DISK_READ, self._disk.read(content))
        return self._disk.arriving(content)

    def leaving(self, action: Action) -> Array | None:
        """For a WRITE_BACK: the buffer that it fills. None: it goes somewhere else."""
        if action.target is None or action.target.slot is None:
            return None
        chunk, buffer = _of(action, action.target)
        return self._disk.leaving(self._rings.down.fill(buffer, chunk, ChunkKind.GRAD))

    def forget_sum(self, chunk: int) -> None:
        """A gradient leaves off the plan: what was read ahead of it for the GPU is an older sum. A planned FETCH that
        is issued from now on reads it again."""
        while (content := self._rings.up.of(chunk, ChunkKind.GRAD)) is not None:
            self._rings.up.leave(content)

    def has_states(self, chunk: int) -> bool:
        """Of this chunk, on disk."""
        return chunk in self._disk

    def updating(self, chunk: int, apply: LaneWork, is_planned: bool) -> LaneWork:
        """The update of a chunk whose states are on disk: in its buffer, or tile by tile if no READ was planned."""
        state = self._rings.state.of(chunk, ChunkKind.STATE) if is_planned else None
        gradient = None
        if self._chunks.placed[chunk].grad is None and chunk not in self._disk.strays:
            gradient = self._rings.down.of(chunk, ChunkKind.GRAD)
            assert gradient is not None, f"chunk {chunk} is updated without a gradient"
            self._rings.down.leave(gradient)

        def work() -> None:
            grad = self._chunks.grad(chunk) if gradient is None else self._disk.leaving(gradient)
            if state is None:
                arrays = UpdateArrays(self._chunks.home(chunk), grad, self._chunks.states(chunk))
            else:
                if not state.is_good:
                    self._count(Lane.DISK_READ, self._disk.read(state))
                arrays = self._disk.at_hand(state, grad)
            self._chunks.at_hand[chunk] = arrays
            try:
                apply()
            finally:
                del self._chunks.at_hand[chunk]
            if state is not None:
                state.is_changed = True
            else:
                self._rings.forget(chunk)

        return work


def _of(action: Action, place: Place | None) -> tuple[int, int]:
    assert action.chunk is not None and place is not None and place.slot is not None
    return action.chunk, place.slot
