"""The speed of light of a step: what is needed, and nothing that is repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import models
from hightide.doctor.known import load_machine
from hightide.ir.block import Affine, ModelProfile, Work
from hightide.ir.machine import SIMULATED, Estimate
from hightide.planner.predict.light import light_s, main_dtype, needed_flop
from hightide.profiler.model.model_profile import profile_calls
from unit.planner.predict.test_step_seconds import with_gpu
from unit.planner.profiles import stack

MACHINE = with_gpu(1e9, 1e9)


def profile_of(model: torch.nn.Module, batch: object) -> ModelProfile:
    return profile_calls(model, torch.optim.AdamW(model.parameters()), batch)[0]  # type: ignore[arg-type]


def test_a_model_needs_what_its_definition_says_and_the_head_is_in_it() -> None:
    model, batch = models.llama()
    config, (num_samples, length) = model.config, batch["input_ids"].shape
    looked_up = model.get_input_embeddings().weight.numel()
    numel = sum(param.numel() for name, param in model.named_parameters() if param.dim() == 2) - looked_up
    products = 6 * numel * num_samples * length
    # Scores and values forward; backward the gradients of both twice, and the scores once more.
    attention = 2 * 7 * num_samples * length**2 * config.hidden_size * config.num_hidden_layers
    found = needed_flop(profile_of(model, batch), num_samples)
    assert products < found <= products + attention
    assert found - products in (attention, attention // 2), "a causal one counts half"


def test_half_the_samples_need_half_of_it() -> None:
    profile = profile_of(*models.llama())
    assert needed_flop(profile, 2) == 2 * needed_flop(profile, 1)


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    model, batch = models.llama()
    whole = needed_flop(profile_of(model, batch), 1)
    for name, param in model.named_parameters():
        param.requires_grad_("embed" in name)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    assert 0.6 < needed_flop(profile_calls(model, optimizer, batch)[0], 1) / whole < 0.75


def test_what_is_recomputed_is_not_needed() -> None:
    work, twice = Work(Affine(0, 100)), Work(Affine(0, 200))
    calls = tuple(replace(call, forward=work, recompute=work, backward=twice) for call in stack(2).calls)
    calls = (replace(calls[0], needs_backward=False), *calls[1:])
    assert needed_flop(replace(stack(2), calls=calls), 3) == 3 * (100 + 300 * (len(calls) - 1))


@pytest.mark.parametrize(("dtype", "rate"), [("bfloat16", 2e9), ("float32", 1e9), ("float64", None)])
def test_the_rate_is_that_of_most_parameters(dtype: str, rate: float | None) -> None:
    profile = stack(2, dtype=dtype)
    assert main_dtype(profile) == dtype
    expected = None if rate is None else pytest.approx(needed_flop(profile, 4) / rate)
    assert light_s(profile, 4, MACHINE) == expected


def test_without_a_gpu_or_without_counted_work_there_is_no_speed_of_light() -> None:
    profile = stack()
    uncounted = tuple(replace(call, forward=Work(), backward=Work()) for call in profile.calls)
    assert light_s(profile, 4, MACHINE) and light_s(replace(profile, calls=uncounted), 4, MACHINE) is None
    assert MACHINE.gpu is not None
    for other in (replace(MACHINE, gpu=None), replace(MACHINE, gpu=replace(MACHINE.gpu, name=SIMULATED))):
        assert light_s(profile, 4, other) is None


def test_only_what_was_measured_counts_as_measured() -> None:
    assert MACHINE.measured_products is MACHINE.gpu.matmul_flop_per_s  # type: ignore[union-attr]
    for field, is_one in (("gpu", False), ("gpu.matmul_flop_per_s", False), ("disk", True)):
        estimated = replace(MACHINE, estimates=(Estimate(field, "a table"),))
        assert (estimated.measured_products is not None) is is_one
    assert load_machine("h200").measured_products is None
