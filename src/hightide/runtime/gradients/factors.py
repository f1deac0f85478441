"""What gradients still have to be multiplied by when they are used: a number, or one on its way from the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from hightide.runtime.lanes.lanes import EventFence
from hightide.stores.ticket import Ticket


class HostNumber:
    """A number on its way from the GPU. `float` waits until it is there."""

    def __init__(self, value: Tensor) -> None:
        self._of = value  # its id is the key under which this is found: it must live as long
        self._number = torch.empty((), dtype=value.dtype, pin_memory=True)
        self._number.copy_(value, non_blocking=True)
        self._arrived = EventFence(torch.cuda.current_stream(value.device))
        self.ticket = Ticket.completed("a factor", fence=self._arrived)

    def __float__(self) -> float:
        self._arrived.synchronize()
        return self._number.item()


class GivenFactor:
    """The latest number on the GPU that gradients were multiplied by. They are multiplied later, and whoever has given
    it may write over it before: so they get a copy, one for all that were given the same."""

    def __init__(self) -> None:
        self._given: Tensor | None = None
        self._version = 0
        self._copy: Tensor | None = None

    def copy_of(self, factor: Tensor) -> Tensor:
        version = -1 if factor.is_inference() else factor._version  # writes to such a tensor are not counted
        if self._copy is None or factor is not self._given or version != self._version or version < 0:
            self._given, self._version, self._copy = factor, version, factor.detach().clone()
        return self._copy

    def forget(self) -> None:
        self._given = self._copy = None


Factor = float | Tensor | HostNumber


def scale(value: Tensor, factor: float | Tensor) -> None:
    """In place."""
    if isinstance(factor, float) and factor == 0.0:
        value.zero_()  # not a product: zero times infinity is NaN, and the user asked for zero
    else:
        value.mul_(factor)
