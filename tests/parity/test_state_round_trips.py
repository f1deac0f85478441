"""A run may start in plain PyTorch, go on in hightide and go back, and may stop and resume: nothing shows."""

from __future__ import annotations

import copy
import filecmp
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SUBJECTS, assert_close_weights, make_optimizer, train, wrap
from torch import Tensor, nn

import hightide
import models

LLAMA = SUBJECTS["llama"]
WRAP = {"micro_batch": 3}


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[float]:
    losses = []
    for batch in batches:
        loss = models.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().item())
    return losses


@pytest.mark.parametrize(
    ("name", "first", "how"),
    [
        ("llama_tied", "plain", "before"),
        ("llama_tied", "wrapped", "after"),
        pytest.param("llama_tied", "plain", "after", marks=pytest.mark.long),
        pytest.param("llama_tied", "wrapped", "before", marks=pytest.mark.long),
        pytest.param("gpt2", "plain", "after", marks=pytest.mark.long),
        pytest.param("gpt2", "wrapped", "before", marks=pytest.mark.long),
    ],
)
def test_plain_and_wrapped_take_turns(name: str, first: str, how: str) -> None:
    """Five steps each, three times, through state dicts; `how`: states are loaded before or after wrapping."""
    subject = SUBJECTS[name]
    batches = subject.batches(15)
    straight = train(subject.build(num_samples=7), batches, groups=2)
    losses: list[float] = []
    saved: Any = None
    for turn in range(3):
        model, example = subject.build(seed=turn and 90 + turn, num_samples=7)
        optimizer: torch.optim.Optimizer = make_optimizer(model, groups=2)
        is_wrapped = (turn % 2 == 0) == (first == "wrapped")
        if saved is not None and how == "before":
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        if is_wrapped:
            model, optimizer = wrap(model, optimizer, example, **WRAP)
        if saved is not None and how == "after":
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        losses += steps(model, optimizer, batches[5 * turn : 5 * turn + 5])
        saved = states(model, optimizer)
    for index, (loss, expected) in enumerate(zip(losses, straight.losses, strict=True)):
        assert abs(loss - expected) <= 1e-6 * expected, (index, loss, expected)
    assert_close_weights(straight.weights, saved[0])
    expected_state = straight.optimizer.state_dict()
    assert saved[1]["param_groups"] == expected_state["param_groups"]
    assert {int(entry["step"]) for entry in saved[1]["state"].values()} == {15}
    assert list(saved[1]) == list(expected_state), "fp32 parameters have no masters"


