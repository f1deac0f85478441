"""Checkpoints of models of libraries: their folders are what the libraries write and read."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from harness import SUBJECTS, make_optimizer, wrap
from test_lora import lora
from test_state_round_trips import steps
from torch import nn

import hightide
import models
from hightide.checkpoint import shards
from hightide.loading.tensor_file import StoredTensor, read_header

LLAMA = SUBJECTS["llama"]
WRAP = {"micro_batch": 3}
BUILDERS = {"llama_tied": models.llama_tied, "qwen3_moe": models.qwen3_moe, "gpt2": models.gpt2, "vit": models.vit}
BATCHES = {"vit": models.image_batch}


def trained(name: str, seed: int = 0, num_steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, example = BUILDERS[name](seed=seed, num_samples=7)
    model, optimizer = wrap(model, make_optimizer(model), example, **WRAP)
    batch = BATCHES.get(name, models.token_batch)
    steps(model, optimizer, [batch(seed=10 + step, num_samples=7) for step in range(num_steps)])
    return model, optimizer


def stored(folder: Path, pattern: str = "model*.safetensors") -> dict[str, StoredTensor]:
    return {name: one for file in folder.glob(pattern) for name, one in read_header(file).items()}


def assert_same_tensors(found: dict[str, StoredTensor], expected: dict[str, StoredTensor]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(found[name].read(), one.read()) and found[name].dtype == one.dtype, name


@pytest.mark.parametrize(
    "name", ["llama_tied", "qwen3_moe", *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", "vit"))]
)
def test_the_folder_is_what_transformers_writes(name: str, tmp_path: Path) -> None:
    """Names, values and configs; mixtures of experts are cut into experts on the way, and joined again."""
    model, optimizer = trained(name)
    path = hightide.save(model, optimizer, tmp_path).wait()
    model.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    assert_same_tensors(stored(path), stored(tmp_path / "theirs"))
    for file in (tmp_path / "theirs").glob("*.json"):
        assert filecmp.cmp(file, path / file.name, shallow=False), file.name
    loaded = type(BUILDERS[name]()[0]).from_pretrained(path)  # type: ignore[attr-defined]
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())
    other, its = trained(name, seed=3, num_steps=1)
    hightide.load(other, its, tmp_path)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    batch = BATCHES.get(name, models.token_batch)(seed=99, num_samples=7)
    assert steps(other, its, [batch]) == steps(model, optimizer, [batch])


def test_what_transformers_leaves_out_is_there(tmp_path: Path) -> None:
    class Ignoring(transformers.LlamaForCausalLM):
        _keys_to_ignore_on_save = ("model.norm.weight",)

    model, other = (Ignoring(models.llama_tied()[0].config) for _ in range(2))
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    path = hightide.save(model, None, tmp_path, step=1).wait()
    hightide.load(other, None, path)
    assert torch.equal(other.model.norm.weight, model.model.norm.weight)


def test_it_is_read_by_hightide_and_by_transformers_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_SHARD_BYTES", 20_000)
    model, optimizer = trained("llama_tied")
    path = hightide.save(model, optimizer, tmp_path).wait()
    assert len(list(path.glob("model-*-of-*.safetensors"))) > 3 and len(list(path.glob("optimizer-*"))) > 6
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in expected.items())
    ours = hightide.from_pretrained(path).train()
    ours, its = wrap(ours, make_optimizer(ours), LLAMA.batches(1)[0], **WRAP)
    assert all(torch.equal(value, ours.state_dict()[key]) for key, value in expected.items())
    hightide.load(ours, its, tmp_path)
    batch = LLAMA.batches(1, seed=70)
    assert steps(ours, its, batch) == steps(model, optimizer, batch)


# -- adapters --------------------------------------------------------------------------------------------------------


def adapted(offset: float = 0.0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Adapters, a head that is saved with them, and norms that somebody has unfrozen."""
    model, example = lora(modules_to_save=["lm_head"], **options)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.requires_grad_(param.requires_grad or "layernorm" in name)
            param.add_(offset * param.requires_grad)
    return wrap(model, make_optimizer(model), example, **WRAP)


def test_adapters_are_saved_as_peft_does_and_with_them_all_that_trains(tmp_path: Path) -> None:
    model, optimizer = adapted()
    steps(model, optimizer, LLAMA.batches(2))
    path = hightide.save(model, optimizer, tmp_path).wait()
    model.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    assert_same_tensors(stored(path, "adapter_model*"), stored(tmp_path / "theirs", "adapter_model*"))
    assert filecmp.cmp(path / "adapter_config.json", tmp_path / "theirs" / "adapter_config.json", shallow=False)
    beside = stored(path, "trained-*")
    assert len(beside) == 6 and all("layernorm" in name for name in beside) and not stored(path)
    base = peft.PeftModel.from_pretrained(models.llama(num_layers=3)[0], path)
    found = base.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value) or "layernorm" in name, name
    other, its = adapted(offset=0.5)
    steps(other, its, LLAMA.batches(1, seed=50))
    hightide.load(other, its, path)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    batch = LLAMA.batches(1, seed=70)
    assert steps(other, its, batch) == steps(model, optimizer, batch)


def test_frozen_parameters_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = adapted()
    steps(model, optimizer, LLAMA.batches(1))
    saving = hightide.save(model, optimizer, tmp_path, wait=True)
    trained_bytes = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    assert saving.num_bytes == 3 * trained_bytes, "parameters and two moments"


def test_all_of_several_adapters_are_there(tmp_path: Path) -> None:
    """The second is frozen (a reference, as in DPO): its values are in no other file."""

    def two(offset: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, example = lora()
        model.add_adapter("reference", model.peft_config["default"])  # type: ignore[operator, index]
        model.set_adapter("default")  # type: ignore[operator]
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.add_(offset if "lora" in name else 0)
        return wrap(model, make_optimizer(model), example, **WRAP)

    model, optimizer = two(0.1)
    steps(model, optimizer, LLAMA.batches(1))
    path = hightide.save(model, optimizer, tmp_path, wait=True).path
    beside = stored(path, "trained-*")
    assert beside and all(".reference." in name for name in beside) and stored(path, "adapter_model*")
    other, its = two(0.7)
    hightide.load(other, its, path)
    values = other.state_dict()
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items() if "lora" in name)


def test_a_checkpoint_of_adapters_does_not_fit_another_model(tmp_path: Path) -> None:
    model, optimizer = adapted()
    steps(model, optimizer, LLAMA.batches(1))
    path = hightide.save(model, optimizer, tmp_path, wait=True).path
    plain, _ = LLAMA.build()
    with pytest.raises(ValueError, match=r"does not fit .* tensors are missing"):
        hightide.load(plain, None, path)
    fewer = lora()[0]
    with pytest.raises(ValueError, match=r"1 tensors are not in the model: base_model.model.lm_head.weight"):
        hightide.load(fewer, None, path)
