"""How a safetensors file begins: its header, known before the first value is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from hightide.ir.foreign import quoted
from hightide.loading.tensor_file import ALL_DTYPES, MAX_HEADER_BYTES, METADATA

ALIGNMENT_BYTES = 8  # of the first value, as the format asks
_LENGTH_BYTES = 8
DTYPE_NAMES = {dtype: name for name, dtype in ALL_DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """The values follow it in the order of the entries, without holes: the format allows none."""
    table: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    for entry, start in zip(entries, _starts(entries), strict=True):
        if entry.name in table or entry.name == METADATA:
            raise ValueError(f"there are two tensors of the name {quoted(entry.name)}")
        if entry.dtype not in DTYPE_NAMES:
            raise ValueError(f"{quoted(entry.name)} is of {entry.dtype}; files of tensors have {', '.join(ALL_DTYPES)}")
        table[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.num_bytes],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{len(entries)} tensors need a header of {len(text)} bytes, {MAX_HEADER_BYTES} may be")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _starts(entries: Sequence[Entry]) -> Iterator[int]:
    start = 0
    for entry in entries:
        yield start
        start += entry.num_bytes
