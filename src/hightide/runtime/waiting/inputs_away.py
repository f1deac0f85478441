"""Inputs of a call that wait for its backward on the host, or on disk."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import Tensor

from hightide.runtime.waiting.activations import Stash, Stashes
from hightide.runtime.waiting.held import Held, address_of

OFF_PLAN = -1  # in the place of a call


class InputsAway:
    def __init__(self, num_inputs: int) -> None:
        self.which = [False] * num_inputs
        self._orders: list[tuple[int, ...] | None] = [None] * num_inputs  # of their dimensions in memory
        self._stash: Stash | None = None
        self._later: Stash | None = None  # what followed off the plan
        self._is_put_away = False

    def choose(self, tensors: Sequence[Tensor], which: Sequence[bool], is_whole: bool) -> list[Tensor]:
        """The inputs, such as they can leave. What comes back lies in memory as it did: dropout fills memory in its
        order. Of several micro-batches it is contiguous, so it leaves so."""
        # Nothing would leave of a tensor without elements (no token of the batch is masked).
        self.which = [away and tensor.numel() > 0 for tensor, away in zip(tensors, which, strict=True)]
        leaving = [
            tensor.resolve_conj().resolve_neg() if away else tensor  # what no byte says does not leave
            for tensor, away in zip(tensors, self.which, strict=True)
        ]
        if is_whole:
            self._orders = [_order_in_memory(tensor) for tensor in leaving]
        return [
            tensor if not away or order else tensor.contiguous()
            for tensor, away, order in zip(leaving, self.which, self._orders, strict=True)
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

    def to_put_away(
        self,
        stashes: Stashes,
        here: Sequence[Tensor],
        held: Sequence[Held],
        staying: Container[int | None],
        is_whole: bool,
    ) -> tuple[list[bool], list[Stash]]:
        """What has stayed is to follow, off the plan: `here`, those of the inputs that are not away. `staying`:
        addresses of memory that is somebody else's. Returns which inputs leave now, and with what."""
        stays = [False] * len(self.which)
        if self._is_put_away or self._stash is not None:  # all that is wide among the inputs
            if not self._is_put_away:
                self._later = stashes.register(OFF_PLAN, [], held)
            self._is_put_away = True
            return stays, [stash for stash in (self._stash, self._later) if stash is not None]
        self._is_put_away = True
        self._orders = [_order_in_memory(tensor) if is_whole else None for tensor in here]
        self.which = [
            (tensor.is_contiguous() or order is not None) and _is_plain(tensor) and address_of(tensor) not in staying
            for tensor, order in zip(here, self._orders, strict=True)
        ]
        self.leave(stashes, OFF_PLAN, here, held, on_disk=False)
        assert self._stash is not None
        return self.which, [self._stash]

    def back(self, stashes: Stashes, here: Sequence[Tensor]) -> list[Tensor]:
        """All inputs. `here`: those that have stayed."""
        if self._later is not None:
            stashes.consume(self._later)
        staying = iter(here)
        away = iter(stashes.consume(self._stash) if self._stash is not None else ())
        return [
            _in_order(next(away), order) if is_away else next(staying)
            for is_away, order in zip(self.which, self._orders, strict=True)
        ]

    def release(self, stashes: Stashes) -> None:
        for stash in (self._stash, self._later):
            if stash is not None:
                stashes.release(stash)


def _is_plain(tensor: Tensor) -> bool:
    """Its bytes are all that there is of it."""
    return type(tensor) is Tensor and tensor.numel() > 1 and not (tensor.is_conj() or tensor.is_neg())


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
