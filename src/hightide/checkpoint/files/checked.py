"""Files of a checkpoint, read with their sums, once and from front to back: no byte is handed out before its piece is
what was written."""

from __future__ import annotations

import os
import threading
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hightide.checkpoint.files.manifest import FileSums, Manifest
from hightide.ir.foreign import open_regular
from hightide.loading.tensor_file import StoredTensor
from hightide.stores.disk_file import memory_at
from hightide.stores.threads import background

WHAT = "file of a checkpoint"
READ_BYTES = 8 * 1024**2  # at once
PART_BYTES = 16 * 1024**2  # of a tensor, handed out at once
NUM_AHEAD = 3
THREAD = "hightide-load"

Needed = Callable[[StoredTensor], range]  # which elements of it


class DamagedFile(ValueError):
    """A piece of a file is not what was written. `refusal` of folder.py makes of it what a user is told."""


class CheckedFile:
    """One file of a checkpoint. Reading from front to back reads and checks each piece once, however it is cut into
    ranges: the piece that was asked for last is kept, and threads read the NUM_AHEAD pieces that follow it."""

    def __init__(self, path: Path, manifest: Manifest, name: str, wanted: Collection[int] | None = None) -> None:
        """`path` is that of the checkpoint. `wanted`: numbers of the pieces that will be asked for; by default all."""
        self._sums, self._piece_bytes = manifest.file(name), manifest.piece_bytes
        self._file = open_regular(path / name, WHAT, follow=False)
        self._wanted: Sequence[int] = range(len(self._sums.crc32)) if wanted is None else sorted(wanted)
        self._pieces: dict[int, _Piece] = {}
        self._free: list[memoryview] = []

    def read_into(self, offset: int, memory: memoryview) -> None:
        """`memory` is bytes; all of it, from `offset` in the file on."""
        if not 0 <= offset <= offset + len(memory) <= self._sums.num_bytes:
            raise DamagedFile(
                f"{self._sums.name} has no {len(memory)} bytes at {offset}: it has {self._sums.num_bytes}"
            )
        while memory:
            index, start = divmod(offset, self._piece_bytes)
            part = self._piece(index)[start : start + len(memory)]
            memory[: len(part)] = part
            memory, offset = memory[len(part) :], offset + len(part)

    def looked_through(self) -> Iterator[tuple[int, str | None]]:
        """The bytes of each piece that is wanted, and what is wrong with it."""
        for index in self._wanted:
            try:
                yield len(self._piece(index)), None
            except DamagedFile as error:
                yield 0, str(error)

    def _piece(self, index: int) -> memoryview:
        at = bisect_left(self._wanted, index)
        wanted = self._wanted[at : at + 1 + NUM_AHEAD]
        assert wanted[:1] and wanted[0] == index, f"piece {index} of {self._sums.name} was not wanted"
        for old in [old for old in self._pieces if old not in wanted]:
            piece = self._pieces.pop(old)
            piece.join()
            self._free.append(piece.memory)
        for number in wanted:
            if number not in self._pieces:
                memory = self._free.pop() if self._free else memoryview(bytearray(self._buffer_bytes))
                self._pieces[number] = _Piece(self._file.fileno(), self._sums, self._piece_bytes, number, memory)
        return self._pieces[index].content()

    @property
    def _buffer_bytes(self) -> int:
        return min(self._piece_bytes, self._sums.num_bytes)

    def close(self) -> None:
        for piece in self._pieces.values():
            piece.join()
        self._file.close()

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Piece:
    """One that is read, in a thread of its own unless it is the only one."""

    def __init__(self, file: int, sums: FileSums, piece_bytes: int, index: int, memory: memoryview) -> None:
        self.memory = memory
        self._file, self._sums, self._piece_bytes, self._index = file, sums, piece_bytes, index
        self._start = index * piece_bytes
        self._content = memory[: sums.num_bytes - self._start]
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if len(sums.crc32) > 1:
            with suppress(RuntimeError):  # where the system allows no more threads it is read here
                self._thread = background(THREAD, self._try)
        if self._thread is None:
            self._try()

    def content(self) -> memoryview:
        self.join()
        if self._error is not None:
            raise self._error
        return self._content

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _try(self) -> None:
        try:
            self._read()
        except BaseException as error:
            self._error = error

    def _read(self) -> None:
        sum_ = done_bytes = 0
        while done_bytes < len(self._content):
            part = self._content[done_bytes : done_bytes + READ_BYTES]
            try:
                count = os.preadv(self._file, [part], self._start + done_bytes)
            except OSError as error:
                raise DamagedFile(f"{self._sums.name} at byte {self._start + done_bytes}: {error.strerror}") from error
            if not count:
                break
            sum_, done_bytes = zlib.crc32(part[:count], sum_), done_bytes + count
        left_bytes = len(self._content) - done_bytes
        if left_bytes or sum_ != self._sums.crc32[self._index]:
            raise DamagedFile(_wrong_piece(self._sums, self._piece_bytes, self._index, sum_, left_bytes))
        if hasattr(os, "posix_fadvise"):  # what is read once need not stay in the page cache
            with suppress(OSError):
                os.posix_fadvise(self._file, self._start, len(self._content), os.POSIX_FADV_DONTNEED)


def _wrong_piece(file: FileSums, piece_bytes: int, index: int, sum_: int, left_bytes: int = 0) -> str:
    start = index * piece_bytes
    end = min(start + piece_bytes, file.num_bytes)
    where = f"{file.name}, piece {index + 1} of {len(file.crc32)} (bytes {start} to {end})"
    if left_bytes:
        return f"{where} ends {left_bytes} bytes too early"
    return f"{where} has the sum {sum_:08x}, it was written with {file.crc32[index]:08x}"


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
