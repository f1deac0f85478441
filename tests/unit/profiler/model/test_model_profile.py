from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import models
from hightide.ir.block import Affine, CallSpec, ModelProfile
from hightide.profiler.model.model_profile import profile_model


def profiled(model: nn.Module, batch: Any) -> ModelProfile:
    return profile_model(model, torch.optim.AdamW(model.parameters()), batch)[0]


def call_of(profile: ModelProfile, name: str) -> CallSpec:
    return next(call for call in profile.calls if profile.blocks[call.block].name == name)


def test_blocks_are_in_order_of_first_call_then_unused_then_loose() -> None:
    profile = profiled(*models.hand_written(unused=True))
    assert [block.name for block in profile.blocks] == [
        "first",
        "layers.0",
        "layers.1",
        "layers.2",
        "head",
        "never",
        "",
    ]
    assert [block.index for block in profile.blocks] == list(range(7))
    assert [block.loose for block in profile.blocks] == [False] * 6 + [True]
    assert profile.blocks[-1].params == ("scale",)
    assert all(profile.blocks[call.block].name != "never" for call in profile.calls)


def test_probe_and_profile_have_the_same_indices() -> None:
    model, batch = models.opt()
    profile, probed = profile_model(model, None, batch)
    assert [block.name for block in probed.blocks] == [block.name for block in profile.blocks]
    assert [call.block for call in probed.calls] == [call.block for call in profile.calls] == list(range(7))


def test_tied_parameters_are_one_with_several_names_and_users() -> None:
    profile = profiled(*models.llama(tied=True))
    spec = profile.param("model.embed_tokens.weight")
    assert spec.names == ("model.embed_tokens.weight", "lm_head.weight")
    assert [block.name for block in profile.blocks if spec.name in block.params] == ["model.embed_tokens", "lm_head"]
    assert sum(spec.numel for spec in profile.params) == sum(p.numel() for p in models.llama(tied=True)[0].parameters())


def test_groups_frozen_and_unoptimised_parameters() -> None:
    model, batch = models.hand_written()
    model.head.requires_grad_(False)
    params = dict(model.named_parameters())
    first, second = [params["first.weight"], params["head.bias"]], [params["scale"]]
    optimizer = torch.optim.AdamW([{"params": first}, {"params": second, "lr": 1.0}])
    profile, _ = profile_model(model, optimizer, batch)
    groups = {spec.name: spec.group for spec in profile.params}
    assert (groups["first.weight"], groups["scale"], groups["first.bias"]) == (0, 1, None)
    assert groups["head.bias"] is None and not profile.param("head.bias").trainable


@pytest.mark.parametrize("zoo", ["llama", "llama_tied", "gpt2", "bert", "t5", "opt"])
def test_language_models_have_a_lazy_head(zoo: str) -> None:
    profile = profiled(*models.ZOO[zoo]())
    (head,) = [block for block in profile.blocks if block.lazy_head]
    assert head.kind == "Linear" and profile.vocabulary == models.VOCABULARY
    assert profile.tokens_per_sample == (7 if zoo == "t5" else models.NUM_TOKENS)


@pytest.mark.parametrize("zoo", ["vit", "plain", "hand_written", "sequential"])
def test_other_models_have_none(zoo: str) -> None:
    profile = profiled(*models.ZOO[zoo]())
    assert not any(block.lazy_head for block in profile.blocks)
    assert (profile.vocabulary, profile.tokens_per_sample) == (0, 1)


def test_batch_and_buffers_are_counted() -> None:
    model, batch = models.llama()
    profile = profiled(model, batch)
    assert profile.batch_bytes == 3 * models.NUM_SAMPLES * models.NUM_TOKENS * 8
    assert profile.buffer_bytes == sum(buffer.numel() * 4 for buffer in model.buffers())
    assert profile.num_samples == models.NUM_SAMPLES


def test_parameters_used_outside_of_blocks_end_up_loose() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(16, models.HIDDEN)
            self.layers = nn.ModuleList(models.StackLayer(0.0) for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids)
            for layer in self.layers:
                x = layer(x, gate=x.new_ones(()))
            return x @ self.tokens.weight.T

    profile = profiled(Functional(), torch.zeros(6, 3, dtype=torch.long))
    assert [block.name for block in profile.blocks] == ["layers.0", "layers.1", ""]
    assert profile.blocks[-1].params == ("tokens.weight",)


