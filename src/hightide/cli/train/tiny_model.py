"""A tiny model for `hightide train` without --model, made on the spot as a Hugging Face folder: a Llama with random
weights, and a tokenizer that has learned from the text. From then on it is a model like any other."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch

from hightide.cli.train.config import ModelConfig
from hightide.data.readers import Row, read_rows
from hightide.integrations.foreign_folder import CONFIG, import_transformers
from hightide.integrations.model_files import without_bars, written_here

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
STANDARD_BYTES = 4_000_000  # of it at most
LEARNED_BYTES = 1_000_000  # from which the tokenizer learns
MAX_POSITIONS = 4096
BEGIN, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_folder(shape: ModelConfig, seed: int, text: Path, out: Path) -> Path:
    """In `out`, under a name that says what it was made of: made once. `text`: what the tokenizer learns from. One that
    is there in part, of an earlier version of ours, is made whole."""
    made_of = json.dumps([asdict(shape), seed, str(text.absolute())], sort_keys=True)
    folder = out / f"tiny-model-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}"
    if (folder / CONFIG).is_file():
        return folder
    try:
        out.mkdir(parents=True, exist_ok=True)
        unfinished = Path(mkdtemp(prefix=".tiny-model-", dir=out))
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"cannot create the tiny model in {str(out)!r}: {problem}; choose another --out") from error
    try:
        make_tiny_model(unfinished, shape, seed, read_rows(text, lambda share: None, LEARNED_BYTES))
    except BaseException:  # of data that cannot be read, or an interrupt
        rmtree(unfinished, ignore_errors=True)
        raise
    unfinished.chmod(0o755)
    try:
        unfinished.rename(folder)
    except OSError:  # another run was faster, or half of one is there
        if not folder.is_dir():
            raise
        _complete(folder, unfinished)
    return folder


def _complete(folder: Path, made: Path) -> None:
    if not (folder / CONFIG).is_file():
        for file in sorted(made.iterdir(), key=lambda file: file.name == CONFIG):  # which says that all are there
            file.replace(folder / file.name)
    rmtree(made)


def make_tiny_model(folder: Path, shape: ModelConfig, seed: int, rows: Iterator[Row]) -> None:
    transformers = import_transformers()
    tokenizer = _learned_tokenizer(transformers, rows, shape.vocabulary)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.LlamaForCausalLM(config)
    with without_bars(), written_here(model):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _learned_tokenizer(transformers: Any, rows: Iterator[Row], vocabulary: int) -> Any:
    import tokenizers

    plain = tokenizers.Tokenizer(tokenizers.models.BPE())
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[STOP, BEGIN, END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain.train_from_iterator((text for row in islice(rows, 10_000) for text in _texts(row)), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token=STOP,
        pad_token=STOP,
        additional_special_tokens=[BEGIN, END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )


def _texts(row: Row) -> Iterator[str]:
    """Whatever is text in it."""
    for value in row.fields.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (str(turn["content"]) for turn in value if isinstance(turn, dict) and "content" in turn)
