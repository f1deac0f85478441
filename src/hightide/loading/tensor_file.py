"""Tensors in safetensors files, read piece by piece into memory that exists already.

Not by mapping the file: its pages would count as this process's memory for as long as the mapping lives.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
PIECE_BYTES = 4 * 1024**2  # larger ones would leave larger holes in the heap
MAX_HEADER_BYTES = 100_000_000  # as the format's own reader


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
        numel = prod(self.shape)
        piece = torch.empty(min(PIECE_BYTES // self.dtype.itemsize, numel), dtype=self.dtype)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset)
            for start in range(0, numel, PIECE_BYTES // self.dtype.itemsize):
                part = piece[: numel - start]
                self._read_into(file.fileno(), part)
                yield part

    def fill(self, target: Tensor) -> None:
        assert target.shape == self.shape and target.is_contiguous()
        flat = target.view(-1)
        if flat.dtype == self.dtype and flat.device.type == "cpu":
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset)
                self._read_into(file.fileno(), flat)
            return
        start = 0
        with torch.no_grad():
            for part in self.pieces():
                flat[start : start + len(part)].copy_(part)
                start += len(part)

    def _read_into(self, file: int, flat: Tensor) -> None:
        if not flat.nbytes:
            return
        memory = memoryview((ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr())).cast("B")
        while memory:
            num_read = os.readv(file, [memory[: 2**30]])
            if not num_read:
                raise ValueError(f"{self.path} ends {len(memory)} bytes before the end of {self.name!r}; copy it again")
            memory = memory[num_read:]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name. ValueError for a file that is damaged."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path} ({size} bytes) is no safetensors file, or it is damaged; copy it again")
        header = file.read(length)
    try:
        entries = json.loads(header)
        found = {stored.name: stored for stored in _stored(path, entries, 8 + length)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a header that cannot be read ({error}); copy it again") from error
    missing_bytes = max((stored.offset + stored.num_bytes for stored in found.values()), default=0) - size
    if missing_bytes > 0:
        raise ValueError(f"{path} is cut off: {missing_bytes} of its bytes are missing; copy it again")
    return found


def _stored(path: Path, entries: dict[str, Any], base: int) -> Iterator[StoredTensor]:
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name!r} has the dtype {entry['dtype']}, known are {', '.join(DTYPES)}")
        start, end = entry["data_offsets"]
        stored = StoredTensor(path, name, DTYPES[entry["dtype"]], tuple(entry["shape"]), base + start)
        if stored.num_bytes != end - start or start < 0:
            raise ValueError(f"{name!r} has {end - start} bytes, its shape takes {stored.num_bytes}")
        yield stored


def same_values(one: object, other: object) -> bool:
    """Whether two stored tensors are equal, element by element."""
    if not isinstance(one, StoredTensor) or not isinstance(other, StoredTensor):
        return False
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return all(torch.equal(*pair) for pair in zip(one.pieces(), other.pieces(), strict=True))
