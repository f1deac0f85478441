"""Which accelerator `wrap` means on one of several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hightide
import hightide.api
import hightide.asked


class Asked(Exception):
    """Raised in the place of looking for other ranks."""


@pytest.mark.parametrize(
    ("device", "asked"), [(None, "cuda"), ("cuda", "cuda"), ("cuda:2", torch.device("cuda", 2)), ("cpu", "cpu")]
)
def test_any_gpu_is_one_for_each_rank(device: str | None, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def find(group: Any, device: Any, *_: Any) -> None:
        found.append(device)
        raise Asked

    monkeypatch.setattr(hightide.asked, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(hightide.api, "find_ranks", find)
    model = nn.Linear(2, 2)
    with pytest.raises(Asked):
        hightide.wrap(model, torch.optim.SGD(model.parameters()), torch.ones(1, 2), device=device)
    assert [str(one) for one in found] == [str(asked)]
