"""Values of a plain PyTorch pair, handed out as by a run's snapshot. Nobody watches its updates: it is read at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hightide.checkpoint.training import STEP, is_value, names_of
from hightide.runtime.saving.tiles import PARAM, SaveCost, SavedTensor, Wanted

PART_BYTES = 16 * 1024**2


class PlainValues:
    cost = SaveCost()
    lend = None  # no limit counts here

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, wanted: Wanted) -> None:
        names = names_of(model)
        found = [(name, PARAM, param.data) for name, param in model.named_parameters()]
        for param, state in ({} if optimizer is None else optimizer.state).items():
            if id(param) in names:
                found += [
                    (names[id(param)], kind, value)
                    for kind, value in state.items()
                    if kind != STEP and is_value(param, value)
                ]
        self._found = [
            (SavedTensor(key, kind, value.dtype, tuple(value.shape)), value)
            for key, kind, value in found
            if wanted(key, kind)
        ]
        self.tensors = tuple(tensor for tensor, _ in self._found)

    def tiles(self) -> Iterator[tuple[Sequence[tuple[SavedTensor, int, Tensor]], Callable[[], object]]]:
        for tensor, value in self._found:
            flat, first = value.detach().resolve_conj().resolve_neg().contiguous().view(-1), 0
            for part in flat.split(max(1, PART_BYTES // value.dtype.itemsize)) or (flat,):
                yield [(tensor, first, part.cpu())], lambda: None
                first += len(part)

    def close(self) -> None:
        self._found = []
