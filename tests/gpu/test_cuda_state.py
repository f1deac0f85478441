"""States of a run that fills the GPU are read and written without room on the GPU."""

from __future__ import annotations

import pytest
import torch

import hightide
import models

pytestmark = pytest.mark.gpu


def test_state_dicts_take_no_memory_on_the_gpu() -> None:
    model, batch = models.llama(num_layers=2)
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=hightide.Limits(gpu="1GiB", host="1GiB"))
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    states = optimizer.state_dict()
    optimizer.load_state_dict(states)
    model.load_state_dict(weights)
    largest = max(value.numel() for value in weights.values())
    assert torch.cuda.max_memory_allocated() - before < 4 * largest
    assert all(value.device.type == "cpu" for value in states["hightide_masters"].values())
    hightide.unwrap(model)
