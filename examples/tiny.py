"""What the examples need that is not about training: a tiny model to start from, and text as batches of tokens."""

from __future__ import annotations

import argparse
import ast
import inspect
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

STANDARD = (argparse, ast, inspect)  # modules of the standard library whose source is learned by default


def make_tiny_model() -> str:
    """A Llama of 0.4 million parameters whose tokens are bytes, saved as a Hugging Face folder. Its path."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=1024,
    )
    folder = tempfile.mkdtemp(prefix="tiny-llama-")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def read_tokens(folder: str, text_file: str | None) -> torch.Tensor:
    """The text as one row of token ids: by the folder's tokenizer, or byte by byte if it has none."""
    text = Path(text_file).read_text(encoding="utf-8") if text_file else "\n".join(map(inspect.getsource, STANDARD))
    if any(Path(folder).glob("tokenizer*")):
        return AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
    return torch.tensor(list(text.encode()))


def batches(tokens: torch.Tensor, num_samples: int, length: int) -> Iterator[dict[str, Any]]:
    """Random pieces of the text, without end."""
    if len(tokens) <= length:
        raise SystemExit(f"the text has {len(tokens)} tokens; it must have more than --length {length}")
    while True:
        starts = torch.randint(len(tokens) - length, (num_samples,)).tolist()
        pieces = torch.stack([tokens[start : start + length] for start in starts])
        yield {"input_ids": pieces, "labels": pieces}
