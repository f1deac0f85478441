"""What the first call of a block at real size shows."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import hightide

ROOM = hightide.Limits(gpu="4MiB", host="4MiB")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Crowded(Block):
    """Mixes samples where there are many: a trial with three does not see it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0) if len(x) > 4 else x)


def trained(block: type[Block], dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    plain = nn.Sequential(block(), block(), block()).to(dtype)
    model, x = copy.deepcopy(plain), torch.randn(6, 8, dtype=dtype)
    expected, optimizer = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model))
    model, optimizer = hightide.wrap(model, optimizer, x, limits=ROOM, micro_batch=2)
    for one, its in ((plain, expected), (model, optimizer)):
        for _ in range(3):
            one(x).square().mean().backward()
            its.step()
            its.zero_grad()
    return plain.state_dict(), model.state_dict()


def test_samples_that_meet_only_in_a_large_batch_are_found() -> None:
    with pytest.warns(UserWarning, match="runs the whole batch at once: split at its real size"):
        expected, found = trained(Crowded)
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_clean_block_stays_split_in_every_dtype(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = trained(Block, dtype)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    assert all(torch.allclose(found[name], value, atol=tolerance) for name, value in expected.items())


class Hungry(Block):
    """Has no room for two samples beside all of them, as a GPU says it."""

    is_wrapped = False

    def forward(self, x: Tensor) -> Tensor:
        if Hungry.is_wrapped and len(x) == 2 and not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return super().forward(x)


def test_a_try_that_runs_out_of_memory_says_nothing_about_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(Hungry(), Hungry()), torch.randn(6, 8)
    model, optimizer = hightide.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), x, limits=ROOM, micro_batch=2)
    monkeypatch.setattr(Hungry, "is_wrapped", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that it runs the whole batch at once
        model(x).square().mean().backward()
        optimizer.step()
    hightide.unwrap(model)
