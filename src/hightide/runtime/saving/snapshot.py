"""The values of a run after a step, for one reader beside training."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from torch import Tensor

from hightide.ir.tier import Lane
from hightide.runtime.lanes.lanes import Lanes
from hightide.runtime.saving.copy_on_update import CopyOnUpdate
from hightide.runtime.saving.tiles import SaveCost, SavedTensor, Tile


class Snapshot:
    """Once it is forgotten it is closed: nobody waits for a reader that will never come."""

    def __init__(self, tensors: Iterable[SavedTensor], tiles: list[Tile], kept: CopyOnUpdate, lanes: Lanes) -> None:
        self._tiles, self._copies, self._lanes = tiles, kept, lanes
        self.tensors = tuple(tensors)  # in the order of `values`; of several ranks all, also those of others
        weakref.finalize(self, kept.fail, RuntimeError("nobody reads this snapshot any more")).atexit = False

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def cost(self) -> SaveCost:
        return self._copies.cost

    def values(self) -> Iterator[tuple[SavedTensor, Tensor]]:
        """As `parts`, without the numbers: of one rank all elements come, in their order."""
        return ((tensor, part) for tensor, _, part in self.parts())

    def parts(self) -> Iterator[tuple[SavedTensor, int, Tensor]]:
        """(tensor, number of the first element, flat elements on the host), each valid until the next are asked for; a
        large tensor comes in several parts, one after the other. For one reader, once, in any thread. However it ends,
        the snapshot is closed. Raises if somebody else has closed it, or values could not be had."""
        try:
            for parts, passed in self.tiles():
                yield from parts
                passed()
        finally:
            self.close()

    def tiles(self) -> Iterator[tuple[list[tuple[SavedTensor, int, Tensor]], Callable[[], None]]]:
        """As `parts`, for a reader that has several tiles at once: each is valid until what comes with it is called, in
        any thread and any order. Who reads them all closes the snapshot."""
        self._copies.start()
        chunk, began_s, num_bytes = -1, 0.0, 0
        for number, tile in enumerate(self._tiles):
            if tile.chunk != chunk:
                self._record(chunk, began_s, num_bytes)
                chunk, began_s, num_bytes = tile.chunk, time.perf_counter(), 0
            values = self._copies.take(number)
            parts = [(tensor, first, values[start : start + numel]) for tensor, start, numel, first in tile.parts]
            num_bytes += sum(part.nbytes for _, _, part in parts)
            yield parts, partial(self._copies.passed, number)
        self._record(chunk, began_s, num_bytes)

    def lend(self, num_bytes: int) -> tuple[Tensor, Callable[[], None]] | None:
        """Bytes of host memory that the plan leaves free, for whoever reads, and what gives them back. None: there is
        no room."""
        return self._copies.lend(num_bytes)

    def _record(self, chunk: int, began_s: float, num_bytes: int) -> None:
        """For recordings: when the reader had it."""
        if chunk >= 0:
            self._lanes.record_beside(Lane.SAVE, f"save.{chunk}", began_s, num_bytes)

    def close(self) -> None:
        """Lets go of everything, whether it was read or not."""
        self._copies.close()
        self._tiles = []
