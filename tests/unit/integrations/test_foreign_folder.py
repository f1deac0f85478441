"""A folder of a stranger cannot have code or other files loaded, and is read as it is or refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hightide
from hightide.cli.main import app
from hightide.integrations.foreign_folder import INDEX, SINGLE
from hightide.loading.unloaded import origins_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=32, dtype="float32", **size)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="8KB")
    whole = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    whole.save_pretrained(tmp_path / "whole")
    return tmp_path / "model"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def plan_output(folder: Path) -> str:
    options = ["--sequences", "2", "--length", "8", "--machine", "h200", "--gpu", "2GiB", "--host", "8GiB"]
    result = CliRunner().invoke(app, ["plan", str(folder), *options])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def check_refused(folder: Path, *words: str) -> None:
    """By loading and by planning, in the same words."""
    with pytest.raises(ValueError) as refused:
        hightide.from_pretrained(folder)
    said = " ".join(str(refused.value).split())
    assert len(said) < 3000
    for word in words:
        assert word in said and word in plan_output(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"_attn_implementation": "some/kernel"}, ("'some/kernel'", "code loaded from elsewhere")),
        ({"attn_implementation": "flash_attention_2"}, ("'flash_attention_2'", "remove it there")),
        ({"_attn_implementation": {"": "paged|a/b"}}, ("'paged|a/b'",)),
        ({"text_config": {"_attn_implementation": "a/b"}}, ("'a/b'",)),
        ({"parts": [{"vision": {"_attn_implementation": "a/b"}}]}, ("'a/b'",)),
        ({"_experts_implementation": "deepgemm"}, ("'deepgemm'",)),
        ({"_attn_implementation_internal": "a/b"}, ("'a/b'",)),
        ({"trust_remote_code": True}, ("trust_remote_code is True",)),
        ({"configuration_files": ["config.4.0.0.json"]}, ("configuration_files",)),
        ({"use_kernels": True}, ("use_kernels is True",)),
        ({"vision_config": {"use_timm_backbone": True}}, ("use_timm_backbone",)),
        ({"backbone_config": {"model_type": "timm_backbone"}}, ("timm",)),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, ("custom code", "never runs")),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("is quantised", "use the original model")),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ("is quantised",)),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, ("is quantised",)),
        ({"compression_config": {"format": "x"}}, ("is quantised",)),
        ({"architectures": ["Trainer"]}, ("no model class 'Trainer'",)),
        ({"architectures": ["pipeline"]}, ("no model class 'pipeline'",)),
        ({"architectures": ["LlamaConfig"]}, ("no model class 'LlamaConfig'",)),
        ({"architectures": ["PreTrainedModel"]}, ("not what that class takes",)),
        ({"architectures": ["GPT2LMHeadModel"]}, ("not what that class takes",)),
        ({"architectures": "LlamaForCausalLM"}, ()),
        ({"architectures": [["a"]]}, ()),
        ({"model_type": "nope"}, ("nope",)),
        ({"model_type": None}, ()),
        ({"dtype": "load"}, ("dtype",)),
        ({"dtype": "int8"}, ("dtype",)),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers is 1000000000; at most 2048",)),
        ({"num_labels": 10**9}, ("num_labels is 1000000000; at most 65536",)),
        ({"vocab_size": 10**15}, ("vocab_size is 1000000000000000; at most",)),
        ({"vocab_size": 2**40}, ()),  # its words depend on how much memory the machine would give
        ({"hidden_size": 0}, ()),
        ({"hidden_size": -16}, ("config.json",)),
        ({"hidden_size": "x"}, ("hidden_size",)),
        ({"hidden_size": None}, ("hidden_size",)),
        ({"hidden_size": [16]}, ("hidden_size",)),
        ({"num_attention_heads": 0}, ()),
        ({"head_dim": 2**39}, ("config.json",)),
        ({"rope_parameters": {"rope_type": "x"}}, ()),
        ({"rope_parameters": 3}, ("rope_parameters",)),
        ({"hidden_act": "x"}, ("config.json",)),
        ({"to_dict": 3}, ()),
        ({"get_text_config": 3}, ()),
    ],
)
def test_what_a_config_may_not_decide(folder: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    edit(folder / "config.json", **changes)
    check_refused(folder, *words)


def test_code_of_a_folder_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model type that transformers knows is its own, and the folder's word is said aloud and forgotten."""
    (folder / "mine.py").write_text("raise SystemExit('code of the folder')")
    edit(folder / "config.json", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"})
    with pytest.warns(UserWarning, match="auto_map.*never runs"):
        model = hightide.from_pretrained(folder)
    assert not hasattr(model.config, "auto_map")
    with pytest.raises(ValueError, match="leave trust_remote_code out"):
        hightide.from_pretrained(folder, trust_remote_code=True)


def test_nothing_is_fetched_while_a_model_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    seen: list[bool] = []
    original = transformers.LlamaForCausalLM.__init__

    def spy(self: Any, config: Any) -> None:
        seen.append(constants.HF_HUB_OFFLINE)
        original(self, config)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", spy)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hightide.from_pretrained(folder)
    assert seen == [True] and not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 300 + "1" + "}" * 300, "[]", "3", "", "\0", '{"a": 1, "a": 2}']
)
def test_configs_that_are_none(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    check_refused(folder, "config.json")


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../whole/model.safetensors", "no name of a .safetensors file"),
        ("/etc/passwd", "no name of a .safetensors file"),
        ("/dev/zero", "no name of a .safetensors file"),
        ("..\\\\whole.safetensors", "no name of a .safetensors file"),
        ("a\0.safetensors", "no name of a .safetensors file"),
        ("config.json", "no name of a .safetensors file"),
        ("", "no name of a .safetensors file"),
        (3, "no name of a .safetensors file"),
        ("absent.safetensors", "1 of 6 files .* are missing: absent.safetensors"),
        ("pipe.safetensors", "no regular file"),
        ("folder.safetensors", "no regular file"),
        ("device.safetensors", "no regular file"),
    ],
)
def test_an_index_does_not_lead_out_of_its_folder(folder: Path, name: Any, message: str) -> None:
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "folder.safetensors").mkdir()
    (folder / "device.safetensors").symlink_to("/dev/zero")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit(folder / INDEX, weight_map={**weight_map, "model.norm.weight": name})
    with pytest.raises(ValueError, match=message):
        hightide.from_pretrained(folder)


