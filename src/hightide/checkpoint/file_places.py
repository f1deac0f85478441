"""Where each tensor of a checkpoint lies, byte by byte, known before the first is written: for ranks that write the
same files, each its own elements."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from hightide.checkpoint.files.tensor_layout import Entry, header
from hightide.checkpoint.fitting import OPTIMIZER, StateKey
from hightide.checkpoint.shards import ModelOrder, files_of, in_order, index_of
from hightide.integrations.model_files import MODEL, ModelFiles, Named, Written
from hightide.runtime.saving.tiles import PARAM, SavedTensor


class FilePlace(NamedTuple):
    file: str
    offset: int  # in bytes
    entry: Entry


class FilePlaces:
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
