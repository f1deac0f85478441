"""Checkpoints with made-up contents, which follow from their step, for tests of files alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hightide.checkpoint.files.tensor_layout import Entry
from hightide.checkpoint.files.writer import CheckpointWriter


def values(step: int, numel: int = 3000) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "wide": torch.randn(numel, generator=generator),
        "odd": torch.randn(3, 5, generator=generator).bfloat16(),
        "none": torch.empty(0, 7),
        "one": torch.tensor(step),
    }


def write(folder: Path, step: int, numel: int = 3000, below: str = "") -> Path:
    """Two files of tensors, open at once, and a small one; one more `below`."""
    content = values(step, numel)
    entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in content.items()]
    with CheckpointWriter(folder, step) as writer:
        files = [writer.tensors(f"{name}.safetensors", entries) for name in ("model", "optimizer")]
        writer.bytes("training.json", b'{"step": %d}' % step)
        if below:
            writer.bytes(f"{below}/adapter_config.json", b"{}")
        for value in content.values():
            for file in files:
                file.put(value)
        return writer.commit({"loss": step / 2})


def content(path: Path) -> dict[str, bytes]:
    """Of all files but the manifest, which has the time in it."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "manifest.json"}
