"""Tensors of a checkpoint's file, part by part, from front to back: its pieces are read once, and checked before a byte
of them is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hightide.checkpoint.files.checked import CheckedFile
from hightide.checkpoint.files.manifest import Manifest
from hightide.loading.tensor_file import StoredTensor
from hightide.stores.disk_file import memory_at

PART_BYTES = 16 * 1024**2


Needed = Callable[[StoredTensor], range]  # which elements of it


def all_of(tensor: StoredTensor) -> range:
    return range(tensor.num_bytes // tensor.dtype.itemsize)


def verified_parts(
    path: Path, manifest: Manifest, name: str, tensors: Sequence[StoredTensor], needed: Needed = all_of
) -> Iterator[tuple[StoredTensor, int, Tensor]]:
    """(tensor, number of the first element, elements as a flat tensor that the next part overwrites). A tensor without
    elements comes too. Of those that are `needed` the pieces are read, and that of the header. Raises DamagedFile."""
    ordered = [(one, needed(one)) for one in sorted(tensors, key=lambda one: (one.offset, one.num_bytes))]
    places = [
        range(one.offset + elements.start * one.dtype.itemsize, one.offset + elements.stop * one.dtype.itemsize)
        for one, elements in ordered
    ]
    buffer = torch.empty(min(PART_BYTES, max(map(len, places), default=0)), dtype=torch.uint8)
    pieces = {0} | {
        number
        for place in places
        if place
        for number in range(place.start // manifest.piece_bytes, (place.stop - 1) // manifest.piece_bytes + 1)
    }
    with CheckedFile(path, manifest, name, pieces if manifest.file(name).num_bytes else ()) as file:
        file.read_into(0, memoryview(bytearray(min(1, manifest.file(name).num_bytes))))
        for (tensor, elements), place in zip(ordered, places, strict=True):
            for start in range(0, max(1, len(place)), PART_BYTES):
                part = buffer[: len(place) - start]
                file.read_into(place.start + start, memory_at(part.data_ptr(), part.nbytes))
                yield tensor, elements.start + start // tensor.dtype.itemsize, part.view(tensor.dtype)


def verified_tensors(path: Path, manifest: Manifest, name: str, tensors: Sequence[StoredTensor]) -> dict[str, Tensor]:
    """Whole, by name."""
    values = {one.name: torch.empty(one.shape, dtype=one.dtype) for one in tensors}
    for one, start, part in verified_parts(path, manifest, name, tensors):
        values[one.name].view(-1)[start : start + len(part)] = part
    return values


def verified_bytes(path: Path, manifest: Manifest, name: str) -> bytes:
    """A small file, whole."""
    content = bytearray(manifest.file(name).num_bytes)
    with CheckedFile(path, manifest, name) as file:
        file.read_into(0, memoryview(content))
    return bytes(content)
