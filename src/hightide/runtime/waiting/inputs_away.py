"""Inputs of a call that wait for its backward on the host, or on disk."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hightide.runtime.waiting.activations import Stash, Stashes
from hightide.runtime.waiting.held import Held


class InputsAway:
    def __init__(self, num_inputs: int) -> None:
        self.which = [False] * num_inputs
        self._orders: list[tuple[int, ...] | None] = [None] * num_inputs  # of their dimensions in memory
        self._stash: Stash | None = None

    def choose(self, tensors: Sequence[Tensor], which: Sequence[bool], is_whole: bool) -> list[Tensor]:
        """The inputs, such as they can leave. What comes back lies in memory as it did: dropout fills memory in its
        order. Of several micro-batches it is contiguous, so it leaves so."""
        self.which = list(which)
        leaving = [
            tensor.resolve_conj().resolve_neg() if away else tensor  # what no byte says does not leave
            for tensor, away in zip(tensors, which, strict=True)
        ]
        if is_whole:
            self._orders = [_order_in_memory(tensor) for tensor in leaving]
        return [
            tensor if not away or order else tensor.contiguous()
            for tensor, away, order in zip(leaving, which, self._orders, strict=True)
        ]

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor for tensor, away in zip(tensors, self.which, strict=True) if away]

    def leave(
        self, stashes: Stashes, call: int, tensors: Sequence[Tensor], held: Sequence[Held], on_disk: bool
    ) -> None:
        """With what the block holds."""
        leaving = [
            (tensor, order) for tensor, order, away in zip(tensors, self._orders, self.which, strict=True) if away
        ]
        away = [tensor if order is None else tensor.permute(order) for tensor, order in leaving]
        self._stash = stashes.register(call, away, held, on_disk)

    def back(self, stashes: Stashes, here: Sequence[Tensor]) -> list[Tensor]:
        """All inputs. `here`: those that have stayed."""
        staying = iter(here)
        away = iter(stashes.consume(self._stash) if self._stash is not None else ())
        return [
            _in_order(next(away), order) if is_away else next(staying)
            for is_away, order in zip(self.which, self._orders, strict=True)
        ]

    def release(self, stashes: Stashes) -> None:
        if self._stash is not None:
            stashes.release(self._stash)


def _order_in_memory(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor is contiguous; None: as it is, or in none."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return order if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else None


def _in_order(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Back from the order in memory."""
    if order is None:
        return tensor
    return tensor.permute(sorted(range(len(order)), key=order.__getitem__))
