from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import models
from hightide.ir.block import Affine
from hightide.ir.split import BatchDim
from hightide.profiler.model.block_finder import find_blocks
from hightide.profiler.probe.probe import probe
from hightide.profiler.probe.probe_result import NOT_PROBED, ProbedCall, ProbeResult

FIRST = BatchDim(0)


def run(model: nn.Module, batch: Any, **options: Any) -> ProbeResult:
    return probe(model, find_blocks(model).blocks, batch, **options)


def called(result: ProbeResult) -> list[str]:
    return [result.blocks[call.block].name for call in result.calls]


def calls_of(result: ProbeResult, name: str) -> list[ProbedCall]:
    return [call for call in result.calls if result.blocks[call.block].name == name]


def one_layer(layer: nn.Module) -> ProbedCall:
    """What is learned about a layer between two others."""
    result = run(nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8)), torch.zeros(6, 8))
    assert not result.failure
    (call,) = calls_of(result, "1")
    return call


@pytest.mark.parametrize("zoo", models.ZOO)
def test_every_model_of_the_zoo_is_probed_and_its_layers_split(zoo: str) -> None:
    model, batch = models.ZOO[zoo]()
    result = run(model, batch)
    assert result.failure == "" and result.num_samples == models.NUM_SAMPLES
    assert not result.loose - {"scale"}
    for call in result.calls:
        kind = type(result.blocks[call.block].module).__name__
        assert call.split.splittable != ("Embedding" in kind and kind != "ViTEmbeddings"), (kind, call.split)
        assert call.needs_backward
        if call.split.splittable:
            assert call.split.inputs[0] == FIRST and call.split.outputs[0] == FIRST


def test_calls_are_in_execution_order() -> None:
    model, batch = models.opt()  # defines its last norm before its layers
    layers = [f"model.decoder.layers.{index}" for index in range(3)]
    embeddings = ["model.decoder.embed_tokens", "model.decoder.embed_positions"]
    assert called(run(model, batch)) == [*embeddings, *layers, "model.decoder.final_layer_norm", "lm_head"]


def test_a_mask_is_an_input_of_padded_batches_only() -> None:
    full = calls_of(run(*models.llama()), "model.layers.1")[0].split
    absent = calls_of(run(*models.llama(mask=False)), "model.layers.1")[0].split
    padded = calls_of(run(*models.llama(padded=True)), "model.layers.1")[0].split
    assert full == absent
    assert full.inputs.count(FIRST) == 1 and padded.inputs.count(FIRST) == 2
    assert full.signature != padded.signature
    assert len(padded.inputs) == len(full.inputs) + 1


def test_a_position_bias_does_not_carry_the_batch() -> None:
    result = run(*models.t5())
    first, second = calls_of(result, "encoder.block.0")[0], calls_of(result, "encoder.block.1")[0]
    assert first.split.outputs == (FIRST, None)
    assert second.split.inputs == (FIRST, None)
    padded = run(*models.t5(padded=True))
    assert calls_of(padded, "encoder.block.1")[0].split.inputs == (FIRST, FIRST, None)


def test_rows_per_sample_and_another_batch_dimension_are_found() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x.flatten(0, 1)).view(*x.shape)
            return self.layers[1](x.transpose(0, 1))

    result = run(Rows(), torch.zeros(6, 5, 8))
    assert [call.split.inputs for call in result.calls] == [(BatchDim(0, 5),), (BatchDim(1, 1),)]


def test_bytes_follow_the_tensors() -> None:
    result = run(*models.llama(padded=True))
    sample = models.NUM_TOKENS * models.HIDDEN * 4
    first, second = (calls_of(result, f"model.layers.{index}")[0] for index in (0, 1))
    rotary = 2 * models.NUM_TOKENS * 8 * 4
    positions = models.NUM_TOKENS * 8
    mask = models.NUM_TOKENS**2
    assert first.new_inputs == Affine(rotary + positions, mask), "the mask is made once, before the first layer"
    assert second.new_inputs == Affine()
    for call in (first, second):
        assert call.saved_inputs == call.outputs == Affine(0, sample)
    assert calls_of(result, "model.embed_tokens")[0].new_inputs == Affine(), "the batch itself is counted elsewhere"


def test_frozen_blocks_need_no_backward() -> None:
    model, batch = models.llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    result = run(model, batch)
    assert [call.needs_backward for call in result.calls] == [False, False, *[True] * 5]
    assert calls_of(result, "model.layers.0")[0].saved_inputs == Affine()
    assert calls_of(result, "model.layers.1")[0].saved_inputs == Affine()
    assert calls_of(result, "model.layers.2")[0].saved_inputs != Affine()


