"""Tensors in safetensors files, read piece by piece into memory that exists already.

Not by mapping the file: its pages would count as this process's memory for as long as the mapping lives.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hightide.ir.foreign import MAX_FILE_BYTES, decoded, open_regular, parse_json, quoted, shown
from hightide.stores.disk_file import memory_at

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
ALL_DTYPES = DTYPES | {  # those of states and buffers too
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
}
PIECE_BYTES = 4 * 1024**2  # larger ones would leave larger holes in the heap
MAX_HEADER_BYTES = MAX_FILE_BYTES  # real ones have some 100 bytes a tensor
MAX_DIMS = 64  # as torch
METADATA, ENTRY = "__metadata__", {"dtype", "shape", "data_offsets"}
WHAT = "file of tensors"
LFS_BEGINS = b"version "  # of a pointer of Git LFS: a repository that was cloned without it has those


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file. It is an Origin."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        value = torch.empty(self.shape, dtype=self.dtype)
        self.fill(value)
        return value

    def pieces(self) -> Iterator[Tensor]:
        """All elements in order, in memory that the next piece overwrites."""
        return self._pieces(0, prod(self.shape))

    def _pieces(self, first: int, numel: int) -> Iterator[Tensor]:
        piece = torch.empty(min(PIECE_BYTES // self.dtype.itemsize, numel), dtype=self.dtype)
        with open_regular(self.path, WHAT) as file:
            file.seek(self.offset + first * self.dtype.itemsize)
            for start in range(0, numel, PIECE_BYTES // self.dtype.itemsize):
                part = piece[: numel - start]
                self._read_into(file.fileno(), part)
                yield part

    def fill(self, target: Tensor) -> None:
        assert target.shape == self.shape and target.is_contiguous()
        self.fill_part(target.view(-1), 0)

    def fill_part(self, flat: Tensor, first: int) -> None:
        if flat.dtype == self.dtype and flat.device.type == "cpu":
            with open_regular(self.path, WHAT) as file:
                file.seek(self.offset + first * self.dtype.itemsize)
                self._read_into(file.fileno(), flat)
            return
        start = 0
        with torch.no_grad():
            for part in self._pieces(first, flat.numel()):
                flat[start : start + len(part)].copy_(part)
                start += len(part)

    def _read_into(self, file: int, flat: Tensor) -> None:
        memory = memory_at(flat.data_ptr(), flat.nbytes)
        while memory:
            num_read = os.readv(file, [memory[: 2**30]])
            if not num_read:
                raise ValueError(
                    f"{shown(self.path)} ends {len(memory)} bytes before the end of {quoted(self.name)}; copy it again"
                )
            memory = memory[num_read:]


def read_header(path: Path, dtypes: Mapping[str, torch.dtype] = DTYPES) -> dict[str, StoredTensor]:
    """The tensors of a file, by name; `dtypes` are those that may be there. ValueError for a file that is damaged: the
    header is checked as a whole, before any value is used, as the format has it: the tensors fill the file, without a
    hole and without overlapping."""
    with open_regular(path, WHAT) as raw, io.BufferedReader(raw) as file:  # type: ignore[type-var]
        size = os.fstat(raw.fileno()).st_size
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if first == LFS_BEGINS:
            raise ValueError(f"{shown(path)} is a pointer of Git LFS, without the file itself; get it: git lfs pull")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"{shown(path)} ({size} bytes) is no safetensors file, or it is damaged: its header would have "
                f"{length} bytes; copy it again"
            )
        header = file.read(length)
    try:
        entries = parse_json(decoded(header, "the header"), "the header")
        if not isinstance(entries, dict) or header[:1] != b"{":
            raise ValueError(f"it is {quoted(entries)} and no mapping")
        found = [_stored(path, name, entry, 8 + length, dtypes) for name, entry in entries.items() if name != METADATA]
        _check_metadata(entries.get(METADATA, {}))
    except ValueError as error:
        raise ValueError(f"{shown(path)} has a header that cannot be read ({error}); copy it again") from error
    _check_filled(path, found, 8 + length, size)
    return {stored.name: stored for stored in found}


def _stored(path: Path, name: str, entry: Any, base: int, dtypes: Mapping[str, torch.dtype]) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != ENTRY:
        raise ValueError(f"{quoted(name)} is {quoted(entry)}; it must have {', '.join(sorted(ENTRY))}")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in dtypes:
        raise ValueError(f"{quoted(name)} has the dtype {quoted(kind)}, known are {', '.join(dtypes)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > MAX_DIMS:
        raise ValueError(f"{quoted(name)} has the shape {quoted(shape)} and the offsets {quoted(offsets)}")
    stored = StoredTensor(path, name, dtypes[kind], tuple(shape), base + offsets[0])
    if stored.num_bytes != offsets[1] - offsets[0]:
        raise ValueError(f"{quoted(name)} has {offsets[1] - offsets[0]} bytes, its shape takes {stored.num_bytes}")
    return stored


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} is {quoted(metadata)}; it must be a mapping of text")


def _check_filled(path: Path, found: list[StoredTensor], start: int, size: int) -> None:
    end, before = start, "the header"
    for stored in sorted(found, key=lambda one: (one.offset, one.num_bytes)):
        if stored.offset != end:
            what = "a hole of" if stored.offset > end else "an overlap of"
            raise ValueError(
                f"{shown(path)} is damaged: between {before} and {quoted(stored.name)} is {what} "
                f"{abs(stored.offset - end)} bytes; copy it again"
            )
        end, before = stored.offset + stored.num_bytes, quoted(stored.name)
    if end > size:
        raise ValueError(f"{shown(path)} is cut off: {end - size} of its bytes are missing; copy it again")
    if end < size:
        raise ValueError(
            f"{shown(path)} is damaged: {size - end} bytes behind its last tensor belong to none; copy it again"
        )


def same_values(one: object, other: object) -> bool:
    """Whether two stored tensors are equal, element by element."""
    if not isinstance(one, StoredTensor) or not isinstance(other, StoredTensor):
        return False
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return all(torch.equal(*pair) for pair in zip(one.pieces(), other.pieces(), strict=True))
