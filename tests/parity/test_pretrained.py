"""A folder's values go straight into chunks: what trains then is the model that transformers would have loaded."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import SUBJECTS, assert_parity, make_optimizer, train, wrap
from safetensors.torch import load_file, save_file
from torch import nn

import hightide
import models

LLAMA = SUBJECTS["llama"]
WRAP = {"micro_batch": 3}


def moe(**batch: Any) -> models.Pair:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        experts_implementation="eager",
    )
    return transformers.Qwen3MoeForCausalLM(config), models.token_batch(**batch)


BUILDS = {
    "llama": partial(models.llama, tied=False),
    "llama_tied": partial(models.llama, tied=True),
    "gpt2": models.gpt2,
    "t5": models.t5,
    "vit": models.vit,
    "moe": moe,  # its experts are stored one by one, and are one tensor in the model
}


def save(build: Any, folder: Path, max_shard_size: str = "60KB", **options: Any) -> tuple[Path, dict[str, Any]]:
    model, batch = build(**options)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder, batch


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in ("llama", "vit") else []) for name in BUILDS]
)
def test_all_values_are_those_that_transformers_loads(name: str, tmp_path: Path) -> None:
    folder, batch = save(BUILDS[name], tmp_path)
    kind = type(BUILDS[name]()[0])
    expected: Any = kind.from_pretrained(folder)  # type: ignore[attr-defined]
    model = hightide.from_pretrained(folder)
    assert all(param.is_meta for param in model.parameters())
    assert model.training == expected.training
    model, _ = wrap(model, make_optimizer(model), batch, **WRAP)
    values = model.state_dict()
    assert list(values) == list(expected.state_dict())
    for key, value in expected.state_dict().items():
        assert values[key].dtype == value.dtype and torch.equal(values[key], value), key
    buffers = dict(model.named_buffers())
    assert list(buffers) == [key for key, _ in expected.named_buffers()]
    for key, buffer in expected.named_buffers():
        assert torch.equal(buffers[key], buffer), key
    plain = hightide.unwrap(model)
    assert type(plain) is kind
    with torch.no_grad():
        assert torch.equal(plain(**batch).loss, expected(**batch).loss)


@pytest.mark.parametrize(("name", "update"), [("llama_tied", "deferred"), ("gpt2", "in_backward")])
def test_it_trains_as_the_plain_model_does(name: str, update: str, tmp_path: Path) -> None:
    subject = SUBJECTS[name]
    folder, example = save(partial(subject.build, num_samples=7), tmp_path)
    kind: Any = type(subject.build()[0])
    plain = train((kind.from_pretrained(folder).train(), example), subject.batches(6))
    model = hightide.from_pretrained(folder).train()
    wrapped = train((model, example), subject.batches(6), wrap=WRAP | {"update": update})
    assert_parity(plain, wrapped)


@pytest.mark.parametrize(
    ("dtype", "shards"),
    [(None, "60KB"), (torch.bfloat16, "1GB"), ("auto", "1GB"), pytest.param("float32", "60KB", marks=pytest.mark.long)],
)
def test_dtype_is_the_configs_or_the_one_asked_for(dtype: Any, shards: str, tmp_path: Path) -> None:
    model, batch = models.llama()
    model.to(torch.float16).save_pretrained(tmp_path, max_shard_size=shards)  # type: ignore[operator]
    assert (tmp_path / "model.safetensors").exists() == (shards == "1GB")
    wanted = {None: torch.float16, "auto": torch.float16, "float32": torch.float32}.get(dtype, dtype)
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=wanted)
    loaded = hightide.from_pretrained(tmp_path, dtype=dtype)
    assert {param.dtype for param in loaded.parameters()} == {wanted}
    assert loaded.config.dtype == wanted
    loaded, _ = wrap(loaded, make_optimizer(loaded), batch, **WRAP)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, expected.state_dict()[key]), key
    for key, buffer in loaded.named_buffers():
        assert torch.equal(buffer, dict(expected.named_buffers())[key]), key


def test_a_conversion_after_loading_is_respected(tmp_path: Path) -> None:
    folder, batch = save(models.llama, tmp_path)
    model = hightide.from_pretrained(folder).to(torch.bfloat16)
    model, _ = wrap(model, make_optimizer(model), batch, **WRAP)
    original = models.llama()[0].state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, original[key].to(torch.bfloat16)), key


def test_parameters_are_known_whatever_is_built_around_the_model(tmp_path: Path) -> None:
    """As PEFT does: other names, new parameters beside the old ones."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.adapter = nn.Linear(base.in_features, base.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) + self.adapter(x)

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **batch: Any) -> Any:
            return self.inner(**batch)

    folder, batch = save(models.llama, tmp_path)
    inner: Any = hightide.from_pretrained(folder)
    for layer in inner.model.layers:
        layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    model: nn.Module = Around(inner)
    model, _ = wrap(model, make_optimizer(model), batch, **WRAP)
    values = model.state_dict()
    for key, value in models.llama()[0].state_dict().items():
        assert torch.equal(values["inner." + key.replace("up_proj.", "up_proj.base_layer.")], value), key
    assert bool(model(**batch).loss.isfinite())