def test_fingerprint_tells_models_apart() -> None:
    base = profiled(*models.llama()).fingerprint
    assert len(base) == 16
    assert base == profiled(*models.llama(seed=1, padded=True)).fingerprint, "values and batch do not count"
    model, batch = models.llama()
    model.model.norm.requires_grad_(False)
    others = [profiled(*models.llama(tied=True)), profiled(*models.llama(num_layers=3)), profiled(model, batch)]
    others.append(profiled(models.llama()[0].bfloat16(), batch))
    others.append(profile_model(models.llama()[0], None, batch)[0])
    assert len({base, *(other.fingerprint for other in others)}) == 6


def test_a_model_on_the_meta_device_has_the_same_profile() -> None:
    with torch.device("meta"):
        model, _ = models.llama()
    assert profiled(model, models.token_batch()) == profiled(*models.llama())


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, batch = models.hand_written()
    other = copy.deepcopy(model)
    num = len(list(model.parameters()))
    with pytest.raises(ValueError, match=rf"{num} of the optimizer's {num} parameters.*model.parameters\(\)"):
        profile_model(model, torch.optim.AdamW(other.parameters()), batch)


def test_unsupported_dtypes_and_empty_models_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.complex64)
    with pytest.raises(ValueError, match=r"'0.weight' has the unsupported dtype complex64.*float32"):
        profile_model(model, None, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="0 parameters"):
        profile_model(nn.ReLU(), None, torch.zeros(2, 2))


@pytest.mark.parametrize("calls", [1, 2])
def test_a_model_that_asks_for_values_is_profiled_unsplit_with_a_warning(calls: int) -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            nn.init.constant_(self.layers[0].bias, 2 * calls - 3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            return self.layers[1](x) if x.sum() > 0 else x

    with pytest.warns(UserWarning, match="could not be probed without values.*all 6 samples"):
        profile, probed = profile_model(Asks(), None, torch.zeros(6, 8))
    assert probed.failure and probed.on_values and profile.on_values
    assert [block.name for block in profile.blocks] == ["layers.0", "layers.1"]
    assert [call.splittable for call in profile.calls] == [False] * calls, "the way that its values lead it"
    assert all(call.outputs == Affine(0, 32) and call.kept == Affine() for call in profile.calls)


class Remembers(nn.Module):
    """Adds to what it is given, as an object that nobody sees into, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: SimpleNamespace) -> torch.Tensor:
        cache.rows = x.detach() if cache.rows is None else torch.cat([cache.rows, x.detach()])
        return self.linear(x) * cache.rows


class GivesACache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Remembers() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, SimpleNamespace(rows=None))
        return x.mean()


def test_a_block_that_cannot_be_called_again_is_not_blamed_on_the_batch() -> None:
    with pytest.raises(ValueError, match=r"run once more with the same arguments.*cache"):
        profile_model(GivesACache(), None, {"x": torch.randn(3, 4)})


class Attends(nn.Module):
    def __init__(self, inner: nn.Module, num_given: int) -> None:
        super().__init__()
        self.inner, self.num_given = inner, num_given

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        if len(given) != self.num_given:
            raise TypeError(f"takes {self.num_given}, but {len(given)} were given")
        return self.inner(given[0])


class ChangesItsAttention(nn.Module):
    """As BigBird does on short sequences: when it is first called, for good."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.is_short = Attends(nn.Linear(8, 8), 2), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x) if self.is_short else self.attention(x, x)

    def shorten(self) -> None:
        if not self.is_short:
            self.attention, self.is_short = Attends(self.attention.inner, 1), True


class OnShortInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ChangesItsAttention() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.shorten()
        for block in self.blocks:
            x = block(x)
        return x.mean()


def test_a_model_that_puts_modules_in_the_place_of_others_is_told_so_and_left_as_it_was() -> None:
    model, batch = OnShortInputs(), {"x": torch.randn(3, 8)}
    before = list(model.modules())
    with pytest.raises(
        ValueError, match=r"another module in the place of 'blocks\.0\.attention'.*call the model on such"
    ):
        profile_model(model, None, batch)
    assert list(model.modules()) == before
    model(**batch)
    assert "blocks.0" in {block.name for block in profile_model(model, None, batch)[0].blocks}
