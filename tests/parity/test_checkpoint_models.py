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
from hightide.checkpoint.files.folder import damages
from hightide.integrations import model_files
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


ROOMY = {"limits": hightide.Limits("64MiB", "1GiB")}


def several(
    names: tuple[str, ...], offset: float, options: dict[str, Any] | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Adapters of different ranks, of which the first trains, and the last has a head of its own. Without options
    plain."""
    model, example = models.llama(num_layers=2, num_samples=7)
    configs = [peft.LoraConfig(r=2 + index, target_modules=["q_proj"]) for index in range(len(names))]
    configs[-1].modules_to_save = ["lm_head"]
    adapted = peft.get_peft_model(model, configs[0], adapter_name=names[0])
    for name, config in zip(names[1:], configs[1:], strict=True):
        adapted.add_adapter(name, config)
    adapted.set_adapter(names[0])
    with torch.no_grad():
        for number, (name, param) in enumerate(adapted.named_parameters()):
            param.add_(offset + number / 100 if "lora" in name or "modules_to_save" in name else 0)
    optimizer = make_optimizer(adapted)
    return (adapted, optimizer) if options is None else wrap(adapted, optimizer, example, **options)


def adapter_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value for key, value in model.state_dict().items() if "lora" in key or "modules_to_save" in key}


@pytest.mark.parametrize(
    ("names", "options"), [(("default", "judge", "Référence 2"), ROOMY), (("actor", "judge"), None)]
)
def test_each_of_several_adapters_has_its_folder_as_peft_has_it(
    names: tuple[str, ...], options: dict[str, Any] | None, tmp_path: Path
) -> None:
    """The others are frozen (a reference, as in DPO): their values are in no other file."""
    model, optimizer = several(names, 0.1, options)
    steps(model, optimizer, LLAMA.batches(1))
    path = hightide.save(model, optimizer, tmp_path / "ours", wait=True).path
    model.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    assert not stored(path, "trained-*") and not damages(path)
    for name in names:
        ours, theirs = path / ("" if name == names[0] else name), tmp_path / "theirs" / (name * (name != "default"))
        assert_same_tensors(stored(ours, "adapter_model*"), stored(theirs, "adapter_model*"))
        assert filecmp.cmp(ours / "adapter_config.json", theirs / "adapter_config.json", shallow=False)
    loaded = peft.PeftModel.from_pretrained(models.llama(num_layers=2)[0], path, adapter_name=names[0])
    for name in names[1:]:
        loaded.load_adapter(path / name, adapter_name=name)
    values, found = adapter_values(model), adapter_values(loaded)
    assert found.keys() == values.keys() and all(torch.equal(found[key], value) for key, value in values.items())


@pytest.mark.parametrize("options", [WRAP, ROOMY, None])
def test_several_adapters_load_under_any_plan(options: dict[str, Any] | None, tmp_path: Path) -> None:
    names = ("judge", "default", "third")  # PEFT's "default" is at the top, wherever it stands
    model, optimizer = several(names, 0.1, WRAP)
    steps(model, optimizer, LLAMA.batches(1))
    path = hightide.save(model, optimizer, tmp_path, wait=True).path
    assert {one.name for one in path.iterdir() if one.is_dir()} == {"judge", "third"}
    other, its = several(names, 0.7, options)
    hightide.load(other, its, tmp_path)
    values, found = adapter_values(model), adapter_values(other)
    assert all(torch.equal(found[key], value) for key, value in values.items())
    again = hightide.save(other, its, tmp_path / "again", step=1, wait=True).path
    for file in ("adapter_model.safetensors", "judge/adapter_model.safetensors", "third/adapter_model.safetensors"):
        assert_same_tensors(stored(path, file), stored(again, file))
    assert_same_tensors(stored(path, "optimizer-*"), stored(again, "optimizer-*"))


def test_adapters_that_were_saved_without_folders_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As further ones were before they had folders: among all else that trains."""
    names = ("default", "judge")
    model, other = (several(names, offset)[0] for offset in (0.1, 0.7))
    for name, param in model.named_parameters():
        param.requires_grad_("lora" in name or "modules_to_save" in name)
    known = model_files._adapters
    with monkeypatch.context() as patch:
        patch.setattr(model_files, "_adapters", lambda *args: known(*args)[:1])
        path = hightide.save(model, None, tmp_path, step=1, wait=True).path
    assert stored(path, "trained-*") and not (path / "judge").exists()
    hightide.load(other, None, path)
    found = adapter_values(other)
    assert all(torch.equal(found[key], value) for key, value in adapter_values(model).items())


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
