"""The folder of an unfinished checkpoint, as a rank sees it that did not make it.

The first rank has made it and all its files, each as long as it will be, and has put a secret there. A rank that does
not find that secret looks at another folder of the same name: on the disk of another node, or one that was left over.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from hightide.checkpoint.files import filesystem, manifest
from hightide.checkpoint.files.blocks import Blocks, Lend
from hightide.checkpoint.files.manifest import SHOWN
from hightide.checkpoint.files.names import TMP
from hightide.checkpoint.files.shared_file import SharedFile, Sum
from hightide.ir.foreign import shown
from hightide.ir.save_sizes import BLOCK_BYTES
from hightide.ir.save_sizes import NUM_OPEN as NUM_FILLED
from hightide.ir.units import exactly
from hightide.process.files import FULL

VISIBLE_S = 15.0  # a network file system may show what another node has made so much later
LOOK_S = 0.05
NUM_OPEN = 4  # files, of which a rank writes to two or three in turn
_SECRET_BYTES = 256


class SharedFolder:
    """One thread at a time writes. Errors are ValueErrors."""

    def __init__(self, path: Path, secret: bytes, rank: int, lend: Lend | None = None, expected_bytes: int = 0) -> None:
        """`path`: that the checkpoint will have. `lend`: memory for blocks, of `expected_bytes` that this rank writes;
        None: it is the system's."""
        self.path, self._rank = path, rank
        self._files: dict[str, SharedFile] = {}
        self._open: list[str] = []  # the one that was written to last is the last
        self._folder = self._found(secret)
        self._blocks = Blocks(min(BLOCK_BYTES, manifest.PIECE_BYTES), lend, expected_bytes)

    def _found(self, secret: bytes) -> int:
        tmp, deadline_s, why = self.path.name + TMP, time.monotonic() + VISIBLE_S, "it is not there"
        while True:
            try:
                parent = filesystem.open_folder(self.path.parent)  # each time: so a client asks its server again
                try:
                    folder = filesystem.open_below(tmp, parent)
                finally:
                    filesystem.close(parent)
                if _read(folder) == secret:
                    return folder
                filesystem.close(folder)
                why = "another folder is there"
            except OSError as error:
                why = str(error.strerror)
            if time.monotonic() > deadline_s:
                raise ValueError(
                    f"rank {self._rank} (on {socket.gethostname()}) does not see {shown(self.path.parent / tmp)}, "
                    f"which rank 0 has made: {why}. Name a folder of a file system that all ranks share"
                )
            time.sleep(LOOK_S)

    def check(self, name: str, num_bytes: int) -> None:
        """Whether a file can be written here, before anything is."""
        file = self._files[name] = SharedFile(name, num_bytes, self._blocks)
        try:
            file.open(self._folder)
            there_bytes = os.fstat(file.descriptor).st_size
            file.close()
        except OSError as error:
            raise self._refusal(name, error) from error
        if there_bytes != num_bytes:
            raise ValueError(
                f"rank {self._rank} sees {shown(self.path)}{TMP}/{name} with {there_bytes} bytes, rank 0 has made it "
                f"with {num_bytes}: name a folder of a file system that all ranks share"
            )

    def write(self, name: str, offset: int, value: Tensor | bytes) -> None:
        file = self._files[name]
        if name in self._open:
            self._open.remove(name)
        else:
            try:
                file.open(self._folder)
            except OSError as error:
                raise self._refusal(name, error) from error
        self._open.append(name)
        file.write(offset, value)
        self._check()
        for other in self._open[:-NUM_FILLED]:  # their blocks are for those that are written to now
            self._files[other].end_run()
        if len(self._open) > NUM_OPEN:
            self._settle([self._open[0]])

    def finish(self) -> dict[str, list[Sum]]:
        """All that was written is on the disk; sums of it."""
        self._settle(list(self._open))
        return {name: file.sums for name, file in self._files.items()}

    def _settle(self, names: list[str]) -> None:
        """On the disk, and closed: of many files few are open at a time, each with memory for a block."""
        for name in names:
            self._files[name].end_run()
        self._blocks.settle()
        self._check()
        for name in names:
            self._open.remove(name)
            try:
                self._files[name].sync()
                self._files[name].close()
            except OSError as error:
                raise self._refusal(name, error) from error

    def close(self) -> None:
        """Whatever is under way is waited for. Idempotent."""
        self._blocks.close()
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        folder, self._folder = self._folder, -1
        if folder >= 0:
            with suppress(OSError):
                filesystem.close(folder)

    def _check(self) -> None:
        if (failure := self._blocks.failure) is not None:
            file, error = failure
            assert isinstance(file, SharedFile)
            if isinstance(error, OSError):
                raise self._refusal(file.name, error) from error
            raise error

    def _refusal(self, name: str, error: OSError) -> ValueError:
        free = ""
        if error.errno in FULL:
            free_bytes = filesystem.free_bytes(self._folder)
            free = f", {exactly(free_bytes)} are free"
        return ValueError(
            f"{shown(self.path)} cannot be written by rank {self._rank}: {error.strerror} ({name}{free}). Earlier "
            "checkpoints are as they were"
        )


def _read(folder: int) -> bytes:
    file = os.open(SHOWN, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(file, _SECRET_BYTES)
    finally:
        filesystem.close(file)