def test_parameters_added_on_the_meta_device_are_refused(tmp_path: Path) -> None:
    """PEFT puts adapters where the base is. Initialised like any layer they would change what the model computes."""
    folder, batch = save(models.llama, tmp_path)
    model: Any = hightide.from_pretrained(folder)
    model.model.layers[0].adapter = nn.Linear(4, 4, device="meta")
    with pytest.raises(ValueError, match=r"2 parameters .*layers\.0\.adapter\.weight.*before hightide\.wrap"):
        wrap(model, make_optimizer(model), batch, **WRAP)


def test_it_cannot_be_called_or_copied_before_it_is_wrapped(tmp_path: Path) -> None:
    folder, batch = save(models.llama, tmp_path)
    model = hightide.from_pretrained(folder)
    with pytest.raises(RuntimeError, match=r"still in .*hightide\.wrap"):
        model(**batch)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(model)
    assert isinstance(model, transformers.LlamaForCausalLM) and type(model).__name__ == "LlamaForCausalLM"


def test_a_refused_plan_leaves_it_loadable(tmp_path: Path) -> None:
    folder, batch = save(models.llama, tmp_path)
    model = hightide.from_pretrained(folder)
    with pytest.raises(ValueError, match="bytes"):
        hightide.wrap(model, make_optimizer(model), batch, limits=hightide.Limits(gpu="1KiB", host="64MiB"))
    model, _ = wrap(model, make_optimizer(model), batch, **WRAP)
    assert torch.equal(model.state_dict()["lm_head.weight"], models.llama()[0].state_dict()["lm_head.weight"])


def test_options_of_the_config_and_of_the_class(tmp_path: Path) -> None:
    folder, _ = save(models.llama, tmp_path)
    model: Any = hightide.from_pretrained(folder, attn_implementation="eager", attention_dropout=0.25)
    assert model.config._attn_implementation == "eager" and model.config.attention_dropout == 0.25
    with pytest.raises(ValueError, match="no 'colour'"):
        hightide.from_pretrained(folder, colour="red")
    auto = hightide.from_pretrained(folder, model_class=transformers.AutoModelForCausalLM)
    assert type(auto).__mro__[2] is transformers.LlamaForCausalLM
    with pytest.raises(ValueError, match="AutoModelForMaskedLM has no model for a LlamaConfig"):
        hightide.from_pretrained(folder, model_class=transformers.AutoModelForMaskedLM)
    with pytest.raises(ValueError, match="no floating-point dtype"):
        hightide.from_pretrained(folder, dtype="int8")


def test_generation_goes_on_as_in_the_folder(tmp_path: Path) -> None:
    model, _ = models.llama()
    model.generation_config.max_new_tokens = 3  # type: ignore[union-attr]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert hightide.from_pretrained(tmp_path).generation_config.max_new_tokens == 3  # type: ignore[union-attr]


def changed(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: value.clone() for name, value in tensors.items()}, path, metadata={"format": "pt"})


def test_tensors_that_do_not_fit_are_named_and_counted(tmp_path: Path) -> None:
    folder, _ = save(models.llama, tmp_path, max_shard_size="1GB")

    def change(tensors: Any) -> None:
        del tensors["model.norm.weight"]
        tensors["strange"] = torch.ones(3)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]

    changed(folder, change)
    with pytest.raises(ValueError) as refusal:
        hightide.from_pretrained(folder)
    message = str(refusal.value)
    assert "1 tensors are missing: model.norm.weight" in message
    assert "1 tensors are not in the model: strange" in message
    assert "1 tensors have another shape: lm_head.weight (95, 32) instead of (96, 32)" in message


def test_old_files_with_computed_buffers_load(tmp_path: Path) -> None:
    folder, batch = save(models.llama, tmp_path, max_shard_size="1GB")
    changed(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    model = hightide.from_pretrained(folder)
    wrap(model, make_optimizer(model), batch, **WRAP)


def test_a_tied_parameter_may_be_stored_twice_if_equal(tmp_path: Path) -> None:
    folder, batch = save(partial(models.llama, tied=True), tmp_path, max_shard_size="1GB")
    changed(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    model = hightide.from_pretrained(folder)
    model, _ = wrap(model, make_optimizer(model), batch, **WRAP)
    assert torch.equal(model.state_dict()["lm_head.weight"], load_file(folder / "model.safetensors")["lm_head.weight"])
    changed(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match=r"one parameter .*tie_word_embeddings=False"):
        hightide.from_pretrained(folder)
    untied = hightide.from_pretrained(folder, tie_word_embeddings=False)
    untied, _ = wrap(untied, make_optimizer(untied), batch, **WRAP)
    assert torch.equal(untied.state_dict()["lm_head.weight"], load_file(folder / "model.safetensors")["lm_head.weight"])


def test_folders_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder here"):
        hightide.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no config\.json"):
        hightide.from_pretrained(tmp_path)
    folder, _ = save(models.llama, tmp_path / "sharded")
    index = folder / "model.safetensors.index.json"
    (folder / "model-00001-of-00003.safetensors").rename(folder / "elsewhere")
    shards = len(set(json.loads(index.read_text())["weight_map"].values()))
    with pytest.raises(ValueError, match=f"1 of {shards} files .* are missing: model-00001"):
        hightide.from_pretrained(folder)
    index.unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .*not downloaded as a whole; get it again"):
        hightide.from_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .*; convert it once"):
        hightide.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "elsewhere").rename(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    with pytest.raises(ValueError, match="no model class 'NoSuchModel'"):
        hightide.from_pretrained(folder)
