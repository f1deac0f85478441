"""What the model's own code keeps between blocks is in the forecast, on a real GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hightide
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.peaks import WORKSPACE_BYTES
from unit.runtime.steps import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # the machine may have to be measured first

GIB = 2**30
WIDTH, NUM_LAYERS = 1024, 4
ROOMY = hightide.Limits(gpu=64 * GIB, host=16 * GIB)


class Between(nn.Module):
    """Its blocks are bare products; all that a transformer layer does besides is done outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.1)
        return {"loss": x.square().mean()}


@pytest.mark.parametrize("lean", [False, True])
def test_the_forecast_has_what_is_kept_between_blocks(lean: bool) -> None:
    torch.manual_seed(0)
    model, batch = Between().train(), {"x": torch.randn(16, 1024, WIDTH)}  # 64 MiB
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    limits = ROOMY
    if lean:
        with pytest.raises(InfeasiblePlan) as refused:
            hightide.plan(model, optimizer, batch, limits=hightide.Limits(gpu=1, host=16 * GIB), device="cuda")
        limits = hightide.Limits(gpu=refused.value.num_bytes, host=16 * GIB)
    model, optimizer = hightide.wrap(model, optimizer, batch, limits=limits, device="cuda")
    for _ in range(3):
        train_step(model, optimizer, batch)
    torch.cuda.synchronize()
    told = hightide.stats(model).forecast
    assert told.gpu_reserved_bytes is not None and told.gpu_bytes == told.gpu_reserved_bytes > told.gpu_peak_bytes
    forecast = told.gpu_peak_bytes
    peak = torch.cuda.max_memory_allocated()
    print(f"lean={lean}: {peak / 2**20:.0f} MiB allocated, {forecast / 2**20:.0f} MiB forecast")
    hightide.unwrap(model)
    assert peak <= forecast + WORKSPACE_BYTES
