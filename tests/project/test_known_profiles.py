"""What lets tests profile a model once: a known profile is the one that would be taken, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import models
from hightide.profiler.model.model_profile import profile_calls
from known_profiles import KnownProfiles, key_of


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("name", ["llama_tied", "hand_written", "vit"])
def test_a_known_profile_is_the_one_that_would_be_taken(name: str) -> None:
    taken: list[Any] = []

    def take(*args: Any, **options: Any) -> Any:
        taken.append(args[0])
        return profile_calls(*args, **options)

    known = KnownProfiles(take)
    first, other = models.ZOO[name](), models.ZOO[name]()
    known(first[0], adamw(first[0]), first[1])
    profile, probed, _ = known(other[0], adamw(other[0]), other[1])
    assert taken == [first[0]]
    expected, expected_probe, _ = profile_calls(other[0], adamw(other[0]), other[1])
    assert profile == expected
    assert probed == expected_probe  # blocks too, whose modules are this model's
    assert known(first[0], adamw(first[0]), first[1])[1].blocks[0].module is not probed.blocks[0].module
    known(other[0], adamw(other[0]), other[1], device=None)  # its blocks are not tried
    assert taken == [first[0], other[0]]


class Asks(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.detach().sum().item() > 0 else super().forward(x).sin().cos()


def test_a_model_that_asks_for_values_is_known_by_them_and_warns_each_time() -> None:
    taken: list[Any] = []

    def take(*args: Any, **options: Any) -> Any:
        taken.append(args[0])
        return profile_calls(*args, **options)

    known, batch = KnownProfiles(take), torch.ones(4, 8)
    kept = []
    for sign in (1, 1, -1, -1, 1):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), Asks(8, 8))
        torch.nn.init.constant_(model[0].weight, sign)
        with pytest.warns(UserWarning, match="could not be probed without values"):
            kept.append([call.kept for call in known(model, adamw(model), batch)[0].calls])
    assert len(taken) == 2 and kept[0] == kept[1] == kept[4] != kept[2] == kept[3]
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="could not be probed without values"):
        known(model, adamw(model), batch)
    assert len(taken) == 3


def changed(change: Callable[[torch.nn.Module], object]) -> Callable[[], models.Pair]:
    def build() -> models.Pair:
        model, batch = models.llama()
        change(model)
        return model, batch

    return build


OTHERS: dict[str, Callable[[], models.Pair]] = {
    "the same": models.llama,
    "tied": models.llama_tied,
    "layers": lambda: models.llama(num_layers=3),
    "dropout": lambda: models.llama(dropout=0.1),
    "padded": lambda: models.llama(padded=True),
    "samples": lambda: models.llama(num_samples=5),
    "data": lambda: (models.llama()[0], models.token_batch(seed=2)),
    "eval": changed(lambda model: model.eval()),
    "bf16": changed(lambda model: model.bfloat16()),
    "frozen": changed(lambda model: next(model.parameters()).requires_grad_(False)),
    "config": changed(lambda model: setattr(model.config, "_attn_implementation", "eager")),
    "attribute": changed(lambda model: setattr(model.model.layers[1], "skip", True)),
    "shared": changed(lambda model: model.model.layers.__setitem__(1, model.model.layers[0])),
}


def test_other_models_and_batches_are_not_known() -> None:
    keys: dict[Any, str] = {}
    for name, build in OTHERS.items():
        model, batch = build()
        key = key_of(model, adamw(model), batch, None)
        assert key is not None and key not in keys, f"{name}: as {keys.get(key)}"
        keys[key] = name
    model, batch = models.llama()
    assert keys[key_of(model, adamw(model), batch, None)] == "the same"
    halves = [{"params": list(model.parameters())[::2]}, {"params": list(model.parameters())[1::2]}]
    assert key_of(model, torch.optim.AdamW(halves), batch, None) not in keys
    assert key_of(model, adamw(model), batch, "model.layers.*") not in keys


def test_what_cannot_be_compared_is_profiled_again() -> None:
    for change in (
        lambda model: model.register_forward_hook(lambda *_: None),
        lambda model: setattr(model, "forward", lambda **inputs: inputs),
        lambda model: setattr(model, "table", torch.zeros(3)),
    ):
        model, batch = models.llama()
        change(model)
        assert key_of(model, adamw(model), batch, None) is None


def test_warnings_come_each_time() -> None:
    class Asks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) if bool(x.sum() < 1e9) else x
            return x

    known, model = KnownProfiles(profile_calls), Asks()
    for _ in range(2):
        with pytest.warns(UserWarning, match="could not be probed"):
            known(model, adamw(model), torch.zeros(6, 8))
