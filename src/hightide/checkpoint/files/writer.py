"""A checkpoint is written: piece by piece, beside the earlier ones, and then there as a whole.

[Note: a checkpoint] `folder/step-N` is there exactly when everything in it is on the disk. It is written as
`step-N.tmp`, which first of all gets an empty file (the marker) that its writer holds locked: whoever finds the lock
free knows that the writer is gone, and may remove the folder. Each file is written front to back; all are synced,
then the manifest, then the folder's names; then it is renamed, and the names of the parent are synced. Then the marker
goes.

A step that is there already is replaced: it is renamed to `step-N.old`, which counts as a checkpoint for all who read,
until `step-N` is there and synced; then it is removed. A crash in between leaves one or both of them.

[Note: dirty pages] What is written waits in the page cache for the disk, and counts there against the control group.
So at the end of each piece the system is told to begin with it; and where DIRTY_BYTES are on their way, the oldest
piece is waited for, and its pages leave the cache. Whoever puts values waits for nothing else: they may be those that
an update wants to change. Files are synced in the end.
"""

from __future__ import annotations

import ctypes
import sys
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from hightide.checkpoint.files import filesystem, leftovers, manifest
from hightide.checkpoint.files.filesystem import FULL
from hightide.checkpoint.files.manifest import MARKER, FileSums, Manifest, check_name
from hightide.checkpoint.files.names import OLD, TMP, check_step, step_name
from hightide.checkpoint.files.tensor_layout import Entry, header
from hightide.ir.foreign import MAX_FILE_BYTES, quoted, shown
from hightide.ir.units import format_bytes

WRITE_BYTES = 1024**2  # at once: small enough that its sum and its copy find it in the processor's cache
DIRTY_BYTES = 256 * 1024**2  # of all files of a writer, and a piece of each; see [Note: dirty pages]
assert sys.byteorder == "little", "safetensors files are little-endian"


