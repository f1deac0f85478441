"""A model comes back to the device on which it was before, whole."""

from __future__ import annotations

import gc

import pytest
import torch

import hightide
from whole.test_unwrap import check_unwrapped

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("before", ["cpu", "cuda"])
def test_everything_ends_on_the_device_where_the_model_was(before: str) -> None:
    check_unwrapped(before, "cuda")


def test_the_memory_is_free_again_although_the_optimizer_lives() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    batch = torch.randn(4, 1024)
    before_bytes = torch.cuda.memory_allocated()
    limits = hightide.Limits(gpu="512MiB", host="512MiB")
    model, optimizer = hightide.wrap(model, torch.optim.AdamW(model.parameters()), batch, limits=limits, device="cuda")
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.cuda.memory_allocated() > before_bytes + 2**20
    hightide.unwrap(model)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream that has multiplied
    assert torch.cuda.memory_allocated() <= before_bytes + 2**20
    del optimizer
