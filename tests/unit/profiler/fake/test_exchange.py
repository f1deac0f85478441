from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hightide.profiler.fake.exchange import exchange


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2))
        self.flat = [self.first.weight, "a name", self.scale]


def test_tied_parameters_stay_tied_and_lists_name_the_others() -> None:
    model = Tied()
    before = [model.first.weight, model.first.bias, model.second.bias, model.scale]
    others = exchange(list(model.modules()), lambda tensor: nn.Parameter(tensor + 1) if tensor.ndim == 2 else None)
    assert list(others) == [id(before[0])] and model.first.weight is model.second.weight is others[id(before[0])]
    assert model.first.bias is before[1] and model.scale is before[3]
    assert model.flat[0] is model.first.weight and model.flat[1:] == ["a name", before[3]]
    back = {id(other): before[0] for other in others.values()}
    exchange(list(model.modules()), lambda tensor: back.get(id(tensor)))
    assert model.first.weight is model.second.weight is model.flat[0] is before[0]


def test_nothing_is_touched_where_one_of_them_cannot_be_made() -> None:
    model = Tied()
    before = [*model.parameters(), *model.buffers()]

    def fails_at_the_last(tensor: Tensor) -> Tensor:
        if tensor is model.second.bias:
            raise MemoryError
        return tensor.detach().clone()

    with pytest.raises(MemoryError):
        exchange(list(model.modules()), fails_at_the_last)
    assert all(now is then for now, then in zip([*model.parameters(), *model.buffers()], before, strict=True))
