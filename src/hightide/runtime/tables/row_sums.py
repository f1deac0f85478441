"""The gradient of a table on the host, which is the sum of the gradients of its rows.

[Note: sums of rows] Gradients of one row are summed from zero, in fp32 and in the order in which they were looked up;
then that sum is added to what is there. Plain PyTorch does the same on a CPU, so in fp32 the bits are the same. Threads
share rows, never a row, so their number does not matter. Which rows are not zero is remembered: of a large table a
step touches few, and only those have to be zero again. Whoever else writes to the gradient says so (`forget`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hightide.runtime.lanes.update_threads import RunInThreads
from hightide.stores.array import Array

T = TypeVar("T")

TILE_NUMEL = 256 * 1024  # elements that one thread works on at a time


class Number(Protocol):
    def __float__(self) -> float: ...


@dataclass
class RowsNorm:
    """Of a gradient that is not summed yet."""

    value: float | None = None


@dataclass
class NewRows:
    """What a SUM adds, and to what."""

    ids: Tensor  # on the host, flat
    rows: Tensor  # on the host, one for each id, when the SUM runs
    starts: bool  # the gradient was none before
    factor: Number = 1.0  # by which it is multiplied first
    round_to: torch.dtype | None = None  # the sum is final
    padding: int | None = None  # rows with this id have no gradient
    norm: RowsNorm | None = field(default=None)


class RowSums:
    def __init__(self, home: Array) -> None:
        """`home`: the table's gradient, in its shape."""
        self._home = home
        self._touched: Tensor | None = None  # rows that may be other than zero, each once; None: any

    def forget(self) -> None:
        self._touched = None

    def add(self, new: NewRows, in_threads: RunInThreads) -> None:
        home = self._home.view
        if new.starts:
            self._zero(home)
        elif (factor := float(new.factor)) != 1.0:
            for rows in self._tiles(home, self._others(home, home.new_empty(0, dtype=torch.int64))):
                scaled = home.index_select(0, rows)
                home.index_copy_(0, rows, scaled.zero_() if factor == 0.0 else scaled.mul_(factor))
        grouped = _Grouped.of(new.ids, new.padding)
        others = self._others(home, grouped.unique)
        squares = [
            *_shared(list(grouped.tiles(_num_rows(home))), lambda tile: _add(home, new, *tile), in_threads),
            *_shared(list(self._tiles(home, others)), lambda rows: _finish(home, new, rows), in_threads),
        ]
        if self._touched is not None:
            self._touched = torch.cat([others, grouped.unique])
        if new.norm is not None:
            new.norm.value = math.sqrt(sum(squares))

    def _zero(self, home: Tensor) -> None:
        if self._touched is None:
            home.zero_()
        else:
            home.index_fill_(0, self._touched, 0)
        self._touched = torch.empty(0, dtype=torch.int64)

    def _others(self, home: Tensor, rows: Tensor) -> Tensor:
        """Rows that may be other than zero, without these."""
        is_other = torch.ones(len(home), dtype=torch.bool)
        if self._touched is not None:
            is_other.zero_()[self._touched] = True
        is_other[rows] = False
        return is_other.nonzero().flatten()

    def _tiles(self, home: Tensor, rows: Tensor) -> Iterator[Tensor]:
        return iter(rows.split(_num_rows(home)) if len(rows) else ())


@dataclass(frozen=True)
class _Grouped:
    """Places of looked-up rows, those of one id together and in their order."""

    places: Tensor
    unique: Tensor  # ids
    ends: list[int]  # of each one's places

    @classmethod
    def of(cls, ids: Tensor, padding: int | None) -> _Grouped:
        ids = ids.to(torch.int64)
        places = torch.arange(len(ids)) if padding is None else (ids != padding).nonzero().flatten()
        ordered, order = ids[places].sort(stable=True)
        unique, counts = torch.unique_consecutive(ordered, return_counts=True)
        return cls(places[order], unique, counts.cumsum(0).tolist())

    def tiles(self, num_rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """A few ids, the places of their rows, and to which of them each belongs."""
        for first in range(0, len(self.unique), num_rows):
            ids = self.unique[first : first + num_rows]
            begins = [self.ends[first - 1] if first else 0, *self.ends[first : first + len(ids)]]
            counts = torch.tensor([end - begin for begin, end in itertools.pairwise(begins)])
            yield ids, self.places[begins[0] : begins[-1]], torch.repeat_interleave(torch.arange(len(ids)), counts)


def _num_rows(home: Tensor) -> int:
    return max(1, TILE_NUMEL // max(1, home.shape[1]))


def _add(home: Tensor, new: NewRows, ids: Tensor, places: Tensor, which: Tensor) -> float:
    """The square of the new rows' norm."""
    summed = torch.zeros((len(ids), home.shape[1]), dtype=torch.float32)  # whatever the user's default is
    num_rows = _num_rows(home)
    for some, owners in zip(places.split(num_rows), which.split(num_rows), strict=True):
        summed.index_add_(0, owners, new.rows.index_select(0, some).float())
    return _put(home, new, ids, summed if new.starts else home.index_select(0, ids).float().add_(summed))


def _finish(home: Tensor, new: NewRows, ids: Tensor) -> float:
    """Rows to which nothing was added."""
    is_done = new.norm is None and (new.round_to is None or home.dtype == new.round_to)
    return 0.0 if is_done else _put(home, new, ids, home.index_select(0, ids).float())


def _put(home: Tensor, new: NewRows, ids: Tensor, values: Tensor) -> float:
    """Norms are of the sums, before any rounding; but fp16 may overflow in rounding, and the norm must show it."""
    rounded = values if new.round_to is None else values.to(new.round_to)
    home.index_copy_(0, ids, rounded.to(home.dtype))
    if new.norm is None:
        return 0.0
    counted = rounded.float() if new.round_to is torch.float16 else values
    return float(torch.linalg.vector_norm(counted)) ** 2


def _shared(tiles: list[T], work: Callable[[T], float], in_threads: RunInThreads) -> list[float]:
    """The results in the order of the tiles, whoever makes them."""
    results, counter = [0.0] * len(tiles), itertools.count()

    def take(_: int) -> None:
        while (number := next(counter)) < len(tiles):
            results[number] = work(tiles[number])

    in_threads(take, len(tiles))
    return results
