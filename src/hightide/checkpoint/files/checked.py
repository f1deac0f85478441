"""Files of a checkpoint, read with their sums: no byte is handed out before its piece is what was written."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from hightide.checkpoint.files.folder import READ_BYTES, WHAT, wrong_piece
from hightide.checkpoint.files.manifest import Manifest
from hightide.ir.foreign import open_regular


class DamagedFile(ValueError):
    """A piece of a file is not what was written. `refusal` of folder.py makes of it what a user is told."""


class CheckedFile:
    """One file of a checkpoint. The piece that was read last is kept (64 MiB), so that reading from front to back reads
    and checks each piece once, however it is cut into ranges."""

    def __init__(self, path: Path, manifest: Manifest, name: str) -> None:
        """`path` is that of the checkpoint."""
        self._sums, self._piece_bytes = manifest.file(name), manifest.piece_bytes
        self._file = open_regular(path / name, WHAT, follow=False)
        self._memory = memoryview(bytearray(min(self._piece_bytes, self._sums.num_bytes)))
        self._index = -1

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

    def _piece(self, index: int) -> memoryview:
        start = index * self._piece_bytes
        piece = self._memory[: self._sums.num_bytes - start]
        if index != self._index:
            self._index = -1
            self._read(index, start, piece)
            self._index = index
        return piece

    def _read(self, index: int, start: int, piece: memoryview) -> None:
        sum_ = done_bytes = 0
        while done_bytes < len(piece):
            part = piece[done_bytes : done_bytes + READ_BYTES]
            try:
                count = os.preadv(self._file.fileno(), [part], start + done_bytes)
            except OSError as error:
                raise DamagedFile(f"{self._sums.name} at byte {start + done_bytes}: {error.strerror}") from error
            if not count:
                break
            sum_, done_bytes = zlib.crc32(part[:count], sum_), done_bytes + count
        if done_bytes < len(piece) or sum_ != self._sums.crc32[index]:
            raise DamagedFile(wrong_piece(self._sums, self._piece_bytes, index, sum_, len(piece) - done_bytes))
        if hasattr(os, "posix_fadvise"):  # what is read once need not stay in the page cache
            os.posix_fadvise(self._file.fileno(), start, len(piece), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
