"""A file that nobody else can reach: set aside in full on the user's disk, without a name, gone with the process.

[Note: past the page cache] O_DIRECT asks for addresses, offsets and lengths that are multiples of SECTOR_BYTES. Some
file systems refuse it when a file is opened, others (overlays) only at the first transfer, so a write and a read try
it. Where it fails another file is opened, through the cache: one file is never accessed both ways.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hightide.ir.chunk import DISK_REGION_BYTES
from hightide.ir.units import exactly, format_bytes
from hightide.process.files import free_bytes_of

SECTOR_BYTES = DISK_REGION_BYTES
TRIES = 8  # transfers in a row that may move nothing of a whole sector
_ZERO_BYTES = 16 << 20  # that are written at a time where a file system cannot set space aside
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_UNNAMED = (*_REFUSALS, errno.EISDIR, errno.ENOENT)  # how file systems say that each file needs a name

_open_files: weakref.WeakSet[DiskFile] = weakref.WeakSet()


class PageBuffer:
    """Memory that begins at a page, which is a sector at least."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = mmap.mmap(-1, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


def memory_at(address: int, num_bytes: int) -> memoryview:
    """Whoever owns it keeps it for as long."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B") if num_bytes else memoryview(b"")


class DiskFile:
    """`num_bytes` of the disk, which are there until it is closed. Transfers may come from any number of threads."""

    def __init__(self, folder: Path, num_bytes: int, descriptor: int, refusal: str | None) -> None:
        self.folder, self.num_bytes = folder, num_bytes
        self.refusal = refusal  # why it goes through the page cache; None: past it
        self._descriptor = descriptor
        _open_files.add(self)

    @property
    def is_direct(self) -> bool:
        return self.refusal is None

    def __str__(self) -> str:
        return f"the file of {self.num_bytes} bytes in {self.folder}"

    def transfer(self, address: int, offset: int, num_bytes: int, is_write: bool) -> int:
        """All of it, from or to memory; all three are multiples of SECTOR_BYTES. Returns how many bytes moved, which is
        more than was asked for where a transfer ended within a sector. Errors say how far it came."""
        assert self._descriptor >= 0, f"{self} is closed"
        memory = memory_at(address, num_bytes)
        done_bytes = moved_bytes = num_idle = 0
        while done_bytes < num_bytes:
            move = os.pwritev if is_write else os.preadv  # looked up each time: tests put faults here
            try:
                count = move(self._descriptor, [memory[done_bytes:]], offset + done_bytes)
            except OSError as error:
                self._say_where(error, offset, done_bytes, num_bytes, is_write)
                raise
            moved_bytes += count
            whole_bytes = count // SECTOR_BYTES * SECTOR_BYTES  # the next one must begin at a sector too
            done_bytes += whole_bytes
            num_idle = 0 if whole_bytes else num_idle + 1
            if num_idle == TRIES:
                stuck = OSError(errno.EIO, f"{TRIES} transfers in a row moved less than {SECTOR_BYTES} bytes")
                self._say_where(stuck, offset, done_bytes, num_bytes, is_write)
                raise stuck
        return moved_bytes

    def forget_cached(self) -> None:
        """What is read next comes from the disk."""
        if not self.is_direct:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _say_where(self, error: OSError, offset: int, done_bytes: int, num_bytes: int, is_write: bool) -> None:
        where = f"{'writing' if is_write else 'reading'} {num_bytes} bytes at {offset} ended after {done_bytes}"
        if error.errno is None:
            error.add_note(f"{where} of {self}")
        else:
            remedy = "look at the system's log, and go on from the last checkpoint, in another folder if it lasts"
            error.strerror, error.filename = f"{error.strerror} ({where}); {remedy}", str(self)

    def close(self) -> None:
        """Returns the space. No thread may be in a transfer."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def _forget_in_child() -> None:
    """A fork that outlives its parent would keep the space."""
    for file in list(_open_files):
        file.close()


os.register_at_fork(after_in_child=_forget_in_child)


