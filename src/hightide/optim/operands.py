"""The arrays that one update reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from hightide.runtime.chunks.remainder import join


class Part(IntEnum):
    """What of an update is to be done. The numbers are those of kernels/elements.h."""

    WHOLE = 0
    PARAMS = 1  # and their masters; the states stay as they are
    STATES = 2  # what PARAMS has left


@dataclass(frozen=True)
class Operands:
    """Ranges of equally many elements, 1-D and contiguous. The master is one of three: the fp32 parameter itself, an
    fp32 copy of which the parameter is the rounded image, or a bf16 parameter and its remainder (then it is None; see
    [Note: masters in two parts])."""

    master: Tensor | None  # fp32
    grad: Tensor  # of any floating dtype; it is only read
    states: tuple[Tensor, ...]  # of the dtypes that the rule has declared
    param: Tensor | None = None  # gets the master's new values, rounded. None: the master is the parameter
    remainder: Tensor | None = None  # int16
    per_numel: tuple[int, ...] = ()  # elements of the range for each element of a state, where that is not 1 for all

    def __post_init__(self) -> None:
        assert self.master is None or self.master.dtype == torch.float32, self.master.dtype
        assert len(self.per_numel) in (0, len(self.states))
        assert (self.master is None) == (self.remainder is not None)
        if self.remainder is not None:
            assert self.param is not None and self.param.dtype == torch.bfloat16 and self.remainder.dtype == torch.int16
        numel = self.grad.shape[0]
        for tensor in (self.master, self.grad, self.param, self.remainder):
            assert tensor is None or (tensor.shape == (numel,) and tensor.is_contiguous()), tensor.shape
        for at, state in enumerate(self.states):
            part = -(-numel // self.per_numel[at]) if self.per_numel else numel
            assert state.shape == (part,) and state.is_contiguous(), state.shape

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
        every = (self.master, self.grad, *self.states, self.param, self.remainder)
        return (tensor for tensor in every if tensor is not None)

    def _shares(self) -> Iterator[tuple[Tensor, int]]:
        return zip(self.states, self.per_numel or (1,) * len(self.states), strict=True)

    def __len__(self) -> int:
        return self.grad.numel()

    def __getitem__(self, at: slice) -> Operands:
        master, param, remainder = (
            None if tensor is None else tensor[at] for tensor in (self.master, self.param, self.remainder)
        )
        start, stop, _ = at.indices(len(self))
        states = tuple(state[start // per_numel : -(-stop // per_numel)] for state, per_numel in self._shares())
        return Operands(master, self.grad[at], states, param, remainder, self.per_numel)
