"""What one update reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Operands:
    """Ranges of equally many elements, 1-D and contiguous."""

    master: Tensor  # fp32
    grad: Tensor  # of any floating dtype; it is only read
    moments: tuple[Tensor, ...]  # fp32
    param: Tensor | None = None  # gets the master's new values, rounded. None: the master is the parameter

    def __post_init__(self) -> None:
        for tensor in (self.master, *self.moments):
            assert tensor.dtype == torch.float32, tensor.dtype
        for tensor in (self.master, self.grad, *self.moments, *([] if self.param is None else [self.param])):
            assert tensor.dim() == 1 and tensor.is_contiguous() and len(tensor) == len(self), tensor.shape

    def __len__(self) -> int:
        return len(self.master)

    def __getitem__(self, at: slice) -> Operands:
        param = None if self.param is None else self.param[at]
        return Operands(self.master[at], self.grad[at], tuple(moment[at] for moment in self.moments), param)
