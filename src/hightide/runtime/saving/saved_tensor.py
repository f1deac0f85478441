"""One tensor that a save hands out, and what a save costs training."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

PARAM = "param"


@dataclass(frozen=True)
class SavedTensor:
    """A whole logical tensor: a parameter, or one of the arrays that its updates keep."""

    key: str  # of the parameter
    kind: str  # PARAM, or the name of a state
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SaveCost:
    """To training, so far."""

    waited_s: float = 0.0  # in which updates, or others who change values, have waited for the reader
    copied_bytes: int = 0  # that went aside first, because they were about to change or to be read from elsewhere
