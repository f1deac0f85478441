"""Where the model comes from, and what follows from it; what is missing is said with the remedy."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hightide.cli.train.config import DataConfig, ModelConfig, TrainConfig
from hightide.cli.train.model_source import ModelSource, find_model
from hightide.cli.workload import Dtype
from hightide.loading.unloaded import origins_in
from tiny_folders import SHAPE, tiny_folder

transformers = pytest.importorskip("transformers")


def config_for(path: object, **options: object) -> TrainConfig:
    return TrainConfig(model=ModelConfig(path=str(path)), data=DataConfig(path=__file__), **options)  # type: ignore[arg-type]


def find(config: TrainConfig) -> ModelSource:
    return find_model(config, Console(file=io.StringIO()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder(), tmp_path / "model"))


def test_a_real_model_is_trained_gently_in_bfloat16() -> None:
    source = find(config_for(tiny_folder()))
    settled = source.settled(config_for(tiny_folder()))
    assert (settled.optimizer.lr, settled.model.dtype, settled.sample.tokens) == (1e-5, Dtype.BFLOAT16, 0)
    assert settled.data.length == 2048 and settled.data.pack is True and settled.steps is None
    assert source.settled(config_for(tiny_folder(), lora="4")).optimizer.lr == 1e-4


def test_without_a_folder_a_tiny_model_is_made_once(tmp_path: Path) -> None:
    shape = replace(SHAPE, vocabulary=260)
    config = TrainConfig(out=str(tmp_path), model=shape, data=DataConfig(path=__file__))
    source = find(config)
    settled = source.settled(config)
    assert (settled.optimizer.lr, settled.model.dtype, settled.steps) == (2e-3, Dtype.FLOAT32, 100)
    before = (source.folder / "model.safetensors").stat().st_mtime_ns
    again = find(config)
    assert again.folder == source.folder and again.checksum == source.checksum
    assert (again.folder / "model.safetensors").stat().st_mtime_ns == before
    assert find(replace(config, seed=1)).checksum != source.checksum
    assert [path.name[:11] for path in tmp_path.iterdir()] == ["tiny-model-"] * 2
    text = "def f(x):\n    return 'é'"
    assert source.tokenizer.decode(source.tokenizer(text).input_ids) == text


def test_half_of_a_tiny_model_is_made_whole(tmp_path: Path) -> None:
    """As ranks have left them, of which only the first wrote the model."""
    config = TrainConfig(out=str(tmp_path), model=replace(SHAPE, vocabulary=260), data=DataConfig(path=__file__))
    source = find(config)
    for name in ("config.json", "model.safetensors"):
        (source.folder / name).unlink()
    (source.folder / "notes.txt").write_text("mine")
    again = find(config)
    assert again.folder == source.folder and again.checksum == source.checksum
    assert (source.folder / "notes.txt").is_file() and list(tmp_path.iterdir()) == [source.folder]


def test_data_that_cannot_be_read_leave_no_half_of_a_tiny_model(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("nonsense")
    with pytest.raises(ValueError, match=r"line 1: it is not JSON"):
        find(TrainConfig(out=str(tmp_path / "runs"), data=DataConfig(path=str(data))))
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_name_is_looked_up_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(tiny_folder(), snapshot)
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    source = find(config_for("someone/tiny"))
    assert source.folder.resolve() == snapshot.resolve() and source.name == "someone/tiny"
    with pytest.raises(ValueError, match=r"'someone/other' is no folder here and not in the local cache; download it"):
        find(config_for("someone/other"))


def test_what_is_missing_in_a_folder_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"takes sequences of up to 4096 tokens"):
        find(config_for(folder)).settled(replace(config_for(folder), data=DataConfig(path="x", length=5000)))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": 200}))
    with pytest.raises(ValueError, match=r"up to 299, and the model only 200. .*resize_token_embeddings\(300\)"):
        find(config_for(folder))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"the tokenizer of .* cannot be loaded"):
        find(config_for(folder))
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer \(tokenizer.json\); copy"):
        find(config_for(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json; it must be a folder"):
        find(config_for(folder))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no config.json, only adapters .*merge_and_unload"):
        find(config_for(folder))


@pytest.mark.parametrize(
    "change", [{"architectures": ["BertForMaskedLM"]}, {"is_encoder_decoder": True, "decoder_start_token_id": 0}]
)
def test_what_is_no_causal_language_model_is_refused(folder: Path, change: dict[str, object]) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **change}))
    with pytest.raises(ValueError, match=r"trains causal language models only\. Train it in a loop of your own"):
        find(config_for(folder))


def test_float16_which_needs_scaled_losses_is_refused() -> None:
    config = config_for(tiny_folder())
    with pytest.raises(ValueError, match=r"--dtype float16 needs its losses scaled.*use bfloat16"):
        find(config).settled(replace(config, model=replace(config.model, dtype=Dtype.FLOAT16)))


def test_models_that_may_mix_packed_sequences_are_padded(folder: Path) -> None:
    source = find(config_for(folder))
    source.config.model_type = "gpt2"
    assert source.settled(config_for(folder)).data.pack is False
    with pytest.raises(ValueError, match=r"--pack: models of type 'gpt2' are not known to keep"):
        source.settled(replace(config_for(folder), data=DataConfig(path="x", pack=True)))


def test_weights_stay_in_their_files_and_adapters_have_first_values() -> None:
    pytest.importorskip("peft")
    config = config_for(tiny_folder(), lora="4:q_proj,embed_tokens", seed=3)
    source = find(config)
    model, again = (source.build(source.settled(config)) for _ in range(2))
    params = dict(model.named_parameters())
    adapters = {name: param for name, param in params.items() if "lora_" in name}
    assert len(origins_in(model)) == len(params) - len(adapters) and adapters
    for name, param in params.items():
        assert param.is_meta == (name not in adapters) and param.requires_grad == (name in adapters)
    for name, param in adapters.items():
        assert param.dtype == torch.float32
        is_zero = ("_B." in name) != ("embedding" in name)  # as PEFT has it
        assert (param.abs().sum() == 0) == is_zero, name
        assert torch.equal(param, dict(again.named_parameters())[name])
    assert model.peft_config["default"].base_model_name_or_path == str(tiny_folder())  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match=r"cannot adapt nothing of a Llama.*modules end in q_proj, k_proj"):
        source.build(source.settled(config_for(tiny_folder(), lora="4:nothing")))