def open_disk_file(folder: Path, num_bytes: int, direct: bool = True, flags_through_cache: int = 0) -> DiskFile:
    """`num_bytes` is a multiple of SECTOR_BYTES. ValueError, with the numbers and what to do, if it cannot be."""
    assert num_bytes % SECTOR_BYTES == 0 < num_bytes
    with _opened_folder(folder) as folder_descriptor:
        _check_room(folder, folder_descriptor, num_bytes)
        try:
            descriptor, refusal = _open(folder_descriptor, direct, flags_through_cache)
        except OSError as error:
            raise ValueError(f"{folder}: no file can be made or used there: {error}; name another folder") from error
        file = DiskFile(folder, num_bytes, descriptor, refusal)
        try:
            _set_aside(file, descriptor)
        except OSError as error:
            file.close()
            free_bytes = free_bytes_of(folder_descriptor)
            raise ValueError(_too_little(folder, num_bytes, free_bytes, str(error))) from error
        except BaseException:
            file.close()
            raise
        return file


@contextmanager
def _opened_folder(folder: Path) -> Iterator[int]:
    """Held open: what its path names may be another folder a moment later."""
    if folder.is_symlink():
        raise ValueError(
            f"{folder} is a symbolic link, which others may point elsewhere; name the folder itself, {folder.resolve()}"
        )
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise ValueError(f"{folder}: there is no such folder; make it, or name another") from None
    except NotADirectoryError:
        raise ValueError(f"{folder} is no folder; name one, such as {folder.absolute().parent}") from None
    except OSError as error:
        raise ValueError(f"{folder} cannot be opened: {error.strerror}; name another folder") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_room(folder: Path, descriptor: int, num_bytes: int) -> None:
    """Before the disk is filled up for others, only to find that it does not suffice."""
    free_bytes = free_bytes_of(descriptor)
    if num_bytes > free_bytes:
        raise ValueError(_too_little(folder, num_bytes, free_bytes, "the disk is too full"))


def _too_little(folder: Path, num_bytes: int, free_bytes: int, reason: str) -> str:
    return (
        f"{folder}: {exactly(num_bytes)} cannot be set aside, {free_bytes} bytes "
        f"({format_bytes(free_bytes)}) are free: {reason}. Free some, name another folder, or ask for less"
    )


def _open(folder: int, direct: bool, flags_through_cache: int) -> tuple[int, str | None]:
    """See [Note: past the page cache]. The second is why it goes through the cache."""
    refusal: str | None = "it was asked to"
    if direct:
        try:
            descriptor = _open_unnamed(folder, os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            refusal = f"opening with O_DIRECT: {error.strerror}"
        else:
            try:
                refusal = _try_direct(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if refusal is None:
                return descriptor, None
            os.close(descriptor)
    return _open_unnamed(folder, flags_through_cache), refusal


def _open_unnamed(folder: int, flags: int) -> int:
    """A file that never has a name, or none for longer than it takes to remove it."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    with _passing_over(_NO_UNNAMED):
        return os.open(".", flags | os.O_TMPFILE | os.O_EXCL, 0o600, dir_fd=folder)
    name = f".hightide-{secrets.token_hex(8)}"
    descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    os.unlink(name, dir_fd=folder)
    return descriptor


@contextmanager
def _passing_over(numbers: tuple[int, ...]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def _try_direct(descriptor: int) -> str | None:
    """Writes and reads a sector. Returns what went wrong."""
    written, found = mmap.mmap(-1, SECTOR_BYTES), mmap.mmap(-1, SECTOR_BYTES)
    written[:] = os.urandom(SECTOR_BYTES)
    for what, move, memory in (("write", os.pwritev, written), ("read", os.preadv, found)):
        try:
            count = move(descriptor, [memory], 0)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return f"a direct {what} of {SECTOR_BYTES} bytes: {error.strerror}"
        if count != SECTOR_BYTES:
            return f"a direct {what} of {SECTOR_BYTES} bytes ended after {count}"
    if found[:] != written[:]:
        return "a direct read gave other bytes than were written"
    os.ftruncate(descriptor, 0)
    return None


def _set_aside(file: DiskFile, descriptor: int) -> None:
    """All blocks, so that the disk is full before training or not at all. They read as zeros."""
    try:
        os.posix_fallocate(descriptor, 0, file.num_bytes)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        zeros = PageBuffer(_ZERO_BYTES)
        for offset in range(0, file.num_bytes, _ZERO_BYTES):
            file.transfer(zeros.address, offset, min(_ZERO_BYTES, file.num_bytes - offset), is_write=True)
