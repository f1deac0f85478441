"""The profile is taken on tensors without values; here the same blocks run for real, under the same meter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import models
from hightide.ir.block import CallSpec, ModelProfile
from hightide.profiler.model.model_profile import profile_model
from hightide.stores.meter import AllocationMeter


def captured_call(model: nn.Module, name: str, batch: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The arguments that a block really gets."""
    module = model.get_submodule(name)
    calls: list[Any] = []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    if hasattr(model, "config"):
        model.config.use_cache = False
    models.loss_of(model, batch)
    handle.remove()
    args, kwargs = calls[0]
    return module, args, kwargs


def sliced(value: Any, num_samples: int) -> Any:
    """The first samples of what carries the batch; inputs become leaves of their own graph."""
    if isinstance(value, tuple):
        return tuple(sliced(entry, num_samples) for entry in value)
    if not isinstance(value, torch.Tensor):
        return value
    part = value[:num_samples] if value.shape[0] == models.NUM_SAMPLES else value
    return part.detach().requires_grad_(value.requires_grad)


def first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def real_bytes(model: nn.Module, name: str, batch: Any, num_samples: int) -> tuple[int, int, int]:
    """forward_peak, kept and backward_peak of one micro-batch, of a real run."""
    module, args, kwargs = captured_call(model, name, batch)
    args, kwargs = sliced(args, num_samples), {key: sliced(value, num_samples) for key, value in kwargs.items()}
    with torch.no_grad(), AllocationMeter() as meter:
        output = first(module(*args, **kwargs))
        forward_peak = meter.peak_bytes - output.numel() * output.element_size()
    gradient = torch.ones_like(output)
    del output
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    with AllocationMeter() as meter:
        edge = first(module(*args, **kwargs)).grad_fn
        kept = meter.live_bytes
    del edge
    with AllocationMeter() as meter:
        first(module(*args, **kwargs)).backward(gradient)
        return forward_peak, kept, meter.peak_bytes


def profiled_bytes(call: CallSpec, num_samples: int) -> tuple[int, int, int]:
    return call.forward_peak.at(num_samples), call.kept.at(num_samples), call.backward_peak.at(num_samples)


def call_of(profile: ModelProfile, name: str) -> CallSpec:
    return next(call for call in profile.calls if profile.blocks[call.block].name == name)


CASES = [
    ("llama", "model.layers.1", {}),
    ("llama", "model.layers.1", {"padded": True}),
    ("llama", "model.layers.0", {"dropout": 0.1}),
    ("llama", "model.norm", {}),
    ("gpt2", "transformer.h.2", {"dropout": 0.1}),
    ("bert", "bert.encoder.layer.1", {"padded": True}),
    ("vit", "vit.embeddings", {}),
    ("vit", "vit.layers.1", {}),
    ("plain", "encoder.layers.1", {"dropout": 0.1}),
    ("hand_written", "layers.1", {}),
]


@pytest.mark.parametrize(("zoo", "name", "options"), CASES)
def test_memory_is_that_of_a_real_run_to_the_byte(zoo: str, name: str, options: dict[str, Any]) -> None:
    model, batch = models.ZOO[zoo](**options)
    call = call_of(profile_model(model, None, batch)[0], name)
    assert call.splittable and call.backward_peak.at(1) > call.kept.at(1)
    smallest = profiled_bytes(call, 1)
    assert smallest == real_bytes(model, name, batch, 1)
    largest = real_bytes(model, name, batch, models.NUM_SAMPLES)
    for profiled, real in zip(profiled_bytes(call, models.NUM_SAMPLES), largest, strict=True):
        assert real <= profiled < real + models.NUM_SAMPLES, "bytes per sample are rounded up"


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_memory_is_never_underestimated_in_between(num_samples: int) -> None:
    model, batch = models.llama(padded=True)
    call = call_of(profile_model(model, None, batch)[0], "model.layers.1")
    real = real_bytes(model, "model.layers.1", batch, num_samples)
    for profiled, measured in zip(profiled_bytes(call, num_samples), real, strict=True):
        assert measured <= profiled <= 1.1 * measured


def test_an_unsplit_embedding_counts_its_dense_gradient() -> None:
    model, batch = models.llama()
    call = call_of(profile_model(model, None, batch)[0], "model.embed_tokens")
    assert not call.splittable
    assert profiled_bytes(call, models.NUM_SAMPLES) == real_bytes(
        model, "model.embed_tokens", batch, models.NUM_SAMPLES
    )
    assert call.backward_peak.at(models.NUM_SAMPLES) >= model.model.embed_tokens.weight.nbytes


def test_half_precision_halves_the_outputs() -> None:
    model, batch = models.llama()
    full = call_of(profile_model(model, None, batch)[0], "model.layers.1")
    half = call_of(profile_model(model.bfloat16(), None, batch)[0], "model.layers.1")
    assert half.outputs.per_sample * 2 == full.outputs.per_sample
    assert half.kept.per_sample < full.kept.per_sample


def test_frozen_blocks_keep_nothing() -> None:
    model, batch = models.llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    call = call_of(profile_model(model, None, batch)[0], "model.layers.0")
    assert call.kept.at(6) == call.backward_peak.at(6) == 0 < call.forward_peak.at(6)


def test_a_block_whose_backward_asks_for_values_is_measured_on_values() -> None:
    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * (float(grad.sum()) < float("inf"))

    class Layer(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return NoBackward.apply(super().forward(input))

    model = nn.Sequential(nn.Linear(8, 8), Layer(8, 8))
    with pytest.warns(UserWarning, match="could not be probed without values.*one pass on values"):
        profile, _ = profile_model(model, None, torch.zeros(6, 8))
    assert profile.on_values and not profile.calls[1].splittable
    assert profile.calls[1].forward_peak.at(6) == 6 * 32, "the product, beside its clone"


def test_without_values_such_a_block_is_not_taken_for_known() -> None:
    class Layer(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            output = super().forward(input)
            if output.requires_grad:
                output.register_hook(lambda grad: grad * (float(grad.sum()) < float("inf")))
            return output

    _, probed = profile_model(nn.Sequential(nn.Linear(8, 8), Layer(8, 8)), None, torch.zeros(6, 8), source=None)
    assert "DataDependent" in probed.failure and not probed.on_values