def test_links_into_a_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    """A hub's cache has snapshots/REVISION/FILE -> ../../blobs/HASH."""
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "abc", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number}")
    model = hightide.from_pretrained(snapshot)
    assert len(origins_in(model)) == len(list(model.parameters()))


def test_an_index_and_its_files_must_agree(folder: Path) -> None:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    name = next(name for name, file in weight_map.items() if file == files[0])
    for changed, message in (
        ({**weight_map, "stranger": files[0]}, "1 tensors of .* are in none of its files: stranger"),
        ({key: file for key, file in weight_map.items() if key != name}, "tensors of .* are not there by"),
        ({**weight_map, name: files[1]}, "tensors of .* are not there by"),
        ({}, "no weight_map"),
        ([1], "no weight_map"),
    ):
        edit(folder / INDEX, weight_map=changed)
        with pytest.raises(ValueError, match=message):
            hightide.from_pretrained(folder)


# -- dtypes --------------------------------------------------------------------------------------------------------


def relabelled(path: Path, before: str, after: str) -> None:
    """The header says another dtype; the bytes stay."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(f'"{before}"'.encode(), f'"{after}"'.encode())
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def test_integers_where_floats_are_expected(tmp_path: Path, folder: Path) -> None:
    whole = tmp_path / "whole"
    relabelled(whole / SINGLE, "F32", "I32")
    with pytest.raises(
        ValueError, match=r"21 tensors have another kind of dtype: .*torch\.int32 instead of torch\.float32"
    ):
        hightide.from_pretrained(whole)


@pytest.mark.parametrize("says", ["bfloat16", None])
def test_sixteen_bits_of_another_kind_are_refused(tmp_path: Path, folder: Path, says: str | None) -> None:
    whole = tmp_path / "whole"
    tensors = {name: value.bfloat16() for name, value in load_file(whole / SINGLE).items()}
    save_file(tensors, whole / SINGLE)
    edit(whole / "config.json", dtype=says)
    hightide.from_pretrained(whole)  # as they are: nothing to say
    if says is None:  # then only a mixture shows it
        tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
        save_file(tensors, whole / SINGLE)
    else:
        relabelled(whole / SINGLE, "BF16", "F16")
    with pytest.raises(ValueError, match=r"tensors in float16.*16 bits.*pass dtype="):
        hightide.from_pretrained(whole)
    with pytest.warns(UserWarning, match="tensors in float16.*16 bits"):
        hightide.from_pretrained(whole, dtype="float32")


def test_a_table_beyond_memory_is_refused_before_it_is_made(tmp_path: Path) -> None:
    config = transformers.GPTJConfig(n_embd=16, n_layer=1, n_head=2, n_positions=10**6, vocab_size=64, rotary_dim=4)
    config.architectures = ["GPTJForCausalLM"]
    config.rotary_dim = 2**36
    config.save_pretrained(tmp_path)
    assert "config.json" in plan_output(tmp_path)


def test_a_model_of_too_many_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hightide.loading import unloaded

    monkeypatch.setattr(unloaded, "MAX_PARAMETERS", 10)
    with pytest.raises(ValueError, match="more than 10 parameters"):
        hightide.from_pretrained(folder)


def test_parameters_are_counted_though_their_originals_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one leaves its place in memory, and so its id, to the next."""
    from hightide.loading import unloaded

    monkeypatch.setattr(unloaded, "MAX_PARAMETERS", 10)
    module = torch.nn.Module()
    with unloaded.parameters_on_meta(), pytest.raises(ValueError, match="more than 10 parameters"):
        for number in range(100):
            module.register_parameter(f"weight{number}", torch.nn.Parameter(torch.empty(4)))
    assert len(list(module.parameters())) == 10
