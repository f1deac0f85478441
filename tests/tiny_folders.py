"""A tiny model's folder that tests share: made once in each process, gone at its end."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

from hightide.cli.train.config import ModelConfig
from hightide.cli.train.tiny_model import LEARNED_BYTES, make_tiny_model
from hightide.data.readers import read_rows

SHAPE = ModelConfig(hidden=32, layers=2, heads=2, feed_forward=64, vocabulary=300)


@functools.cache
def _made(shape: ModelConfig, seed: int) -> TemporaryDirectory[str]:
    folder = TemporaryDirectory(prefix="tiny-folder-")
    make_tiny_model(Path(folder.name), shape, seed, read_rows(Path(__file__), lambda share: None, LEARNED_BYTES))
    return folder


def tiny_folder(shape: ModelConfig = SHAPE, seed: int = 0) -> Path:
    return Path(_made(shape, seed).name)
