"""What one update reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hightide.runtime.remainder import join


@dataclass(frozen=True)
class Operands:
    """Ranges of equally many elements, 1-D and contiguous. The master is one of three: the fp32 parameter itself, an
    fp32 copy of which the parameter is the rounded image, or a bf16 parameter and its remainder (then it is None; see
    [Note: masters in two parts])."""

    master: Tensor | None  # fp32
    grad: Tensor  # of any floating dtype; it is only read
    moments: tuple[Tensor, ...]  # fp32
    param: Tensor | None = None  # gets the master's new values, rounded. None: the master is the parameter
    remainder: Tensor | None = None  # int16

    def __post_init__(self) -> None:
        for tensor in (*([] if self.master is None else [self.master]), *self.moments):
            assert tensor.dtype == torch.float32, tensor.dtype
        assert (self.master is None) == (self.remainder is not None)
        if self.remainder is not None:
            assert self.param is not None and self.param.dtype == torch.bfloat16 and self.remainder.dtype == torch.int16
        numel = self.grad.numel()
        for tensor in self._arrays():
            assert tensor.dim() == 1 and tensor.is_contiguous() and tensor.numel() == numel, tensor.shape

    def master_values(self) -> Tensor:
        """The master; put together, if it is in two parts."""
        if self.master is not None:
            return self.master
        assert self.param is not None and self.remainder is not None
        return join(self.param, self.remainder)

    @property
    def touched_bytes(self) -> int:
        """Each array once."""
        return sum(tensor.nbytes for tensor in self._arrays())

    def _arrays(self) -> Iterator[Tensor]:
        every = (self.master, self.grad, *self.moments, self.param, self.remainder)
        return (tensor for tensor in every if tensor is not None)

    def __len__(self) -> int:
        return self.grad.numel()

    def __getitem__(self, at: slice) -> Operands:
        master, param, remainder = (
            None if tensor is None else tensor[at] for tensor in (self.master, self.param, self.remainder)
        )
        return Operands(master, self.grad[at], tuple(moment[at] for moment in self.moments), param, remainder)
