"""A run takes no more of a real GPU than others leave, whatever limit was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hightide
import models
from unit.runtime.steps import adamw, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.alone]  # for the sake of the others: it fills the GPU

GIB = 2**30
LIMITS = hightide.Limits(gpu="16GiB", host="1GiB")


@pytest.fixture
def crowded() -> torch.Tensor:
    """All of the GPU but 8 GiB."""
    return torch.empty(torch.cuda.mem_get_info()[0] - 8 * GIB, dtype=torch.uint8, device="cuda")


def test_a_limit_above_what_is_free_is_lowered(crowded: torch.Tensor) -> None:
    model, batch = models.llama()
    with pytest.warns(UserWarning, match=r"Limits\(gpu\) is 16.0 GiB, but only [78].* of cuda:0 are free"):
        model, optimizer = hightide.wrap(model, adamw(model), batch, limits=LIMITS, device="cuda")
    assert 7 * GIB < hightide.stats(model).plan.gpu_limit_bytes < 8 * GIB, "95% of 8 GiB"
    train_step(model, optimizer, batch)
    hightide.unwrap(model)


def test_a_plan_above_what_is_free_is_kept_and_warned_of(crowded: torch.Tensor) -> None:
    model, batch = models.llama()
    optimizer = adamw(model)
    plan = hightide.plan(model, optimizer, batch, limits=hightide.Limits(gpu="2GiB", host="1GiB"), device="cuda")
    plan = replace(plan, gpu_limit_bytes=16 * GIB)
    with pytest.warns(UserWarning, match="this plan may take 16.0 GiB of the GPU.* it may run out of memory"):
        model, _ = hightide.wrap(model, optimizer, batch, plan=plan, device="cuda")
    assert hightide.stats(model).plan.gpu_limit_bytes == 16 * GIB
    hightide.unwrap(model)
