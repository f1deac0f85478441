"""What the examples need that is not about training: a tiny model to start from, and data as batches of tokens."""

from __future__ import annotations

import argparse
import ast
import atexit
import inspect
import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from hightide.cli.train.config import ModelConfig
from hightide.cli.train.tiny_model import make_tiny_model
from hightide.data.batches import Batches, Steps
from hightide.data.packing import one_each
from hightide.data.readers import read_rows
from hightide.data.tokens import tokenize

STANDARD = (argparse, ast, inspect)  # modules of the standard library whose source is learned by default
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun tells


def make_tiny_folder(kept: str | None = None) -> str:
    """A Llama of 0.5 million parameters with random weights and a tokenizer of its own, saved as a Hugging Face folder.
    Its path: `kept`, which the first rank writes, else a temporary folder that is removed when the script ends. Ranks
    that are in a process group share one, which the first of them makes."""
    is_shared = torch.distributed.is_initialized()
    if is_shared and RANK > 0:
        return _from_first(None)
    if kept is not None and RANK == 0:
        folder = Path(kept)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix="tiny-llama-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shape = ModelConfig(hidden=96, layers=4, heads=4, feed_forward=256, vocabulary=512)
    make_tiny_model(folder, shape, 0, read_rows(Path(inspect.__file__), lambda share: None))
    return _from_first(str(folder)) if is_shared else str(folder)


def _from_first(path: str | None) -> str:
    paths = [path]
    torch.distributed.broadcast_object_list(paths)
    return str(paths[0])


def read_batches(folder: str, data: str | None, num_rows: int, length: int, only: bool) -> Iterator[dict[str, Any]]:
    """Rows of a file (txt, jsonl, csv ...: text, prompt and completion, or chat messages through the folder's own
    template) as batches, without end; under torchrun each rank has batches of its own. `only`: the loss counts
    completions and what the assistant says."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    paths = [Path(data)] if data else [Path(module.__file__) for module in STANDARD]
    rows = (row for path in paths for row in read_rows(path, lambda share: None))
    sequences = tokenize(rows, tokenizer, length, completions_only=only)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    batches = Batches(sequences, one_each(sequences), length, pad, one_shape=True)
    say(f"{len(sequences)} sequences of up to {length} tokens")
    return (calls[0].batch for calls in islice(Steps(batches, num_rows, seed=0), RANK, None, RANKS))


def say(text: object) -> None:
    """Prints it, once for all ranks."""
    if RANK == 0:
        print(text)


def read_tokens(tokenizer: Any, text_file: str | None) -> torch.Tensor:
    """A text as one row of token ids."""
    text = Path(text_file).read_text(encoding="utf-8") if text_file else "\n".join(map(inspect.getsource, STANDARD))
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])
