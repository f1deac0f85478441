"""Models that ask for values, on a real GPU: one pass on values, a block at a time, tells what they need."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hightide
import models
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.peaks import WORKSPACE_BYTES
from hightide.profiler.model.model_profile import profile_model
from unit.runtime.steps import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # the machine may have to be measured first
    pytest.mark.filterwarnings("ignore:the model could not be probed without values"),
]
GIB, MIB = 2**30, 2**20
WIDTH, NUM_LAYERS = 1024, 4
CUDA = torch.device("cuda", 0)


class Asking(nn.Module):
    """Takes the way that a value tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = torch.sin(y) * torch.tanh(y) if y.detach().sum().item() != 1e9 else y
        return x + self.down(y)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Asking() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def stack() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Stack().train(), {"x": torch.randn(16, 1024, WIDTH)}  # 64 MiB


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def leanest(model: nn.Module, batch: Any, **options: Any) -> int:
    """Bytes of GPU that a refusal names."""
    with pytest.raises(InfeasiblePlan) as refused:
        limits = hightide.Limits(gpu=1, host=16 * GIB)
        hightide.plan(model, adamw(model), batch, limits=limits, device="cuda", **options)
    return refused.value.num_bytes


MAKERS: list[Callable[[], Any]] = [models.autoformer, models.switch_transformers, models.nllb_moe]


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_equal_to_plain_pytorch_at_the_tightest_limit(make: Callable[[], Any], update: str) -> None:
    model, batch = make()
    plain = copy.deepcopy(model).cuda()
    plain_optimizer = adamw(plain)
    on_gpu = {name: value.cuda() for name, value in batch.items()}
    limits = hightide.Limits(gpu=leanest(model, batch, update=update), host=GIB)
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, update=update, device="cuda")
    for _ in range(4):
        loss, expected = train_step(model, optimizer, batch), train_step(plain, plain_optimizer, on_gpu)
        assert abs(loss.item() - expected.item()) <= 1e-5 * abs(expected.item())
    weights = model.state_dict()
    for name, weight in plain.state_dict().items():
        bound = 1e-4 * weight.abs().max().item() + 1e-5
        assert (weights[name].cuda() - weight).abs().max().item() <= bound, name
    run = hightide.stats(model)
    assert run.peak_bytes["gpu"] <= run.plan.gpu_limit_bytes
    hightide.unwrap(model)


@pytest.mark.parametrize("lean", [False, True])
def test_the_forecast_is_what_is_needed(lean: bool) -> None:
    model, batch = stack()
    gpu_bytes = leanest(model, batch) if lean else 64 * GIB
    limits = hightide.Limits(gpu=gpu_bytes, host=16 * GIB)
    model, optimizer = hightide.wrap(model, adamw(model), batch, limits=limits, device="cuda")
    assert "as in one pass on values" in hightide.stats(model).plan.explain()
    with hightide.record(model) as recording:
        for _ in range(3):
            train_step(model, optimizer, batch)
    run, peak_bytes = hightide.stats(model), recording.timeline.gpu_peak_bytes
    told_bytes = run.forecast.gpu_peak_bytes
    print(f"lean={lean}: {peak_bytes / MIB:.0f} MiB allocated, {told_bytes / MIB:.0f} MiB forecast")
    assert peak_bytes <= told_bytes + WORKSPACE_BYTES
    assert told_bytes <= 1.15 * peak_bytes
    assert run.peak_bytes["gpu"] <= run.plan.gpu_limit_bytes
    hightide.unwrap(model)


def test_the_pass_leaves_nothing_on_the_gpu_and_never_holds_more_than_a_block() -> None:
    model, batch = stack()
    random_state = torch.cuda.get_rng_state(CUDA)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.ones(64, 64, device=CUDA).matmul(torch.ones(64, 64, device=CUDA))  # libraries keep a workspace
    held_bytes = torch.cuda.memory_allocated()
    profile, probed = profile_model(model, None, batch, device=CUDA)
    assert profile.on_values and probed.on_values
    assert torch.cuda.memory_allocated() <= held_bytes + WORKSPACE_BYTES
    assert torch.equal(torch.cuda.get_rng_state(CUDA), random_state)
    assert all(param.device.type == "cpu" and param.grad is None for param in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_blocks_are_counted_as_on_the_simulated_accelerator() -> None:
    """The meter and torch's allocator see the same tensors; kernels may take more inside, and sizes are rounded."""
    model, batch = stack()
    on_gpu, _ = profile_model(model, None, batch, device=CUDA)
    on_cpu, _ = profile_model(model, None, batch)
    for here, there in zip(on_gpu.calls, on_cpu.calls, strict=True):
        assert here.outputs == there.outputs and here.kept == there.kept
        for name in ("forward_peak", "backward_peak"):
            taken, counted = getattr(here, name).at(16), getattr(there, name).at(16)
            assert 0.98 * counted <= taken <= 1.1 * counted + 2 * MIB, name


def test_a_limit_below_the_leanest_is_refused_and_the_model_is_as_before() -> None:
    model, batch = stack()
    optimizer, least_bytes = adamw(model), leanest(model, batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    limits = hightide.Limits(gpu=least_bytes - 16 * MIB, host=16 * GIB)
    with pytest.raises(InfeasiblePlan, match="missing on the gpu"):
        hightide.wrap(model, optimizer, batch, limits=limits, device="cuda")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.device.type == "cpu" for param in model.parameters())
