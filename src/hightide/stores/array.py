"""A tensor's worth of bytes in a store. Whoever has one gets and puts values without knowing on which tier they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from hightide.stores.store import MemoryStore, Region, Store
from hightide.stores.ticket import Ticket


class Array:
    """Contiguous elements in a region. Lanes `read` and `write` them by tickets. All other methods are for values at
    rest: they convert, from and to any device, and are through when they return."""

    __slots__ = ("_view", "dtype", "is_memory", "nbytes", "offset_bytes", "region", "shape", "store")

    def __init__(
        self, store: Store, region: Region, dtype: torch.dtype, shape: Sequence[int], offset_bytes: int = 0
    ) -> None:
        self.store, self.region, self.offset_bytes = store, region, offset_bytes
        self.dtype, self.shape = dtype, tuple(shape)
        self.nbytes = prod(shape) * dtype.itemsize
        self.is_memory = isinstance(store, MemoryStore)
        self._view: Tensor | None = None

    def part(self, start: int, shape: Sequence[int]) -> Array:
        """The elements from `start` on, in a shape of their own."""
        return Array(self.store, self.region, self.dtype, shape, self.offset_bytes + start * self.dtype.itemsize)

    def read(self, into: Tensor, start: int = 0) -> Ticket:
        view = self._view  # of chunks that are updated on the host there is one, and all of it crosses at each use
        if view is not None and into.dtype is self.dtype and into.shape == self.shape:
            return self._memory.copied(self.region, into, view)
        return self.store.read(self.region, into, self.offset_bytes + start * self.dtype.itemsize)

    def write(self, source: Tensor, start: int = 0) -> Ticket:
        view = self._view
        if view is not None and source.dtype is self.dtype and source.shape == self.shape:
            return self._memory.copied(self.region, view, source)
        return self.store.write(self.region, source, self.offset_bytes + start * self.dtype.itemsize)

    @property
    def _memory(self) -> MemoryStore:
        assert isinstance(self.store, MemoryStore), f"{self.region} on {self.store.tier} is no memory"
        return self.store

    @property
    def view(self) -> Tensor:
        """Its very memory, where the store has any; made once."""
        if self._view is None:
            with torch.inference_mode(False):  # it outlives it
                flat = self._memory.view(self.region, self.dtype, self.offset_bytes, prod(self.shape))
                self._view = flat.view(self.shape)
        return self._view

    def forget_view(self) -> None:
        """It holds the store's memory."""
        self._view = None

    # ---- values at rest

    def peek(self) -> Tensor:
        """To be read at once: its memory, or a copy where there is none."""
        return self.view if self.is_memory else self.get()

    def get(self, device: torch.device | str = "cpu") -> Tensor:
        """A copy."""
        if self.is_memory:
            return self.view.detach().to(device, copy=True)
        copy = torch.empty(self.shape, dtype=self.dtype)
        self.read(copy).wait()
        return copy.to(device)

    def put(self, values: Tensor) -> None:
        with self.opened(is_new=True) as target:
            target.copy_(values.detach())

    @contextmanager
    def opened(self, is_new: bool = False) -> Iterator[Tensor]:
        """To be changed: its memory, or a buffer whose values go there at the end. `is_new`: all of it is written."""
        if self.is_memory:
            yield self.view
            return
        buffer = torch.empty(self.shape, dtype=self.dtype) if is_new else self.get()
        yield buffer
        self.write(buffer).wait()
