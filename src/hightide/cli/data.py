"""Text as bytes, bytes as tokens: no tokenizer, no download."""

from __future__ import annotations

import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hightide.cli.config import DataConfig
from hightide.ir.foreign import quoted

VOCABULARY = 256
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def read_text(config: DataConfig) -> Tensor:
    """The text as a tensor of bytes. Files come in sorted order, so that a seed means the same run everywhere."""
    root = Path(config.path or sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _files(root):
        try:
            text += _beginning(path, config.text_bytes - len(text))
        except (OSError, ValueError) as error:  # ValueError: a NUL in its name
            problem = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"cannot read the text file {str(path)!r}: {problem}") from error
        except MemoryError:
            raise ValueError(f"no memory for data.text_bytes={config.text_bytes} of {path}; make it smaller") from None
        if len(text) >= config.text_bytes:
            break
    if len(text) <= config.sequence_bytes:
        raise ValueError(
            f"{root} holds {len(text)} bytes of text, but one sequence is {config.sequence_bytes} bytes; "
            f"name a larger file or a folder of .py files in data.path, or make data.sequence_bytes smaller"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


class Batches(Iterator[dict[str, Tensor]]):
    """Endless random windows of the text; the same seed gives the same windows. `state_dict` is where they stand: who
    loads it goes on there, and nothing is drawn again."""

    def __init__(self, text: Tensor, config: DataConfig, seed: int) -> None:
        self._text = text
        self._offsets = torch.arange(config.sequence_bytes)
        self._num_sequences = config.sequences
        self._generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> dict[str, Tensor]:
        most = len(self._text) - len(self._offsets)
        starts = torch.randint(most, (self._num_sequences, 1), generator=self._generator)
        tokens = self._text[starts + self._offsets].long()
        return {"input_ids": tokens, "labels": tokens}

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: object) -> None:
        """Of a checkpoint, which may be a stranger's."""
        generator = state.get("generator") if isinstance(state, dict) else None
        try:
            self._generator.set_state(generator)  # type: ignore[arg-type]  # it looks itself
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"{quoted(state)} is no place in the data: the checkpoint is not of this command"
            ) from error


def _beginning(path: Path, num_bytes: int) -> bytes:
    """Pipes and devices may have no end, and no beginning either."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is a pipe or a device; write what it gives into a file, and name that in data.path")
    with path.open("rb") as file:
        return file.read(min(num_bytes, max(path.stat().st_size, 1 << 20)))  # files of the system say 0


def _files(root: Path) -> Iterator[Path]:
    if root.is_dir():
        for path in sorted(root.rglob("*.py")):
            if path.is_file() and not _SKIPPED.intersection(path.relative_to(root).parts):
                yield path
    else:
        yield root