class CheckpointWriter:
    """One checkpoint. Several files may be open at once; one thread at a time writes. Errors of the disk are
    ValueErrors that say what was needed; after any error, `abandon`. As a context it abandons what is not committed."""

    def __init__(self, folder: str | Path, step: int, expected_bytes: int = 0) -> None:
        """`expected_bytes` of all files together, if known: a disk that has less is refused before anything else."""
        check_step(step)
        self.step, self.path = step, Path(folder) / step_name(step)
        self.expected_bytes = expected_bytes
        self._files: list[_FileWriter] = []
        self._on_their_way: deque[tuple[_FileWriter, int, int]] = deque()  # pieces: file, offset, bytes
        self._parent = self._folder = self._marker = -1
        try:
            self._begin(Path(folder))
        except OSError as error:
            refusal = self._refusal(error)
            self.abandon()
            raise refusal from error
        except BaseException:
            self.abandon()
            raise

    def tensors(
        self, name: str, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None
    ) -> TensorFileWriter:
        """A safetensors file. Its values are put in the order of the entries."""
        check_name(name)
        head = header(entries, {"format": "pt"} if metadata is None else metadata)
        file = TensorFileWriter(self, name, head, entries)
        file.begin(memoryview(head))
        return file

    def bytes(self, name: str, content: bytes) -> None:
        """A small file, whole."""
        check_name(name)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"{quoted(name)} would have {len(content)} bytes, it may have {MAX_FILE_BYTES}: save less")
        _FileWriter(self, name, len(content)).begin(memoryview(content))

    def commit(self, facts: Mapping[str, Any]) -> Path:
        """The checkpoint is there, and on the disk. `facts` are plain data about it, for its manifest."""
        assert self._folder >= 0, "abandoned, or committed"
        for file in self._files:
            file.finish()
        self._on_their_way.clear()
        sums = tuple(FileSums(file.name, file.num_bytes, tuple(file.sums)) for file in self._files)
        content = Manifest(self.step, time.time(), sums, dict(facts), manifest.PIECE_BYTES).to_bytes()
        try:
            last = _FileWriter(self, manifest.NAME, len(content))
            last.begin(memoryview(content))
            last.finish()
            filesystem.sync(self._folder)
            self._put_in_place()
        except OSError as error:
            raise self._refusal(error) from error
        return self.path

    def abandon(self) -> None:
        """Removes what was written, as far as that is possible; the next save removes what is left. Idempotent, and
        nothing once it is committed."""
        for file in self._files:
            with suppress(OSError):
                file.close()
        if self._folder >= 0:
            with suppress(OSError):
                leftovers.remove_unfinished(self._tmp, self._folder, self._parent)
        self._close()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _begin(self, folder: Path) -> None:
        filesystem.make_folders(folder)
        self._parent = filesystem.open_folder(folder)
        leftovers.clear(self._parent, folder)
        leftovers.check_replaceable(self._parent, self.path)
        if self.expected_bytes > filesystem.free_bytes(self._parent):
            raise ValueError(self._too_little("the disk is too full"))
        self._folder, self._marker = leftovers.claim(self._tmp, self._parent, self.path)
        filesystem.sync(self._folder)  # nothing of it is there without its marker

    def _put_in_place(self) -> None:
        """See [Note: a checkpoint]."""
        name, old = self.path.name, self.path.name + OLD
        leftovers.check_replaceable(self._parent, self.path)  # much may have happened meanwhile
        is_replaced = leftovers.exists(name, self._parent)
        try:
            if is_replaced:
                filesystem.rename(name, old, self._parent)
                filesystem.sync(self._parent)
            filesystem.rename(self._tmp, name, self._parent)
        except OSError:
            if is_replaced and not leftovers.exists(name, self._parent):
                with suppress(OSError):
                    filesystem.rename(old, name, self._parent)
            raise
        folder, self._folder = self._folder, -1  # from here on there is nothing to abandon
        try:
            filesystem.sync(self._parent)
            with suppress(OSError, ValueError):  # it is there; what is left over is left to the next save
                filesystem.unlink(MARKER, folder)
                if is_replaced:
                    leftovers.remove_checkpoint(old, self._parent, self.path.parent)
        finally:
            filesystem.close(folder)
        self._close()

    def _close(self) -> None:
        opened, self._folder, self._marker, self._parent = (self._folder, self._marker, self._parent), -1, -1, -1
        for descriptor in opened:
            if descriptor >= 0:
                with suppress(OSError):
                    filesystem.close(descriptor)

    @property
    def _tmp(self) -> str:
        return self.path.name + TMP

    @property
    def _needed_bytes(self) -> int:
        return max(self.expected_bytes, sum(file.num_bytes for file in self._files))

    def _refusal(self, error: OSError) -> ValueError:
        if error.errno in FULL:
            return ValueError(self._too_little(str(error.strerror)))
        return ValueError(f"{shown(self.path)} cannot be written: {error}; earlier checkpoints are as they were")

    def _too_little(self, reason: str) -> str:
        needed_bytes = self._needed_bytes
        free_bytes = filesystem.free_bytes(self._parent) if self._parent >= 0 else 0
        return (
            f"{shown(self.path)} cannot be written: it needs {needed_bytes} bytes ({format_bytes(needed_bytes)}), "
            f"{free_bytes} bytes ({format_bytes(free_bytes)}) are free: {reason}. Earlier checkpoints are as they "
            "were; free some, keep fewer, or name another folder"
        )

    def _send(self, file: _FileWriter, offset: int, num_bytes: int) -> None:
        """A piece, to the disk. See [Note: dirty pages]."""
        file.let_go(offset, num_bytes)
        self._on_their_way.append((file, offset, num_bytes))
        while sum(piece[2] for piece in self._on_their_way) > DIRTY_BYTES:
            file, offset, num_bytes = self._on_their_way.popleft()
            file.await_written(offset, num_bytes)
            file.let_go(offset, num_bytes)


