"""`save_pretrained` of a model that several ranks train: its library's files, written by the first rank as the others
send their shards, one tensor at a time. The library itself would want all of them at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from hightide.checkpoint.files.tensor_layout import Entry, header
from hightide.checkpoint.shards import ModelShards
from hightide.integrations.model_files import ADAPTER, MODEL, TRAINED, ModelFiles, Named, model_files, tensors_of
from hightide.ir.refusal import Refused
from hightide.runtime.run import Run
from hightide.shard.agreement import of_each

TMP = ".tmp"
_USUAL = {"is_main_process": (True, False), "safe_serialization": (True,), "push_to_hub": (False,)}
_OF_TENSORS = re.compile(rf"({MODEL}|{ADAPTER})(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")


def save_pretrained(run: Run, model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """All ranks call it. `model` may be a part of the wrapped one. It fails on all ranks or on none."""
    if odd := [name for name, value in options.items() if value not in _USUAL.get(name, ())]:
        raise Refused(
            f"save_pretrained({', '.join(f'{name}=...' for name in odd)}) of a model that several ranks train; leave "
            "it out, or call state = model.state_dict() on all ranks and save_pretrained(state_dict=state) on the first"
        )
    assert run.between is not None
    run.check_same_acts("what was done before save_pretrained")
    collectives, is_first = run.between.collectives, run.between.is_first
    found: list[tuple[ModelFiles, _Files | None]] = []

    def begin() -> bytes:
        found.append((model_files(model), _Files(Path(folder)) if is_first else None))
        return b""

    of_each(collectives, "save_pretrained", begin)
    ((files, writer),) = found
    written = [one for one in files.written if one.stem != TRAINED]
    tensors, sources = tensors_of(model), {name for one in written for name in one.sources}
    order = [Named(name, one.dtype, tuple(one.shape)) for name, one in tensors.items() if name in sources]
    shards = None if writer is None else ModelShards(writer, written, order)
    failed: list[Exception] = []
    for named in order:
        tensor = tensors[named.name]
        value = run.value_of(run.keys[id(tensor)]) if id(tensor) in run.keys else tensor.detach().cpu()
        if shards is not None and not failed:
            _try(failed, partial(shards.put, named.name, value.contiguous().view(-1)))

    def end() -> bytes:
        if failed:
            raise failed[0]
        if writer is not None and shards is not None:
            writer.finish({**files.small, **shards.finish(files.num_parameters)})
        return b""

    try:
        of_each(collectives, "save_pretrained", end)
    finally:
        if writer is not None:
            writer.close()


def _try(failed: list[Exception], work: Callable[[], object]) -> None:
    """The other ranks go on sending, so this one goes on receiving."""
    try:
        work()
    except Exception as error:
        failed.append(error)


class _Files:
    """Of a model's folder, on the first rank. They get their names when all are written."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}

    def tensors(self, name: str, entries: Sequence[Entry]) -> _File:
        path = self._folder / (name + TMP)
        path.parent.mkdir(exist_ok=True)
        file = self._open[name] = path.open("wb")
        file.write(header(entries, {"format": "pt"}))
        return _File(file)

    def finish(self, small: Mapping[str, bytes]) -> None:
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        names, self._open = list(self._open), {}
        for name in names:
            os.replace(self._folder / (name + TMP), self._folder / name)
        for name, content in small.items():
            (self._folder / name).write_bytes(content)
        for old in self._folder.iterdir():  # of a save before this one, in more files
            if _OF_TENSORS.fullmatch(old.name) and old.name not in {*names, *small}:
                old.unlink()

    def close(self) -> None:
        """What is not finished goes."""
        for name, file in self._open.items():
            file.close()
            (self._folder / (name + TMP)).unlink(missing_ok=True)
        self._open = {}


class _File:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def put(self, value: Tensor) -> None:
        self._file.write(value.view(torch.uint8).numpy().data)
