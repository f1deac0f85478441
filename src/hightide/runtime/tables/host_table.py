"""A table that never leaves the host, and the buffers through which its rows and their gradients cross the link. See
[Note: looking up on the host] in planner/lookup.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hightide.runtime.tables.row_sums import RowSums
from hightide.stores.array import Array
from hightide.stores.store import Accelerator, Store
from hightide.stores.ticket import Fence

LABEL = "embedding rows"
Copy = Callable[[], int]  # returns the bytes moved


class HostTable:
    def __init__(
        self,
        key: str,
        weight: Array,
        gradient: Array | None,
        gpu: Accelerator,
        host: Store,
        buffer_bytes: tuple[int, int],
    ) -> None:
        """`weight` and `gradient` in the table's shape; `buffer_bytes`: of rows, and of their gradients."""
        self.key, self.weight, self._gpu = key, weight, gpu
        self.sums = None if gradient is None else RowSums(gradient)
        gradient_bytes = 0 if gradient is None else buffer_bytes[1]
        self._rows = self._buffer(host, buffer_bytes[0])
        self._made, self._arrived = self._buffer(gpu, gradient_bytes), self._buffer(host, gradient_bytes)
        self._is_sent: Fence | None = None  # when what is in the buffer of rows is on the GPU
        self.arriving: Tensor | None = None  # there, until compute has waited for it: an interrupt may forget it

    def _buffer(self, store: Store, num_bytes: int) -> Array | None:
        if not num_bytes:
            return None
        width = self.weight.shape[1]
        shape = num_bytes // (width * self.weight.dtype.itemsize), width
        return Array(store, store.allocate(num_bytes, LABEL), self.weight.dtype, shape)

    def forget_views(self) -> None:
        """They hold the stores' memory."""
        for array in (self._rows, self._made, self._arrived):
            if array is not None:
                array.forget_view()

    def look_up(self, ids: Tensor, into: Tensor, fence: Callable[[], Fence | None]) -> Copy:
        """Gathers rows, and returns what takes them to the GPU. More than the buffer holds, as an evaluation may want,
        goes there in parts, of which all but the last are on their way by then."""
        self.arriving = into
        if self._rows is None:  # no call was foreseen
            rows = self.weight.view.index_select(0, ids)
            return lambda: into.copy_(rows).nbytes
        moved_bytes, copy = 0, _nothing
        for some, target in zip(ids.split(self._rows.shape[0]), into.split(self._rows.shape[0]), strict=True):
            moved_bytes += copy()
            copy = self._gathered(some, target, fence)
        return lambda: moved_bytes + copy()

    def _gathered(self, ids: Tensor, into: Tensor, fence: Callable[[], Fence | None]) -> Copy:
        assert self._rows is not None
        if self._is_sent is not None:  # others are in the buffer
            self._is_sent.synchronize()
        rows = self._rows.part(0, into.shape)
        torch.index_select(self.weight.view, 0, ids, out=rows.view)

        def send() -> int:
            rows.read(into).wait()
            self._is_sent = fence()
            return rows.nbytes

        return send

    def leave(self, gradients: Tensor) -> tuple[Tensor, Copy]:
        """The gradients of rows, as they will be on the host, and what takes them there. Their place on the GPU is free
        again when that is done; more than is foreseen has none, and is taken there at once."""
        num_rows = gradients.numel() // self.weight.shape[1]
        shape = num_rows, self.weight.shape[1]
        if self._made is None or self._arrived is None or num_rows > self._made.shape[0]:
            with self._gpu.unmetered():
                there = gradients.detach().to("cpu", copy=True)
            return there.reshape(shape), _nothing
        made, arrived = self._made.part(0, shape), self._arrived.part(0, shape)
        made.view.view(gradients.shape).copy_(gradients)

        def send() -> int:
            arrived.write(made.view).wait()
            return arrived.nbytes

        return arrived.view, send


def _nothing() -> int:
    return 0
