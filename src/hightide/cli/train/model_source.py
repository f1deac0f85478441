"""Where the model of a run comes from: its folder, its tokenizer, and the model itself, whose values stay in the files
until `wrap` reads them. With LoRA only the adapters have values before that.

[Note: one length] Rotary embeddings may follow the length of a call, padding included: LongRoPE has others behind
the model's original length. Which sequences meet in a call, and how long the longest of them is, would then decide what
each of them learns; so where sequences may be that long all rows are padded to one length."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import hightide
from hightide.cli.train.config import TrainConfig
from hightide.cli.train.tiny_model import STANDARD_LIBRARY, tiny_folder
from hightide.cli.workload import Dtype
from hightide.data.packing import SEPARATED
from hightide.integrations.foreign_folder import CONFIG, blaming, check_folder, import_transformers
from hightide.integrations.lora import Lora, with_adapters
from hightide.integrations.shapes import config_of_folder, max_length, same_rotary_length
from hightide.ir.foreign import KEPT, quoted, shown, with_article

LENGTH, TINY_LENGTH = 2048, 128
LR, LORA_LR, TINY_LR = 1e-5, 1e-4, 2e-3
TINY_STEPS, TINY_SAMPLE = 100, 60
CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # the last: with images too
SEEN_BYTES = 1 << 20  # at both ends of each file of weights, to know it again


@dataclass(frozen=True)
class ModelSource:
    folder: Path
    name: str  # by which others find it: of a hub, or where it is
    config: Any  # of transformers
    tokenizer: Any

    @property
    def keeps_packed_apart(self) -> bool:
        """See [Note: packed sequences] in data/packing.py."""
        return self.config.model_type in SEPARATED

    def follows_length(self, length: int) -> bool:
        """Whether what a sequence of so many tokens learns depends on how long its call is. See [Note: one length]."""
        most = same_rotary_length(self.config)
        return most is not None and length > most

    @property
    def pad_id(self) -> int:
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0

    @property
    def checksum(self) -> int:
        """Of its config and of parts of its weights: enough to tell it from another one."""
        found = zlib.crc32((self.folder / CONFIG).read_bytes())
        for path in sorted(self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                found = zlib.crc32(file.read(SEEN_BYTES), found)
                file.seek(max(0, path.stat().st_size - SEEN_BYTES))
                found = zlib.crc32(file.read(SEEN_BYTES), found)
        return found

    def settled(self, config: TrainConfig) -> TrainConfig:
        """With what follows from the model, where the settings leave it open."""
        is_tiny, most = config.is_tiny, max_length(self.config)
        length = config.data.length or min(TINY_LENGTH if is_tiny else LENGTH, most or LENGTH)
        if most is not None and length > most:
            raise ValueError(f"--length {length}: {shown(self.folder)} takes sequences of up to {most} tokens")
        lr = config.optimizer.lr
        if lr is None:
            lr = TINY_LR if is_tiny else LR if config.lora is None else LORA_LR
        dtype = config.model.dtype or (Dtype.FLOAT32 if is_tiny else Dtype.BFLOAT16)
        tokens = config.sample.tokens if config.sample.tokens is not None else TINY_SAMPLE if is_tiny else 0
        follows = self.follows_length(length)
        if follows and config.data.pack:
            raise ValueError(
                f"--pack: rotary embeddings of {shown(self.folder)} change where a call has more than "
                f"{same_rotary_length(self.config)} tokens, so packed sequences would learn others than single ones; "
                f"give --length {same_rotary_length(self.config)}, or leave --pack out: then every row is padded to "
                f"{length} tokens"
            )
        pack = (self.keeps_packed_apart and not follows) if config.data.pack is None else config.data.pack
        if pack and not self.keeps_packed_apart:
            raise ValueError(
                f"--pack: models of type {quoted(self.config.model_type)} are not known to keep packed sequences apart "
                f"(those of {', '.join(sorted(SEPARATED))} are); leave it out, then sequences are padded"
            )
        return replace(
            config,
            model=replace(config.model, dtype=dtype),
            data=replace(config.data, length=length, pack=pack),
            optimizer=replace(config.optimizer, lr=lr),
            sample=replace(config.sample, tokens=tokens),
            steps=TINY_STEPS if is_tiny and config.steps is None and config.epochs is None else config.steps,
        )

    def build(self, config: TrainConfig) -> nn.Module:
        """Without values, but for adapters."""
        assert config.model.dtype is not None
        model = hightide.from_pretrained(self.folder, dtype=config.model.dtype.torch)
        if config.lora is None:
            return model.train()
        model.__dict__["name_or_path"] = self.name  # which the adapters name as their base
        torch.manual_seed(config.seed)
        return with_adapters(model, Lora.parse(config.lora), have_values=True).train()


def make_tiny(config: TrainConfig) -> Path:
    """Unless it is there."""
    text = STANDARD_LIBRARY if config.data.path is None else Path(config.data.path)
    return tiny_folder(config.model, config.seed, text, Path(config.out))


def find_model(config: TrainConfig, console: Console) -> ModelSource:
    if config.model.path is None:
        folder = make_tiny(config)
        console.print(f"no --model given; training a tiny one: {folder}", markup=False, soft_wrap=True)
    else:
        folder = _local(config.model.path)
    check_folder(folder)
    found = config_of_folder(folder)
    _check_causal(found, folder)
    tokenizer = _tokenizer(folder)
    vocabulary = getattr(found.get_text_config(), "vocab_size", None)
    if vocabulary is not None and len(tokenizer) > vocabulary:
        largest = max(tokenizer.get_vocab().values())
        if largest >= vocabulary:
            raise ValueError(
                f"the tokenizer of {shown(folder)} has tokens up to {largest}, and the model only {vocabulary}. If "
                f"tokens were added to it, save the model after model.resize_token_embeddings({largest + 1}); else "
                "they do not belong together: get both again"
            )
    is_of_hub = config.model.path is not None and not Path(config.model.path).is_dir()
    return ModelSource(folder, str(config.model.path if is_of_hub else folder.absolute()), found, tokenizer)


def _check_causal(config: Any, folder: Path) -> None:
    names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
    if getattr(config, "is_encoder_decoder", False) or not str(names[0]).endswith(CAUSAL):
        raise ValueError(
            f"{shown(folder)} is {with_article(shown(names[0]))}; this command trains causal language models only. "
            "Train it in a loop of your own, with hightide.wrap"
        )


def _local(name: str) -> Path:
    """A folder, or the newest one of that name in the cache of a hub. Nothing is fetched."""
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists():
        raise ValueError(f"--model {shown(name)} is a file; name the folder that it is in")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except ImportError:
        import_transformers()  # says how to get both
        raise
    except Exception as error:  # what is no name, and what is not there
        raise ValueError(
            f"--model {quoted(name)} is no folder here and not in the local cache; download it first (hf download "
            f"{shown(name)}), or name its folder"
        ) from error


def _tokenizer(folder: Path) -> Any:
    transformers = import_transformers()
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / name).is_file() for name in files):
        raise ValueError(
            f"{shown(folder)} has no tokenizer ({files[0]}); copy the tokenizer's files of the model into it, or save "
            "them there: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
        )
    try:
        with blaming(folder):
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"the tokenizer of {shown(folder)} cannot be loaded: {shown(error.__cause__, KEPT)}"
        ) from error


def describe(source: ModelSource, config: TrainConfig) -> str:
    what = "all weights" if config.lora is None else f"LoRA adapters of rank {Lora.parse(config.lora).rank}"
    assert config.model.dtype is not None and config.optimizer.lr is not None
    masters = ", with float32 master copies" if config.model.dtype is not Dtype.FLOAT32 and config.lora is None else ""
    return (
        f"{what} of a {source.config.model_type} in {config.model.dtype.value}{masters}\n"
        f"learning rate {config.optimizer.lr:g}, {config.optimizer.schedule.value} schedule"
    )
