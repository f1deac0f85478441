"""Tensors of a checkpoint's file, read once from front to back, each piece checked before a byte of it is used."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hightide.checkpoint.folder import READ_BYTES, WHAT, wrong_piece
from hightide.checkpoint.manifest import FileSums
from hightide.ir.foreign import open_regular
from hightide.loading.tensor_file import StoredTensor

_ROOM_BYTES = 16  # in front of a piece, for the bytes of an element that the one before it has begun


class Damaged(Exception):
    """What is wrong, and where."""


def verified_parts(
    path: Path, file: FileSums, piece_bytes: int, tensors: Sequence[StoredTensor]
) -> Iterator[tuple[StoredTensor, int, Tensor]]:
    """(tensor, number of the first element, elements as a flat tensor that the next part overwrites) of all tensors of
    the file, in the order in which they lie there. One without elements comes too. Raises Damaged."""
    rest = sorted(tensors, key=lambda one: (one.offset, one.num_bytes))[::-1]
    buffer = torch.empty(_ROOM_BYTES + min(piece_bytes, file.num_bytes), dtype=torch.uint8)
    start = carried_bytes = done_bytes = 0  # of the file; before the piece in the buffer; of the tensor at hand
    with open_regular(path / file.name, WHAT, follow=False) as raw:
        for index in range(len(file.crc32)):
            num_bytes = min(piece_bytes, file.num_bytes - start)
            _read(raw, buffer[_ROOM_BYTES : _ROOM_BYTES + num_bytes], file, piece_bytes, index)
            end, carried_bytes = start + num_bytes, 0
            while rest:
                tensor = rest[-1]
                position, left_bytes = tensor.offset + done_bytes, tensor.num_bytes - done_bytes
                ready_bytes = min(left_bytes, end - position) // tensor.dtype.itemsize * tensor.dtype.itemsize
                if ready_bytes <= 0 and left_bytes:
                    carried_bytes = max(0, end - position)
                    break
                at = _ROOM_BYTES + position - start
                part = buffer[at : at + max(0, ready_bytes)]
                aligned = part if at % tensor.dtype.itemsize == 0 else part.clone()
                yield tensor, done_bytes // tensor.dtype.itemsize, aligned.view(tensor.dtype)
                done_bytes += ready_bytes
                if done_bytes == tensor.num_bytes:
                    rest.pop()
                    done_bytes = 0
            tail = buffer[_ROOM_BYTES + num_bytes - carried_bytes : _ROOM_BYTES + num_bytes].clone()
            buffer[_ROOM_BYTES - carried_bytes : _ROOM_BYTES] = tail
            start = end
    if rest:
        raise Damaged(f"{file.name} ends before {rest[-1].name}")


def verified_bytes(path: Path, file: FileSums, piece_bytes: int) -> bytes:
    """A small file, whole."""
    content = torch.empty(file.num_bytes, dtype=torch.uint8)
    with open_regular(path / file.name, WHAT, follow=False) as raw:
        for index in range(len(file.crc32)):
            start = index * piece_bytes
            _read(raw, content[start : start + piece_bytes], file, piece_bytes, index)
    return content.numpy().tobytes()


def _read(raw: object, target: Tensor, file: FileSums, piece_bytes: int, index: int) -> None:
    memory, sum_ = memoryview(target.numpy()), 0
    while memory and (count := raw.readinto(memory[:READ_BYTES])):  # type: ignore[attr-defined]
        sum_, memory = zlib.crc32(memory[:count], sum_), memory[count:]
    if sum_ != file.crc32[index] or memory:
        raise Damaged(wrong_piece(file, piece_bytes, index, sum_, len(memory)))
