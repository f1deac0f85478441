"""A checkpoint is written: piece by piece, beside the earlier ones, and then there as a whole.

[Note: a checkpoint] `folder/step-N` is there exactly when everything in it is on the disk. It is written as
`step-N.tmp`, which first of all gets an empty file (the marker) that its writer holds locked: whoever finds the lock
free knows that the writer is gone, and may remove the folder. Files are written block by block; all are synced, then
the manifest, then the folder's names; then it is renamed, and the names of the parent are synced. Then the marker goes.

A step that is there already is replaced: it is renamed to `step-N.old`, which counts as a checkpoint for all who read,
until `step-N` is there and synced; then it is removed. A crash in between leaves one or both of them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from hightide.checkpoint.files import filesystem, leftovers, manifest
from hightide.checkpoint.files.blocks import Block, Blocks, Lend, place_of
from hightide.checkpoint.files.joined_sums import joined
from hightide.checkpoint.files.manifest import MARKER, SHOWN, WRITTEN_S, FileSums, Manifest, check_name, folders_of
from hightide.checkpoint.files.names import OLD, TMP, check_step, step_name
from hightide.checkpoint.files.tensor_layout import Entry, header
from hightide.ir.foreign import MAX_FILE_BYTES, quoted, shown
from hightide.ir.save_sizes import BLOCK_BYTES
from hightide.ir.units import exactly
from hightide.process.files import FULL, has_names_left
from hightide.stores.disk_file import SECTOR_BYTES

Bytes = bytes  # a method is called so, too

assert sys.byteorder == "little", "safetensors files are little-endian"


class CheckpointWriter:
    """One checkpoint. Several files may be open at once; one thread at a time writes. Errors of the disk are
    ValueErrors that say what was needed; after any error, `abandon`. As a context it abandons what is not committed."""

    def __init__(
        self,
        folder: str | Path,
        step: int,
        expected_bytes: int = 0,
        name: str | None = None,
        lend: Lend | None = None,
    ) -> None:
        """`expected_bytes` of all files together, if known: a disk that has less is refused before anything else.
        `name`: `step-N`, if it is None. `lend`: memory for blocks; None: it is the system's."""
        check_step(step)
        self.step, self.path = step, Path(folder) / (name or step_name(step))
        self.expected_bytes = expected_bytes
        self._files: list[_FileWriter] = []
        self._folders: set[str] = set()  # below it
        self._is_shown = False
        self._blocks = Blocks(min(BLOCK_BYTES, manifest.PIECE_BYTES), lend, expected_bytes)
        self._began_s = time.monotonic()
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
        file.begin(head)
        return file

    def bytes(self, name: str, content: bytes) -> None:
        """A small file, whole."""
        check_name(name)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"{quoted(name)} would have {len(content)} bytes, it may have {MAX_FILE_BYTES}: save less")
        _FileWriter(self, name, len(content)).begin(content)

    def copying(self, then: Callable[[], object]) -> AbstractContextManager[None]:
        """Tensors that are put inside must stay as they are until `then` is called, in another thread, and no longer:
        else what is put is copied before `put` returns."""
        return self._blocks.copying(then)

    def reserve(self, name: str, num_bytes: int) -> None:
        """A file of this length, which several ranks write (`SharedFile`)."""
        check_name(name)
        try:
            descriptor = self._create(name)
            try:
                filesystem.set_aside(descriptor, num_bytes)
                filesystem.set_length(descriptor, num_bytes)
            finally:
                filesystem.close(descriptor)
        except OSError as error:
            error.filename = f"{self.path}{TMP}/{name}"
            raise self._refusal(error) from error

    def show(self, secret: Bytes) -> None:
        """To other ranks, that this is the folder: see SharedFolder."""
        file = _FileWriter(self, SHOWN, len(secret))
        file.begin(secret)
        file.finish()  # now: until then only this node sees it
        self._files.remove(file)
        self._is_shown = True

    def commit(self, facts: Mapping[str, Any], others: Sequence[FileSums] = ()) -> Path:
        """The checkpoint is there, and on the disk. `facts` are plain data about it, for its manifest, which also tells
        in how many seconds all was written and synced; `others` are files that were reserved, and are synced."""
        assert self._folder >= 0, "abandoned, or committed"
        for file in self._files:
            file.finish()
        sums = (*(FileSums(file.name, file.num_bytes, tuple(file.sums)) for file in self._files), *others)
        told = {**facts, WRITTEN_S: time.monotonic() - self._began_s}
        content = Manifest(self.step, time.time(), sums, told, manifest.PIECE_BYTES).to_bytes()
        try:
            if self._is_shown:
                filesystem.unlink(SHOWN, self._folder)
            for below in self._folders:
                descriptor = filesystem.open_below(below, self._folder)
                try:
                    filesystem.sync(descriptor)
                finally:
                    filesystem.close(descriptor)
            last = _FileWriter(self, manifest.NAME, len(content))
            last.begin(content)
            last.finish()
            filesystem.sync(self._folder)
            self._put_in_place()
        except OSError as error:
            raise self._refusal(error) from error
        return self.path

    def abandon(self) -> None:
        """Removes what was written, as far as that is possible; the next save removes what is left. Idempotent, and
        nothing once it is committed."""
        self._blocks.close()
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

    def _create(self, name: str) -> int:
        """With the folder that it is in."""
        for below in folders_of([name]):
            if below not in self._folders:
                leftovers.note_folder(self._marker, below)
                filesystem.make_folder(below, self._folder)
                self._folders.add(below)
        return filesystem.create(name, self._folder)

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
            has_names = self._parent < 0 or has_names_left(self._parent)
            return ValueError(
                self._too_little(str(error.strerror) if has_names else "no more files can be made (df -i)")
            )
        return ValueError(
            f"{shown(self.path)} cannot be written: {error}. Earlier checkpoints are as they were; mend that, or name "
            "another folder"
        )

    def _too_little(self, reason: str) -> str:
        needed_bytes = self._needed_bytes
        free_bytes = filesystem.free_bytes(self._parent) if self._parent >= 0 else 0
        return (
            f"{shown(self.path)} cannot be written: it needs {exactly(needed_bytes)}, "
            f"{exactly(free_bytes)} are free: {reason}. Earlier checkpoints are as they "
            "were; free some, keep fewer, or name another folder"
        )

    def check(self) -> None:
        """Raises what went wrong with a block that was sent."""
        if (failure := self._blocks.failure) is not None:
            file, error = failure
            if isinstance(error, OSError) and isinstance(file, _FileWriter):
                raise file._refusal(error) from error
            raise error


