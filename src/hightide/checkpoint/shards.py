"""Tensors in files of bounded size: written as they come, or each at its place, known before the first is written.

[Note: order in files] A file's header says where each tensor lies, and files are written front to back as values come:
in the order of the updates, not of the names. Readers expect each tensor at a multiple of its element's size, and the
format allows no holes. So those whose bytes are no multiple of the widest element, which are few and small, wait for
the end, the widest elements first; and so does what lies in the file a second time, under another name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hightide.checkpoint.files.tensor_layout import Entry, header
from hightide.checkpoint.fitting import OPTIMIZER, StateKey
from hightide.integrations.model_files import ADAPTER, MODEL, SUFFIX, ModelFiles, Named, Written
from hightide.runtime.saving.tiles import PARAM, SavedTensor

MAX_SHARD_BYTES = 5 * 10**9


class TensorFile(Protocol):
    def put(self, value: Tensor, /) -> None:
        """The next elements."""


class TensorFiles(Protocol):
    def tensors(self, name: str, entries: Sequence[Entry], /) -> TensorFile:
        """A new one."""


class Shards:
    """The files of one stem. Entries are put in the order in which they were announced, part by part."""

    def __init__(self, writer: TensorFiles, stem: str, entries: Sequence[Entry], late: Sequence[Entry] = ()) -> None:
        """`late`: further ones, that wait for the end."""
        ordered, waiting = in_order(entries, late)
        self._waiting: dict[str, list[Tensor]] = {entry.name: [] for entry in waiting}
        self.files = files_of(stem, ordered)
        self._writer = writer
        self._left = [(name, list(its)) for name, its in self.files.items()]
        self._file: TensorFile | None = None
        self._order = iter(ordered)
        self._entry: Entry | None = None
        self._left_bytes = 0

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


def in_order(entries: Sequence[Entry], late: Sequence[Entry] = ()) -> tuple[list[Entry], list[Entry]]:
    """See [Note: order in files]: all, and those at the end that wait."""
    widest_bytes = max((entry.dtype.itemsize for entry in (*entries, *late)), default=1)
    waiting = [*late, *(entry for entry in entries if entry.num_bytes % widest_bytes)]
    waiting.sort(key=lambda entry: -entry.dtype.itemsize)
    names = {entry.name for entry in waiting}
    return [*(entry for entry in entries if entry.name not in names), *waiting], waiting


def files_of(stem: str, ordered: Sequence[Entry]) -> dict[str, list[Entry]]:
    """By name, what lies in each."""
    return _named(stem, list(_split(ordered)))


def index_of(files: Mapping[str, Sequence[Entry]], num_parameters: int) -> dict[str, bytes]:
    """What says which tensor is in which file of the model, as transformers reads it. Nothing: there is one file."""
    if len(files) < 2:
        return {}
    places = {entry.name: file for file, its in files.items() for entry in its}
    facts = {"total_parameters": num_parameters} if num_parameters else {}
    total_bytes = sum(entry.num_bytes for its in files.values() for entry in its)
    content = {"metadata": {**facts, "total_size": total_bytes}, "weight_map": places}
    return {f"{MODEL}{SUFFIX}.index.json": (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()}


def _split(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    shard_bytes = 0
    for entry in entries:
        if shard and shard_bytes + entry.num_bytes > MAX_SHARD_BYTES:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(entry)
        shard_bytes += entry.num_bytes
    if shard:
        yield shard


def _named(stem: str, shards: Sequence[list[Entry]]) -> dict[str, list[Entry]]:
    if len(shards) == 1 and stem.rpartition("/")[2] in (MODEL, ADAPTER):
        return {stem + SUFFIX: shards[0]}
    count = len(shards)
    return {f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}": its for number, its in enumerate(shards, start=1)}


class ModelOrder:
    """What the model's tensors become in its files, and in which order that is known."""

    def __init__(self, written: Sequence[Written], order: Sequence[Named]) -> None:
        """`order`: the model's tensors, in the order in which they come."""
        places = {tensor.name: number for number, tensor in enumerate(order)}
        self.as_it_is: dict[str, list[tuple[str, str]]] = {}  # stem and name in the file, by source
        self.converted: list[Written] = []  # in the order in which the last of their sources comes
        self.entries: dict[str, list[Entry]] = {}  # by stem
        self.late: dict[str, list[Entry]] = {}  # the second ones of a tensor
        for one in sorted(written, key=lambda one: max(places[name] for name in one.sources)):
            its = [Entry(*stored) for stored in one.stored]
            is_second = False
            if one.convert is not None:
                self.converted.append(one)
            else:
                (source,) = one.sources
                known = self.as_it_is.setdefault(source, [])
                is_second = any(stem == one.stem for stem, _ in known)
                known.append((one.stem, its[0].name))
            (self.late if is_second else self.entries).setdefault(one.stem, []).extend(its)


