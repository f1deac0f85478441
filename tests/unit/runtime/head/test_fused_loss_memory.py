"""The forecast of the fused loss bounds what the accelerator holds, and is close, where logits are the peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hightide
import models
from each_value import each_value
from hightide.ir.action import Mode
from hightide.ir.plan import Plan
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.predict.peaks import peaks
from hightide.profiler.model.model_profile import is_plain_linear
from hightide.runtime.surgery import run_of

VOCABULARY, NUM_SAMPLES, NUM_TOKENS = 3000, 6, 40
NUM_ROWS = NUM_SAMPLES * NUM_TOKENS
LIMITS = hightide.Limits(gpu="64MiB", host="64MiB")


class ScaledHead(nn.Linear):
    """More than an nn.Linear: autograd has to go through it."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * 0.5


def language_model(dtype: torch.dtype, soft_cap: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    options = {**models._llama_options(False, 1, 0.0), "vocab_size": VOCABULARY}
    if soft_cap:
        config = transformers.Gemma2Config(**options, head_dim=8, final_logit_softcapping=5.0)
        model = transformers.Gemma2ForCausalLM(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    tokens = torch.randint(3, VOCABULARY, (NUM_SAMPLES, NUM_TOKENS))
    return model.train().to(dtype), {"input_ids": tokens, "labels": tokens.clone()}


def forecast_and_peak(
    model: nn.Module, batch: dict[str, Any], tile_tokens: int, kept_tokens: int, in_forward: bool = False
) -> tuple[int, int]:
    """Of what activations and logits take: chunks and batch, which are exact, are left out."""
    optimizer = torch.optim.AdamW(model.parameters())
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=2)
    plan = replace(plan, loss_tile_tokens=tile_tokens, loss_kept_tokens=kept_tokens, loss_in_forward=in_forward)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan)
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run = run_of(model)
    assert run is not None
    forecast = peaks(run.executor.programs[Mode.TRAIN].schedule).gpu_peak_bytes
    peak = run.gpu.peak_breakdown()
    others = sum(num_bytes for label, num_bytes in peak.items() if label != "activations")
    hightide.unwrap(model)
    return forecast - others, peak["activations"]


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    each_value(
        ((NUM_ROWS, 0), (64, 0), (64, 64), (64, 130), (64, NUM_ROWS), (NUM_ROWS, NUM_ROWS)),
        (torch.float32, torch.bfloat16),
    ),
)
def test_the_forecast_bounds_the_peak_of_the_loss_within_a_tenth(tokens: tuple[int, int], dtype: torch.dtype) -> None:
    """`tokens`: in a tile, and kept."""
    model, batch = language_model(dtype)
    forecast, peak = forecast_and_peak(model, batch, *tokens)
    assert peak <= forecast <= 1.1 * peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_tokens", [NUM_ROWS, 64])
def test_the_forecast_bounds_the_peak_of_a_loss_whose_gradients_are_made_in_forward(
    dtype: torch.dtype, tile_tokens: int
) -> None:
    model, batch = language_model(dtype)
    forecast, peak = forecast_and_peak(model, batch, tile_tokens, 0, in_forward=True)
    assert peak <= forecast <= 1.1 * peak


@pytest.mark.parametrize("tile_tokens", [NUM_ROWS, 64])
def test_the_forecast_bounds_recorded_operations(tile_tokens: int) -> None:
    """Soft-capping needs an inner graph, in the same scratch."""
    model, batch = language_model(torch.float32, soft_cap=True)
    forecast, peak = forecast_and_peak(model, batch, tile_tokens, 0)
    assert peak <= forecast <= 1.35 * peak


def test_the_forecast_bounds_a_head_that_is_more_than_linear() -> None:
    model, batch = language_model(torch.float32)
    assert is_plain_linear(model.lm_head)
    model.lm_head.__class__ = ScaledHead
    assert not is_plain_linear(model.lm_head)
    forecast, peak = forecast_and_peak(model, batch, 64, 0)
    assert peak <= forecast <= 1.5 * peak
    optimizer = torch.optim.AdamW(model.parameters())
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=2)
    assert plan.loss_kept_tokens == 0 and not plan.loss_in_forward
    with pytest.raises(InfeasiblePlan, match="loss_in_forward is true, but this model has no head"):
        hightide.wrap(model, optimizer, batch, plan=replace(plan, loss_in_forward=True))
    with pytest.raises(InfeasiblePlan, match=r"loss_kept_tokens is 64, but the head \(ScaledHead\) is more"):
        hightide.wrap(model, optimizer, batch, plan=replace(plan, loss_kept_tokens=64))


def test_a_parametrised_weight_is_no_plain_linear() -> None:
    weight_norm = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    assert not is_plain_linear(weight_norm)
    assert is_plain_linear(nn.Linear(3, 3, bias=False))


def test_kept_tokens_below_zero_are_refused_and_plans_without_them_load(tmp_path: Any) -> None:
    model, batch = language_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=2)
    assert plan.loss_in_forward and plan.loss_kept_tokens == 0  # there is room, and that takes less than all logits
    assert "its gradients made in forward" in plan.explain()
    with pytest.raises(InfeasiblePlan, match="loss_kept_tokens is 64, but with loss_in_forward no logits wait"):
        hightide.wrap(model, optimizer, batch, plan=replace(plan, loss_kept_tokens=64))
    plan = replace(plan, loss_in_forward=False, loss_kept_tokens=NUM_ROWS)
    with pytest.raises(InfeasiblePlan, match="loss_kept_tokens is -1"):
        hightide.wrap(model, optimizer, batch, plan=replace(plan, loss_kept_tokens=-1))
    path = tmp_path / "plan.json"
    plan.save(path)
    lines = [line for line in path.read_text().splitlines() if "loss_kept" not in line and "loss_in_" not in line]
    text = "\n".join(lines)
    path.write_text(text.replace('",\n}', '"\n}'))
    assert Plan.load(path).loss_kept_tokens == 0 and not Plan.load(path).loss_in_forward


@pytest.mark.parametrize("in_forward", [False, True])
def test_weights_that_are_written_to_before_backward_are_refused(in_forward: bool) -> None:
    """As in plain PyTorch, whose graph has saved them. The head stays on the GPU here, so that one can."""
    model, batch = language_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = hightide.plan(model, optimizer, batch, limits=LIMITS, micro_batch=2)
    plan = replace(plan, loss_kept_tokens=0, loss_in_forward=in_forward)
    model, optimizer = hightide.wrap(model, optimizer, batch, plan=plan)
    for _ in range(2):  # what hightide itself does to them is nothing
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = model(**batch).loss
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(hightide.Refused, match="updated or written to after these logits were made"):
        loss.backward()
    hightide.unwrap(model)
