"""Factors by which gradients are multiplied when they are used: a number, or one on its way from the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from hightide.runtime.lanes.fences import EventFence, present_stream
from hightide.stores.ticket import Ticket


class HostNumber:
    """A number on its way from the GPU. `float` waits until it is there."""

    def __init__(self, value: Tensor) -> None:
        self._of = value  # its id is the key under which this is found: it must live as long
        self._number = torch.empty((), dtype=value.dtype, pin_memory=True)
        self._number.copy_(value, non_blocking=True)
        self._arrived = EventFence(*present_stream(value.device))
        self.ticket = Ticket.completed("a factor", fence=self._arrived)

    def __float__(self) -> float:
        self._arrived.synchronize()
        return self._number.item()


Factor = float | Tensor | HostNumber


class Factors:
    """Numbers on the GPU by which users scale gradients. They are kept as they are now: their owner may change them
    before an update reads them. What all gradients are scaled by in turn is kept once, so that neighbours update as one
    range, and one number comes to the host."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, int | None, Tensor] | None = None  # the user's, its version, and the copy
        self._product: tuple[float | Tensor, float | Tensor, float | Tensor] | None = None

    def kept(self, given: Tensor) -> Tensor:
        version = None if given.is_inference() else given._version  # None: nobody knows who writes to it
        known = self._kept
        if known is None or version is None or known[0] is not given or known[1] != version:
            known = self._kept = given, version, given.detach().clone()
        return known[2]

    def product(self, one: float | Tensor, two: float | Tensor) -> float | Tensor:
        known = self._product
        if known is None or not (_is_same(known[0], one) and _is_same(known[1], two)):
            known = self._product = one, two, one * two
        return known[2]


def _is_same(one: float | Tensor, two: float | Tensor) -> bool:
    return one is two or (isinstance(one, float) and isinstance(two, float) and one == two)


def scale(value: Tensor, factor: float | Tensor) -> None:
    """In place."""
    if isinstance(factor, float) and factor == 0.0:
        value.zero_()  # not a product: zero times infinity is NaN, and the user asked for zero
    else:
        value.mul_(factor)