def bf16_pair(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, example = LLAMA.build(seed=seed, num_samples=7)
    model = model.to(torch.bfloat16)
    return wrap(model, make_optimizer(model, groups=2), example, **WRAP)


@pytest.mark.parametrize("order", ["optimizer first", pytest.param("model first", marks=pytest.mark.long)])
def test_a_16_bit_run_resumes_with_the_same_bits(order: str) -> None:
    """Masters and moments are fp32, and come back as they were."""
    batches = LLAMA.batches(6)
    straight = bf16_pair()
    losses = steps(*straight, batches)
    stopped = bf16_pair()
    steps(*stopped, batches[:3])
    saved = states(*stopped)
    assert {value.dtype for value in saved[0].values()} == {torch.bfloat16}
    assert {value.dtype for value in saved[1]["hightide_masters"].values()} == {torch.float32}
    for index, master in saved[1]["hightide_masters"].items():
        assert not torch.equal(master, master.bfloat16().float()), f"{index}: a master that knows no more is no test"
        break
    model, optimizer = bf16_pair(seed=99)
    loads = [partial(model.load_state_dict, saved[0]), partial(optimizer.load_state_dict, saved[1])]
    for load in loads if order == "model first" else loads[::-1]:
        load()
    assert steps(model, optimizer, batches[3:]) == losses[3:]
    for key, value in model.state_dict().items():
        assert torch.equal(value, straight[0].state_dict()[key]), key
    again, expected = optimizer.state_dict(), straight[1].state_dict()
    for index, master in expected["hightide_masters"].items():
        assert torch.equal(again["hightide_masters"][index], master)
        for name, value in expected["state"][index].items():
            assert torch.equal(again["state"][index][name], value)


def test_a_plain_16_bit_optimizer_takes_a_wrapped_state_and_gives_it_back() -> None:
    wrapped = bf16_pair()
    batches = LLAMA.batches(8)
    steps(*wrapped, batches[:3])
    saved = states(*wrapped)
    model = LLAMA.build(seed=99, num_samples=7)[0].to(torch.bfloat16)
    model.load_state_dict(saved[0])
    optimizer = make_optimizer(model, groups=2)
    optimizer.load_state_dict(saved[1])
    entry = optimizer.state_dict()["state"][0]
    assert sorted(entry) == ["exp_avg", "exp_avg_sq", "step"] and entry["exp_avg"].dtype == torch.bfloat16
    plain_losses = steps(model, optimizer, batches[3:6])
    back = bf16_pair(seed=98)
    plain = states(model, optimizer)
    assert "hightide_masters" not in plain[1], "they would be out of date"
    back[0].load_state_dict(plain[0])
    back[1].load_state_dict(plain[1])
    for key, value in back[0].state_dict().items():
        assert torch.equal(value, plain[0][key]), key
    losses = plain_losses + steps(*back, batches[6:])
    assert all(loss < 5 for loss in losses) and {int(e["step"]) for e in back[1].state_dict()["state"].values()} == {8}


def test_masters_of_other_values_are_not_taken() -> None:
    """The optimizer's state of one moment with the model's of another: what the model says counts."""
    model, optimizer = bf16_pair()
    steps(model, optimizer, LLAMA.batches(2))
    early = states(model, optimizer)
    steps(model, optimizer, LLAMA.batches(3, seed=50))
    late = states(model, optimizer)
    optimizer.load_state_dict(early[1])
    for index, name in enumerate(_optimizer_order(model, optimizer)):
        master = optimizer.state_dict()["hightide_masters"][index]
        assert torch.equal(master.bfloat16(), late[0][name]), name
    model.load_state_dict(early[0])
    for index, master in early[1]["hightide_masters"].items():
        assert torch.equal(optimizer.state_dict()["hightide_masters"][index], master)


def _optimizer_order(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names = {id(param): name for name, param in model.named_parameters()}
    return [names[id(param)] for group in optimizer.param_groups for param in group["params"]]


def test_a_partial_load_leaves_the_others_and_their_masters_alone() -> None:
    model, optimizer = bf16_pair()
    steps(model, optimizer, LLAMA.batches(3))
    before, masters = states(model, optimizer)
    new = torch.full_like(before["model.norm.weight"], 0.5)
    missing, unexpected = model.load_state_dict({"model.norm.weight": new, "strange": new}, strict=False)
    assert unexpected == ["strange"] and len(missing) == len(before) - 1
    after, masters_after = states(model, optimizer)
    for key, value in after.items():
        assert torch.equal(value, new if key == "model.norm.weight" else before[key]), key
    for index, name in enumerate(_optimizer_order(model, optimizer)):
        expected = new.float() if name == "model.norm.weight" else masters["hightide_masters"][index]
        assert torch.equal(masters_after["hightide_masters"][index], expected), name


def test_strict_loading_names_what_does_not_fit_and_changes_what_does() -> None:
    model, example = LLAMA.build(num_samples=7)
    model, _ = wrap(model, make_optimizer(model), example, **WRAP)
    values = LLAMA.build(seed=99)[0].state_dict()
    values["strange"] = torch.ones(3)
    del values["model.norm.weight"]
    values["lm_head.weight"] = values["lm_head.weight"][:-1]
    with pytest.raises(RuntimeError) as refusal:
        model.load_state_dict(values)
    message = str(refusal.value)
    assert 'Missing key(s) in state_dict: "model.norm.weight"' in message
    assert 'Unexpected key(s) in state_dict: "strange"' in message
    assert "size mismatch for lm_head.weight" in message
    with pytest.raises(ValueError, match="leave assign out"):
        model.load_state_dict(LLAMA.build(seed=99)[0].state_dict(), assign=True)
    models.loss_of(model, example).backward()


def test_a_part_is_loaded_and_a_prefix_is_respected() -> None:
    model, example = LLAMA.build(num_samples=7)
    model, _ = wrap(model, make_optimizer(model), example, **WRAP)
    other = LLAMA.build(seed=99)[0]
    part = "model.layers.1"
    model.get_submodule(part).load_state_dict(other.get_submodule(part).state_dict())
    values: dict[str, Tensor] = model.state_dict(prefix="outer.")
    for key, value in other.state_dict().items():
        assert torch.equal(values["outer." + key], value) == (key.startswith(part) or "norm" in key), key


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_values_loaded_in_the_middle_of_training_are_used_at_once(update: str) -> None:
    """Nothing that was fetched or updated before may come through."""
    other = LLAMA.build(seed=99)[0].state_dict()
    found = []
    for wrapped in (False, True):
        model, example = LLAMA.build(num_samples=7)
        optimizer: torch.optim.Optimizer = make_optimizer(model)
        if wrapped:
            model, optimizer = wrap(model, optimizer, example, **WRAP, update=update)
        losses = steps(model, optimizer, LLAMA.batches(3))
        model.load_state_dict(other)
        losses += steps(model, optimizer, LLAMA.batches(3, seed=40))
        found.append((losses, {key: value.clone() for key, value in model.state_dict().items()}))
    for expected, loss in zip(found[0][0], found[1][0], strict=True):
        assert abs(loss - expected) <= 1e-6 * expected
    assert_close_weights(found[0][1], found[1][1])


def test_a_loaded_optimizer_state_replaces_the_old_one_whole() -> None:
    """A parameter without an entry starts anew, as in plain PyTorch."""
    batches = LLAMA.batches(4)
    found = []
    for wrapped in (False, True):
        model, example = LLAMA.build(num_samples=7)
        optimizer: torch.optim.Optimizer = make_optimizer(model)
        if wrapped:
            model, optimizer = wrap(model, optimizer, example, **WRAP)
        steps(model, optimizer, batches[:2])
        state = copy.deepcopy(optimizer.state_dict())
        for index in (0, 3):
            del state["state"][index]
        optimizer.load_state_dict(state)
        assert [index for index in range(5) if index not in optimizer.state_dict()["state"]] == [0, 3]
        found.append((steps(model, optimizer, batches[2:]), optimizer.state_dict()["state"]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for index, entry in found[0][1].items():
        assert int(found[1][1][index]["step"]) == int(entry["step"])
        torch.testing.assert_close(found[1][1][index]["exp_avg"], entry["exp_avg"], rtol=1e-4, atol=1e-8)


def test_a_state_of_another_model_is_refused() -> None:
    model, example = LLAMA.build(num_samples=7)
    model, optimizer = wrap(model, make_optimizer(model), example, **WRAP)
    steps(model, optimizer, LLAMA.batches(1))
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0], state["state"][1] = state["state"][1], state["state"][0]
    with pytest.raises(ValueError, match=r"'exp_avg' of .* has the shape"):
        optimizer.load_state_dict(state)


def test_hooks_on_the_optimizers_state_run() -> None:
    model, example = LLAMA.build(num_samples=7)
    model, optimizer = wrap(model, make_optimizer(model), example, **WRAP)
    steps(model, optimizer, LLAMA.batches(1))
    seen = []
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saved", "loaded"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama_tied", torch.bfloat16),
        ("gpt2", torch.float32),
        pytest.param("vit", torch.float32, marks=pytest.mark.long),
        pytest.param("llama_tied", torch.float32, marks=pytest.mark.long),
        pytest.param("gpt2", torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_save_pretrained_writes_the_same_files(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    subject = SUBJECTS[name]
    model, example = subject.build(num_samples=7)
    model = model.to(dtype)
    model, optimizer = wrap(model, make_optimizer(model), example, **WRAP)
    steps(model, optimizer, subject.batches(2))
    plain = subject.build(seed=99)[0].to(dtype)
    plain.load_state_dict(model.state_dict())
    plain.config.problem_type = model.config.problem_type if name == "vit" else None  # type: ignore[union-attr]
    for one, folder in ((model, "wrapped"), (plain, "plain")):
        one.save_pretrained(tmp_path / folder, max_shard_size="30KB")  # type: ignore[operator]
    files = sorted(os.listdir(tmp_path / "plain"))
    assert files == sorted(os.listdir(tmp_path / "wrapped")) and "model.safetensors.index.json" in files
    for file in files:
        assert filecmp.cmp(tmp_path / "wrapped" / file, tmp_path / "plain" / file, shallow=False), file
    values = model.state_dict()  # and what a user asks for afterwards is a copy again
    steps(model, optimizer, subject.batches(1, seed=77))
    assert not torch.equal(values[next(iter(values))], model.state_dict()[next(iter(values))])


def test_a_part_of_the_model_is_saved_too(tmp_path: Path) -> None:
    model, example = LLAMA.build(num_samples=7)
    model, _ = wrap(model, make_optimizer(model), example, **WRAP)
    model.model.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    loaded = hightide.from_pretrained(tmp_path)
    assert {id(param) for param in loaded.parameters()} and type(loaded).__name__ == "LlamaModel"