def test_parameters_used_outside_of_their_block_are_found() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(16, 8)
            self.layers = nn.ModuleList(models.StackLayer(0.0) for _ in range(2))
            self.inner = nn.Linear(8, models.HIDDEN)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = nn.functional.linear(self.tokens(ids), self.inner.weight)  # not called: its bias is never used
            x = self.layers[1].norm(self.layers[0](x, gate=x.new_ones(())))
            return x[..., :8] @ self.tokens.weight.T

    result = run(Functional(), torch.zeros(6, 3, dtype=torch.long))
    assert result.failure == ""
    assert result.loose == {"inner.weight", "tokens.weight", "layers.1.norm.weight", "layers.1.norm.bias"}


def test_parameters_are_listed_in_order_of_use() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)
            self.b = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(self.b(x))

    result = run(nn.Sequential(Backwards(), nn.Linear(8, 8)), torch.zeros(6, 8))
    assert result.uses[0] == ("0.b.weight", "0.a.weight")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


def test_a_block_that_changes_its_input_is_not_split() -> None:
    class InPlace(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.mul_(2))

    assert "in place" in one_layer(InPlace()).split.note


def test_batch_normalisation_is_not_split_in_training() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    assert "samples depend on each other" in one_layer(layer).split.note
    assert int(layer[1].num_batches_tracked) == 0 and layer[1].running_mean.eq(0).all(), "the probe leaves no trace"
    assert one_layer(layer.eval()).split.splittable


def test_a_block_that_mixes_samples_is_not_split() -> None:
    class Pool(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).mean(0)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x)[1:])

    assert "no output carries the batch" in one_layer(Pool()).split.note
    assert "not one dimension in proportion" in run(Odd(), torch.zeros(6, 8)).calls[1].split.note

    class Matrix(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) @ x.T

    matrix = run(nn.Sequential(nn.Linear(8, 8), Matrix()), torch.zeros(6, 8))
    assert "(6, 6) for 6 samples and (7, 7) for 7" in matrix.calls[1].split.note


def test_an_auxiliary_loss_keeps_a_block_whole() -> None:
    class Routed(Layer):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.linear(x)
            return y, y.mean()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Routed()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, loss = self.layers[1](self.layers[0](x))
            return y.sum() + loss

    assert "auxiliary loss" in run(Model(), torch.zeros(6, 8)).calls[1].split.note


class Asks(nn.Module):
    """Asks for a value that a fake tensor does not have, after its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if x.sum() > 0 else x


def test_a_failure_is_reported_and_leaves_nothing_behind() -> None:
    model = Asks()
    before = [id(param) for param in model.parameters()]
    result = run(model, torch.zeros(6, 8))
    assert result.failure and called(result) == ["layers.0"]
    assert "probe of the model failed" in result.calls[0].split.note
    assert [id(param) for param in model.parameters()] == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not isinstance(model(torch.ones(6, 8)), FakeTensor)


def test_random_numbers_batch_and_configuration_are_left_alone() -> None:
    model, batch = models.gpt2(dropout=0.5)
    model.config.use_cache = True
    copies = {name: tensor.clone() for name, tensor in batch.items()}
    state, python_state = torch.get_rng_state(), random.getstate()
    run(model, batch)
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_state
    assert all(torch.equal(batch[name], copy) for name, copy in copies.items())
    assert model.config.use_cache is True and model.training


def test_no_cache_reaches_the_blocks() -> None:
    model, batch = models.gpt2()
    model.config.use_cache = True
    assert "DynamicCache" not in calls_of(run(model, batch), "transformer.h.1")[0].split.signature


def test_a_block_learns_from_one_that_is_built_the_same() -> None:
    model, batch = models.hand_written()
    model.skip = {2}
    result = run(model, batch)
    index = [block.name for block in result.blocks].index("layers.2")
    signature = calls_of(result, "layers.1")[0].split.signature
    assert result.split(index, signature) == calls_of(result, "layers.1")[0].split
    assert result.split(index, "another").note == NOT_PROBED


def test_calls_that_differ_under_one_signature_are_not_split() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = Layer(), Layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.layer(torch.zeros(3, 8)).mean(0) + self.other(x)

    result = run(Twice(), torch.zeros(6, 8))
    assert called(result) == ["layer.linear", "layer.linear", "other.linear"]
    assert [call.split.splittable for call in result.calls] == [False, False, True]


def test_a_batch_of_one_sample_is_probed() -> None:
    result = run(*models.llama(num_samples=1, padded=True))
    assert calls_of(result, "model.layers.0")[0].split.inputs.count(FIRST) == 2


def test_another_forward_can_stand_in_for_the_model() -> None:
    model, batch = models.sequential()
    result = run(model, batch, forward=lambda x: model[5](model[3](model[0](x))))
    assert called(result) == ["0", "3", "5"]
