"""What a user saves and loads is what plain PyTorch would have saved, wherever it lives."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import (
    HOST,
    SUBJECTS,
    assert_close_weights,
    assert_same_bits,
    compare,
    make_optimizer,
    make_scheduler,
    train,
    wrap,
)
from torch import Tensor, nn

import hightide
import models
from each_value import each_value

LLAMA = SUBJECTS["llama"]
WRAP = {"micro_batch": 3}
NAMES = ["llama", "llama_tied", "gpt2"]


def trained_pair(name: str, num_steps: int = 3, **options: Any) -> Any:
    subject = SUBJECTS[name]
    return compare(partial(subject.build, num_samples=7), lambda: subject.batches(num_steps), wrap=WRAP, **options)


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_into_plain_transformers(name: str) -> None:
    _, wrapped = trained_pair(name)
    fresh, batch = SUBJECTS[name].build(seed=99, num_samples=3)
    fresh.load_state_dict(wrapped.model.state_dict(), strict=True)
    for key, value in fresh.state_dict().items():
        assert torch.equal(value, wrapped.weights[key]), key
    with torch.no_grad():
        expected = fresh(**batch).loss
        loss = wrapped.model(**batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_its_tensors_own_their_storage() -> None:
    """A view of a chunk would make torch.save write the whole chunk, and would change when training goes on."""
    _, wrapped = trained_pair("llama")
    values = wrapped.model.state_dict()
    for name, value in values.items():
        assert value.untyped_storage().nbytes() == value.nbytes, name
        assert not value.requires_grad
    kept = {name: value.clone() for name, value in values.items()}
    batch = LLAMA.batches(1)[0]
    models.loss_of(wrapped.model, batch).backward()
    wrapped.optimizer.step()
    after = wrapped.model.state_dict()
    for name, value in values.items():
        assert torch.equal(value, kept[name]), f"{name} changed under the user's hands"
        assert not torch.equal(value, after[name]), f"{name} did not train"


def test_tied_weights_are_one_tensor() -> None:
    _, wrapped = trained_pair("llama_tied")
    values = wrapped.model.state_dict()
    assert values["lm_head.weight"].data_ptr() == values["model.embed_tokens.weight"].data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_save_pretrained_and_back(name: str, tmp_path: Path) -> None:
    _, wrapped = trained_pair(name)
    wrapped.model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = type(SUBJECTS[name].build()[0]).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    assert isinstance(loaded, transformers.PreTrainedModel) and "hightide" not in type(loaded).__module__
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, wrapped.weights[key]), key
    models.loss_of(wrapped.model, LLAMA.batches(1)[0]).backward()  # saving did not disturb training
    wrapped.optimizer.step()


def test_torch_save_and_load() -> None:
    _, wrapped = trained_pair("gpt2")
    file = io.BytesIO()
    torch.save({"model": wrapped.model.state_dict(), "optimizer": wrapped.optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for key, value in loaded["model"].items():
        assert torch.equal(value, wrapped.weights[key]), key


@pytest.mark.parametrize(
    "path",
    [
        "model",
        "model.layers",
        "model.layers.1",
        "model.layers.1.mlp",
        "model.layers.1.mlp.up_proj",
    ],
)
def test_state_dict_of_a_part(path: str) -> None:
    _, wrapped = trained_pair("llama", num_steps=2)
    part = wrapped.model.get_submodule(path).state_dict()
    expected = {
        key.removeprefix(path + "."): value for key, value in wrapped.weights.items() if key.startswith(path + ".")
    }
    assert list(part) == list(expected)
    for key, value in part.items():
        assert torch.equal(value, expected[key]), key


def test_state_dict_between_forward_and_backward() -> None:
    plain, _ = LLAMA.build(num_samples=7)
    model, example = LLAMA.build(num_samples=7)
    model, _ = wrap(model, make_optimizer(model), example, **WRAP)
    loss = model(**example).loss
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    loss.backward()


@pytest.mark.parametrize(("name", "groups"), each_value(("llama", "llama_tied", "hand_written"), (1, 2)))
def test_optimizer_state_dict_has_plain_layout_and_values(name: str, groups: int) -> None:
    plain, wrapped = trained_pair(name, groups=groups)
    expected, found = plain.optimizer.state_dict(), wrapped.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == list(expected["state"])
    for key, entry in expected["state"].items():
        assert list(found["state"][key]) == list(entry)
        for field, value in entry.items():
            other = found["state"][key][field]
            assert (other.shape, other.dtype) == (value.shape, value.dtype), (key, field)
            assert float((other - value).abs().max()) <= 1e-5 * float(value.abs().max()) + 1e-9, (key, field)
            assert other.untyped_storage().nbytes() == other.nbytes


def test_plain_optimizer_loads_a_wrapped_state_and_goes_on() -> None:
    plain, wrapped = trained_pair("llama", groups=2)
    model, _ = LLAMA.build(num_samples=7)
    model.load_state_dict(wrapped.model.state_dict())
    optimizer = make_optimizer(model, groups=2)
    optimizer.load_state_dict(wrapped.optimizer.state_dict())
    for batch in LLAMA.batches(3, seed=70):
        for one, its in ((plain.model, plain.optimizer), (model, optimizer)):
            models.loss_of(one, batch).backward()
            its.step()
            its.zero_grad()
    assert_close_weights(plain.model.state_dict(), model.state_dict())


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_wrapping_an_optimizer_that_has_trained_already(update: str) -> None:
    """Moments and step counts move into the chunks: three plain steps, then wrapped ones, equal all plain ones."""
    batches = LLAMA.batches(8)
    straight = train(LLAMA.build(num_samples=7), batches, groups=2)
    model, example = LLAMA.build(num_samples=7)
    optimizer = make_optimizer(model, groups=2)
    first = train((model, example), batches[:3], optimizer=optimizer)
    rest = train((first.model, example), batches[3:], optimizer=optimizer, wrap=WRAP | {"update": update})
    for expected, loss in zip(straight.losses, first.losses + rest.losses, strict=True):
        assert abs(loss - expected) <= 1e-6 * expected
    assert_close_weights(straight.weights, rest.weights)
    assert {int(entry["step"]) for entry in rest.optimizer.state_dict()["state"].values()} == {8}


def test_a_wrapped_optimizer_loads_a_state() -> None:
    """Resuming into a wrapped pair: the same bits as if it had never stopped."""
    batches = LLAMA.batches(6)
    straight = train(LLAMA.build(num_samples=7), batches, wrap=WRAP, groups=2)
    first = train(LLAMA.build(num_samples=7), batches[:3], wrap=WRAP, groups=2)
    saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))
    model, example = LLAMA.build(seed=99, num_samples=7)
    model.load_state_dict(saved[0])
    model, optimizer = wrap(model, make_optimizer(model, groups=2), example, **WRAP)
    optimizer.load_state_dict(saved[1])
    losses = []
    for batch in batches[3:]:
        loss = models.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().item())
    assert losses == straight.losses[3:]
    for key, value in model.state_dict().items():
        assert torch.equal(value, straight.weights[key]), key


def test_a_wrapped_model_loads_a_state_dict() -> None:
    """Parameters that are absent cannot be copied into by plain code; silence would leave the old values."""
    model, example = LLAMA.build(num_samples=7)
    model, _ = wrap(model, make_optimizer(model), example, **WRAP)
    other = LLAMA.build(seed=99)[0].state_dict()
    model.load_state_dict(other)
    assert model.state_dict().keys() == other.keys()
    for key, value in model.state_dict().items():
        assert torch.equal(value, other[key]), key


def test_a_scheduler_state_goes_with_it() -> None:
    model, example = LLAMA.build(num_samples=7)
    model, optimizer = wrap(model, make_optimizer(model), example, **WRAP)
    scheduler = make_scheduler(optimizer)
    for batch in LLAMA.batches(3):
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    other_model, _ = LLAMA.build(num_samples=7)
    other = make_optimizer(other_model)
    other_scheduler = make_scheduler(other)
    other_scheduler.load_state_dict(scheduler.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert other_scheduler.last_epoch == 3


@pytest.mark.parametrize("name", ["llama", "llama_tied", "hand_written"])
def test_unwrap_gives_a_plain_model_back(name: str) -> None:
    subject = SUBJECTS[name]
    plain, wrapped = trained_pair(name)
    original_types = [type(module) for module in subject.build()[0].modules()]
    model = hightide.unwrap(wrapped.model)
    assert [type(module) for module in model.modules()] == original_types
    assert_close_weights(plain.weights, dict(model.state_dict()))
    for key, value in model.state_dict().items():
        assert torch.equal(value, wrapped.weights[key]), key
    copy.deepcopy(model)
    with pytest.raises(ValueError, match="not wrapped"):
        hightide.stats(model)
    optimizer = make_optimizer(model)  # and it trains, plainly
    loss = models.loss_of(model, subject.batches(1)[0])
    loss.backward()
    optimizer.step()
    again, _ = hightide.wrap(  # or wrapped once more
        model, make_optimizer(model), subject.batches(1)[0], limits=hightide.Limits(gpu="4MiB", host=HOST)
    )
    models.loss_of(again, subject.batches(1)[0]).backward()


def test_unwrap_ties_weights_as_before() -> None:
    _, wrapped = trained_pair("llama_tied", num_steps=1)
    model = hightide.unwrap(wrapped.model)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]


def test_two_runs_of_one_seed_are_the_same_bits() -> None:
    """Lanes run at their own speed; that must not show."""
    first, second = (train(LLAMA.build(num_samples=7), LLAMA.batches(5), wrap=WRAP, clip="torch") for _ in range(2))
    assert_same_bits(first, second)


def test_buffers_are_saved_too() -> None:
    class WithBuffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.arange(32.0))
            self.first = nn.Linear(32, 32)
            self.second = nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x + self.offset)))

    torch.manual_seed(0)
    model = WithBuffer()
    expected = copy.deepcopy(model.state_dict())
    batch = models.vector_batch(num_samples=6)["x"]
    model, _ = hightide.wrap(model, make_optimizer(model), batch, limits=hightide.Limits(gpu="1MiB", host=HOST))  # type: ignore[assignment]
    found = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
