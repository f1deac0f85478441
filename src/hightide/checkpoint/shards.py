"""Tensors that come one after the other, written to files of bounded size.

[Note: order in files] A file's header says where each tensor lies, and files are written front to back as values come:
in the order of the updates, not of the names. Readers expect each tensor at a multiple of its element's size, and the
format allows no holes. So those whose bytes are no multiple of 8, which are few and small, wait for the end, the widest
elements first; and so does what lies in the file a second time, under another name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from hightide.checkpoint.files.tensor_layout import ALIGNMENT_BYTES, Entry
from hightide.checkpoint.files.writer import CheckpointWriter, TensorFileWriter
from hightide.integrations.model_files import ADAPTER, MODEL, SUFFIX, Named, Written

MAX_SHARD_BYTES = 5 * 10**9


class Shards:
    """The files of one stem. Entries are put in the order in which they were announced, part by part."""

    def __init__(
        self, writer: CheckpointWriter, stem: str, entries: Sequence[Entry], late: Sequence[Entry] = ()
    ) -> None:
        """`late`: further ones, that wait for the end."""
        waiting = [*late, *(entry for entry in entries if entry.num_bytes % ALIGNMENT_BYTES)]
        waiting.sort(key=lambda entry: -entry.dtype.itemsize)
        self._waiting: dict[str, list[Tensor]] = {entry.name: [] for entry in waiting}
        ordered = [*(entry for entry in entries if entry.name not in self._waiting), *waiting]
        self.files = _named(stem, list(_split(ordered)))
        self._writer = writer
        self._left = [(name, list(its)) for name, its in self.files.items()]
        self._file: TensorFileWriter | None = None
        self._order = iter(ordered)
        self._entry: Entry | None = None
        self._left_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(entry.num_bytes for its in self.files.values() for entry in its)

    def put(self, name: str, part: Tensor) -> None:
        if name in self._waiting:
            self._waiting[name].append(part.clone())
        else:
            self._write(name, part)

    def finish(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for name, parts in waiting.items():
            for part in parts:
                self._write(name, part)
        assert self._left_bytes == 0 and next(self._order, None) is None and not self._left

    def _write(self, name: str, part: Tensor) -> None:
        if not self._left_bytes:
            self._entry = next(self._order)
            self._left_bytes = self._entry.num_bytes
            if self._left and self._left[0][1][0] is self._entry:
                file, entries = self._left.pop(0)
                self._file = self._writer.tensors(file, entries)
        assert self._entry is not None and self._entry.name == name and self._file is not None, (self._entry, name)
        self._file.put(part)
        self._left_bytes -= part.nbytes

    def index(self, num_parameters: int) -> bytes | None:
        """What says which tensor is in which file, as transformers reads it. None: there is one file."""
        if len(self.files) < 2:
            return None
        places = {entry.name: file for file, its in self.files.items() for entry in its}
        facts = {"total_parameters": num_parameters} if num_parameters else {}
        content = {"metadata": {**facts, "total_size": self.num_bytes}, "weight_map": places}
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _split(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    for entry in entries:
        if shard and sum(one.num_bytes for one in shard) + entry.num_bytes > MAX_SHARD_BYTES:
            yield shard
            shard = []
        shard.append(entry)
    if shard:
        yield shard


def _named(stem: str, shards: Sequence[list[Entry]]) -> dict[str, list[Entry]]:
    if len(shards) == 1 and stem in (MODEL, ADAPTER):
        return {stem + SUFFIX: shards[0]}
    count = len(shards)
    return {f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}": its for number, its in enumerate(shards, start=1)}


class ModelShards:
    """The model's files: what becomes of its tensors, as they come."""

    def __init__(self, writer: CheckpointWriter, written: Sequence[Written], order: Sequence[Named]) -> None:
        """`order`: the model's tensors, in the order in which they will be put."""
        places = {tensor.name: number for number, tensor in enumerate(order)}
        self._shapes = {tensor.name: tensor.shape for tensor in order}
        self._as_it_is: dict[str, list[tuple[str, str]]] = {}  # stem and name in the file, by source
        self._converted: dict[str, list[Written]] = {}  # by source
        self._held: dict[str, Tensor] = {}  # what is to be converted
        self._left_numel = {name: prod(self._shapes[name]) for one in written if one.convert for name in one.sources}
        entries: dict[str, list[Entry]] = {}
        late: dict[str, list[Entry]] = {}
        for one in sorted(written, key=lambda one: max(places[name] for name in one.sources)):
            its = [Entry(*stored) for stored in one.stored]
            is_second = False
            for source in one.sources:
                if one.convert is not None:
                    self._converted.setdefault(source, []).append(one)
                else:
                    known = self._as_it_is.setdefault(source, [])
                    is_second = any(stem == one.stem for stem, _ in known)
                    known.append((one.stem, its[0].name))
            (late if is_second else entries).setdefault(one.stem, []).extend(its)
        self.stems = {stem: Shards(writer, stem, its, late.get(stem, ())) for stem, its in entries.items()}

    def put(self, source: str, part: Tensor) -> None:
        """The next elements of a tensor."""
        for stem, name in self._as_it_is.get(source, ()):
            self.stems[stem].put(name, part)
        if source in self._converted:
            whole = self._held.setdefault(source, torch.empty(self._shapes[source], dtype=part.dtype))
            start = whole.numel() - self._left_numel[source]
            whole.view(-1)[start : start + len(part)] = part
            self._left_numel[source] -= len(part)
            for one in self._converted[source]:
                if not any(self._left_numel[name] for name in one.sources):
                    self._convert(one)

    def _convert(self, one: Written) -> None:
        assert one.convert is not None
        made = one.convert({name: self._held.pop(name) for name in one.sources})
        for stored in one.stored:
            self.stems[one.stem].put(stored.name, made[stored.name].contiguous().view(-1))

    def finish(self, num_parameters: int) -> dict[str, bytes]:
        """Returns the index that belongs to them, if there is one."""
        for shards in self.stems.values():
            shards.finish()
        index = self.stems[MODEL].index(num_parameters) if MODEL in self.stems else None
        return {} if index is None else {f"{MODEL}{SUFFIX}.index.json": index}
