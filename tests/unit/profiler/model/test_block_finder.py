from __future__ import annotations

import pytest
import torch
from torch import nn

import models
from hightide.profiler.model.block_finder import find_blocks


def names(model: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(model).blocks]


@pytest.mark.parametrize(
    ("zoo", "expected"),
    [
        ("llama", ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm", "lm_head"]),
        (
            "gpt2",
            [
                "transformer.wte",
                "transformer.wpe",
                *(f"transformer.h.{i}" for i in range(4)),
                "transformer.ln_f",
                "lm_head",
            ],
        ),
        ("vit", ["vit.embeddings", "vit.layers.0", "vit.layers.1", "vit.layers.2", "vit.layernorm", "classifier"]),
        ("plain", ["tokens", "positions", *(f"encoder.layers.{i}" for i in range(3)), "norm", "head"]),
        ("hand_written", ["first", "layers.0", "layers.1", "layers.2", "head"]),
        ("sequential", ["0", "3", "5"]),
    ],
)
def test_layers_and_what_lies_around_them_are_blocks(zoo: str, expected: list[str]) -> None:
    assert names(models.ZOO[zoo]()[0]) == expected


@pytest.mark.parametrize("zoo", models.ZOO)
def test_every_parameter_is_in_a_block_or_loose(zoo: str) -> None:
    model, _ = models.ZOO[zoo]()
    found = find_blocks(model)
    loose = {id(param) for name, param in model.named_parameters() if name in found.loose}
    held = {id(param) for block in found.blocks for param in block.module.parameters()}
    assert held | loose == {id(param) for param in model.parameters()}
    assert not held & loose


def test_parameters_of_a_module_around_a_stack_are_loose() -> None:
    assert find_blocks(models.hand_written()[0]).loose == ("scale",)


def test_an_output_bias_that_the_head_also_holds_is_not_loose() -> None:
    found = find_blocks(models.bert()[0])
    assert found.loose == ()
    assert "cls.predictions.decoder" in [block.name for block in found.blocks]


def test_lists_of_lists_are_descended_into() -> None:
    stages = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    assert names(nn.ModuleDict({"stages": stages})) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


def test_a_shared_layer_is_one_block() -> None:
    layer = nn.Linear(4, 4)
    assert names(nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 4))) == ["0", "3"]


def test_a_module_that_is_one_layer_is_one_block() -> None:
    assert names(nn.Linear(2, 2)) == [""]


def test_a_block_without_parameters_of_its_own_is_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    found = find_blocks(model).without(model, {"1.weight", "0.bias"})
    assert [block.name for block in found.blocks] == ["0"]
    assert found.loose == ("0.bias", "1.weight")
    assert isinstance(found.blocks[0].module.weight, torch.Tensor)


def test_a_layer_whose_pre_hook_computes_its_weight_is_no_block() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    found = find_blocks(layers)
    assert [block.name for block in found.blocks] == ["0", "2"]
    assert set(found.loose) == {"1.bias", "1.weight_orig"}


def test_a_layer_with_another_hook_is_a_block() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].register_forward_pre_hook(lambda module, args: None)
    assert names(layers) == ["0", "1"]