class _FileWriter:
    """A file of a checkpoint: as many bytes as it was told, from front to back."""

    name: str

    def __init__(self, writer: CheckpointWriter, name: str, num_bytes: int) -> None:
        assert all(file.name != name for file in writer._files), f"{name} is there already"
        self.name = name
        self.num_bytes = num_bytes
        self.offset = 0  # up to which it was put
        self.descriptor = -1
        self.is_direct = False
        self.through_cache = threading.Lock()
        self._writer, self._blocks = writer, writer._blocks
        self._block: Block | None = None
        self._sums: dict[int, tuple[int, int]] = {}  # and bytes, of blocks, by offset
        self._piece_bytes = manifest.PIECE_BYTES
        assert self._piece_bytes % self._blocks.block_bytes == 0

    def begin(self, head: bytes) -> None:
        """Space for all of it is set aside first."""
        writer = self._writer
        try:
            self.descriptor = writer._create(self.name)
            writer._files.append(self)
            filesystem.set_aside(self.descriptor, self.num_bytes)
        except OSError as error:
            raise self._refusal(error) from error
        if not self._is_small and self._blocks.block_bytes % SECTOR_BYTES == 0:
            self.is_direct = filesystem.past_cache(self.descriptor)
        self.write(head)

    @property
    def _is_small(self) -> bool:
        """It is written by whoever puts it."""
        return self.num_bytes < self._blocks.block_bytes

    def write(self, value: Tensor | bytes) -> None:
        address, left_bytes = place_of(value)
        assert self._writer._folder >= 0 and self.offset + left_bytes <= self.num_bytes
        while left_bytes:
            if self._block is None:
                self._block = self._blocks.take(self, self.offset)
                self._writer.check()
            num_bytes = min(left_bytes, self._blocks.block_bytes - self._block.num_bytes)
            if self._is_small:
                self._block.add(address, num_bytes)
            else:
                self._blocks.put(self._block, value, address, num_bytes)
            address, left_bytes, self.offset = address + num_bytes, left_bytes - num_bytes, self.offset + num_bytes
            if self._block.num_bytes == self._blocks.block_bytes or self.offset == self.num_bytes:
                self._end_block(self._block)

    def _end_block(self, block: Block) -> None:
        self._block = None
        if not self._is_small:
            self._blocks.send(block)
            return
        try:
            self._blocks.write(block)
        except OSError as error:
            raise self._refusal(error) from error

    def note(self, offset: int, sum_: int, num_bytes: int) -> None:
        self._sums[offset] = sum_, num_bytes

    @property
    def sums(self) -> list[int]:
        """Of pieces, once all is written."""
        sums = [0] * -(-self.num_bytes // self._piece_bytes)
        for offset, (sum_, num_bytes) in sorted(self._sums.items()):
            piece = offset // self._piece_bytes
            sums[piece] = joined(sums[piece], sum_, num_bytes)
        return sums

    def finish(self) -> None:
        """On the disk, and complete."""
        assert self.offset == self.num_bytes, f"{self.name} lacks {self.num_bytes - self.offset} bytes"
        self._blocks.settle()
        self._writer.check()
        try:
            filesystem.sync(self.descriptor)
            filesystem.let_go(self.descriptor, 0, 0)
            self.close()
        except OSError as error:
            raise self._refusal(error) from error

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
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
        if isinstance(value, Tensor):
            assert value.device.type == "cpu" and value.is_contiguous() and value.dtype == entry.dtype, (entry, value)
        else:
            value = bytes(value)
        num_bytes = value.nbytes if isinstance(value, Tensor) else len(value)
        assert num_bytes <= self._left_bytes, f"{entry.name}: {num_bytes} bytes, {self._left_bytes} are left of it"
        self._left_bytes -= num_bytes
        self.write(value)
