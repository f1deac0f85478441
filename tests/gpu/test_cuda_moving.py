"""A run goes on under another plan, on a real GPU: pinned memory and the slab are given back and taken again."""

from __future__ import annotations

import pytest
import torch

import hightide
from unit.runtime.steps import train_step
from unit.runtime.test_moving import KINDS, move, placed, states, wrapped

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [(a, b) for a in KINDS for b in KINDS if a != b])
def test_nothing_is_lost_on_the_way_and_training_goes_on(before: str, after: str, dtype: torch.dtype) -> None:
    model, optimizer, run, batch = wrapped(before, dtype, "cuda")
    losses = [train_step(model, optimizer, batch).item() for _ in range(3)]
    there = states(model, optimizer)
    move(run, placed(run.plan, after))
    assert all(torch.equal(old, new) for old, new in zip(there, states(model, optimizer), strict=True))
    losses += [train_step(model, optimizer, batch).item() for _ in range(3)]
    assert losses[-1] < losses[2] < losses[0] and hightide.stats(model).deviations == 0
    hightide.unwrap(model)