class ModelShards:
    """The model's files: what becomes of its tensors, as they come."""

    def __init__(self, writer: TensorFiles, written: Sequence[Written], order: Sequence[Named]) -> None:
        """`order`: the model's tensors, in the order in which they will be put."""
        known = ModelOrder(written, order)
        self._as_it_is = known.as_it_is
        self._shapes = {tensor.name: tensor.shape for tensor in order}
        self._converted: dict[str, list[Written]] = {}  # by source
        for one in known.converted:
            for source in one.sources:
                self._converted.setdefault(source, []).append(one)
        self._held: dict[str, Tensor] = {}  # what is to be converted
        self._left_numel = {name: prod(self._shapes[name]) for one in written if one.convert for name in one.sources}
        self.stems = {stem: Shards(writer, stem, its, known.late.get(stem, ())) for stem, its in known.entries.items()}

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
        return index_of(self.stems[MODEL].files, num_parameters) if MODEL in self.stems else {}


class FilePlace(NamedTuple):
    file: str
    offset: int  # in bytes
    entry: Entry


class FilePlaces:
    """Where each tensor lies, byte by byte: for ranks that write the same files, each its own elements."""

    def __init__(self, files: ModelFiles, buffers: Sequence[Named], tensors: Sequence[SavedTensor]) -> None:
        """`tensors`: of all ranks, in the order in which each of them comes to its part of them."""
        params = [Named(one.key, one.dtype, one.shape) for one in tensors if one.kind == PARAM]
        self._order = ModelOrder(files.written, [*buffers, *params])
        states = [Entry(str(StateKey(one.key, one.kind)), one.dtype, one.shape) for one in tensors if one.kind != PARAM]
        self.heads: dict[str, bytes] = {}  # how each file begins
        self.sizes: dict[str, int] = {}  # in bytes
        self._places: dict[tuple[str, str], FilePlace] = {}  # by stem and name
        self.index: dict[str, bytes] = {}  # the file that says where tensors of the model are
        for stem, entries in {**self._order.entries, **({OPTIMIZER: states} if states else {})}.items():
            ordered, _ = in_order(entries, self._order.late.get(stem, ()))
            laid_out = files_of(stem, ordered)
            for file, its in laid_out.items():
                self._lay_out(stem, file, its)
            if stem == MODEL:
                self.index = index_of(laid_out, files.num_parameters)

    def _lay_out(self, stem: str, file: str, entries: Sequence[Entry]) -> None:
        self.heads[file] = header(entries, {"format": "pt"})
        offset = len(self.heads[file])
        for entry in entries:
            self._places[stem, entry.name] = FilePlace(file, offset, entry)
            offset += entry.num_bytes
        self.sizes[file] = offset

    def of_tensor(self, name: str) -> list[FilePlace]:
        """Of a tensor of the model that is written as it is: none, one, or several under different names."""
        return [self._places[place] for place in self._order.as_it_is.get(name, ())]

    def of_state(self, tensor: SavedTensor) -> list[FilePlace]:
        return [self._places[OPTIMIZER, str(StateKey(tensor.key, tensor.kind))]]

    @property
    def converted(self) -> list[Written]:
        """What is cut or joined, in the order in which its last source comes."""
        return self._order.converted

    def of_converted(self, one: Written, name: str) -> FilePlace:
        return self._places[one.stem, name]

    @property
    def digest(self) -> str:
        """Equal where all is at the same places."""
        heads = {file: head.hex() for file, head in self.heads.items()}
        return hashlib.sha256(json.dumps([heads, self.sizes, sorted(self.index)]).encode()).hexdigest()[:16]