class _FileWriter:
    """A file of a checkpoint: as many bytes as it was told, from front to back."""

    name: str

    def __init__(self, writer: CheckpointWriter, name: str, num_bytes: int) -> None:
        assert all(file.name != name for file in writer._files), f"{name} is there already"
        self.name = name
        self.num_bytes = num_bytes
        self.sums: list[int] = []
        self.offset = 0
        self._writer, self._sum = writer, 0
        self._piece_bytes = manifest.PIECE_BYTES
        self._descriptor = -1

    def begin(self, head: memoryview) -> None:
        """Space for all of it is set aside first."""
        writer = self._writer
        try:
            self._descriptor = filesystem.create(self.name, writer._folder)
            writer._files.append(self)
            filesystem.set_aside(self._descriptor, self.num_bytes)
        except OSError as error:
            raise self._refusal(error) from error
        self.write(head)

    def write(self, memory: memoryview) -> None:
        assert self._writer._folder >= 0 and self.offset + len(memory) <= self.num_bytes
        try:
            while memory:
                part = memory[: min(WRITE_BYTES, self._piece_bytes - self.offset % self._piece_bytes)]
                self._sum = zlib.crc32(part, self._sum)
                filesystem.write_all(self._descriptor, part, self.offset)
                self.offset += len(part)
                memory = memory[len(part) :]
                if self.offset % self._piece_bytes == 0:
                    self._end_piece(self._piece_bytes)
            if self.offset == self.num_bytes and self.offset % self._piece_bytes:
                self._end_piece(self.offset % self._piece_bytes)
        except OSError as error:
            raise self._refusal(error) from error

    def _end_piece(self, num_bytes: int) -> None:
        self.sums.append(self._sum)
        self._sum = 0
        self._writer._send(self, self.offset - num_bytes, num_bytes)

    def let_go(self, offset: int, num_bytes: int) -> None:
        filesystem.let_go(self._descriptor, offset, num_bytes)

    def await_written(self, offset: int, num_bytes: int) -> None:
        try:
            filesystem.await_written(self._descriptor, offset, num_bytes)
        except OSError as error:
            raise self._refusal(error) from error

    def finish(self) -> None:
        """On the disk, and complete."""
        assert self.offset == self.num_bytes, f"{self.name} lacks {self.num_bytes - self.offset} bytes"
        try:
            filesystem.sync(self._descriptor)
            self.let_go(0, 0)
            self.close()
        except OSError as error:
            raise self._refusal(error) from error

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            filesystem.close(descriptor)

    def _refusal(self, error: OSError) -> ValueError:
        error.filename = f"{self._writer.path}{TMP}/{self.name}"
        return self._writer._refusal(error)


class TensorFileWriter(_FileWriter):
    def __init__(self, writer: CheckpointWriter, name: str, head: bytes, entries: Sequence[Entry]) -> None:
        super().__init__(writer, name, len(head) + sum(entry.num_bytes for entry in entries))
        self._entries, self._index, self._left_bytes = entries, -1, 0

    def put(self, value: Tensor | bytes | bytearray | memoryview) -> None:
        """The next tensor of the entries, or the next part of it: whole elements, in order, in memory of the host."""
        while not self._left_bytes:
            self._index += 1
            assert self._index < len(self._entries), f"{self.name} is complete"
            self._left_bytes = self._entries[self._index].num_bytes
            if not self._left_bytes:
                break
        entry = self._entries[self._index]
        memory = _memory(value, entry)
        assert len(memory) <= self._left_bytes, f"{entry.name}: {len(memory)} bytes, {self._left_bytes} are left of it"
        self._left_bytes -= len(memory)
        self.write(memory)


def _memory(value: Tensor | bytes | bytearray | memoryview, entry: Entry) -> memoryview:
    if not isinstance(value, Tensor):
        return memoryview(value).cast("B")
    assert value.device.type == "cpu" and value.is_contiguous() and value.dtype == entry.dtype, (entry, value.dtype)
    if not value.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_uint8 * value.nbytes).from_address(value.data_ptr())).cast("B")
