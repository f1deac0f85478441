"""All system calls that change a disk during a save: nothing else in this folder does. Tests record them and let them
fail here, so each is looked up in this module when it is called.

Names are of one folder, which is held open: what a path names may be another folder a moment later. A name may have one
folder below that in front, such as `judge/adapter_model.safetensors`. Links are never followed. What a file system does
not support, and what is only there to be safe or fast, is passed over.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hightide.process.files import NO_SYNC
from hightide.process.files import free_bytes_of as free_bytes

_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
TRIES = 8  # writes in a row that may write nothing
PAUSE_S = 0.01  # between them
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(path: str | Path) -> int:
    """The user's own: it may be a link."""
    return os.open(path, _FOLDER)


def open_below(name: str, folder: int) -> int:
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def make_folder(name: str, folder: int) -> None:
    os.mkdir(name, dir_fd=folder)


@contextmanager
def holder(name: str, folder: int) -> Iterator[tuple[str, int]]:
    """The folder that a file is in, open, and what the file is called there."""
    above, _, own = name.rpartition("/")
    if not above:
        yield own, folder
        return
    descriptor = open_below(above, folder)
    try:
        yield own, descriptor
    finally:
        close(descriptor)


def status(name: str, folder: int) -> os.stat_result:
    with holder(name, folder) as (own, its):
        return os.stat(own, dir_fd=its, follow_symlinks=False)


def create(name: str, folder: int) -> int:
    with holder(name, folder) as (own, its):
        return os.open(own, _CREATE, 0o666, dir_fd=its)


def open_existing(name: str, folder: int) -> int:
    return os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)


def open_to_write(name: str, folder: int, past_cache: bool = False) -> int:
    """A file that others write to as well, at other places. Not to be read: a client of a network file system that may
    read fills up pages of which it was given a part, and so writes what others have written there meanwhile once more,
    as it was before."""
    direct = getattr(os, "O_DIRECT", 0) if past_cache else 0
    with holder(name, folder) as (own, its):
        return os.open(own, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | direct, dir_fd=its)


def write(file: int, memory: memoryview, offset: int) -> int:
    """As many bytes as the system takes at once."""
    return os.pwrite(file, memory, offset)


def past_cache(file: int) -> bool:
    """Whether what is written from here on goes straight to the disk, if memory, offset and length fill sectors."""
    return _set_direct(file, getattr(os, "O_DIRECT", 0))


def through_cache(file: int) -> None:
    _set_direct(file, 0)


def set_aside(file: int, num_bytes: int) -> None:
    """Blocks for all of a file, so that a full disk is told before it is written. Where they do not suffice, the disk
    is not filled up for others: the system would take what is left, and then say so."""
    if num_bytes > free_bytes(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if _fallocate is None or not num_bytes:
        return
    while _fallocate(file, 0, 0, num_bytes):
        number = ctypes.get_errno()
        if number in NO_SYNC:
            return
        if number != errno.EINTR:
            os.ftruncate(file, 0)
            raise OSError(number, os.strerror(number))


def set_length(file: int, num_bytes: int) -> None:
    """Where space cannot be set aside, too."""
    os.ftruncate(file, num_bytes)


def sync(file: int) -> None:
    """Of a file, or of a folder's names."""
    _unless_unsupported(os.fsync, file)


def let_go(file: int, offset: int, num_bytes: int) -> None:
    """Of pages in the cache: those that are on the disk leave it, those that are not begin to be written."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(file, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def await_written(file: int, offset: int, num_bytes: int) -> None:
    """Until the disk was given this part of a file, and its pages can leave the cache. No promise that it stays."""
    if _sync_file_range is not None and not _sync_file_range(file, offset, num_bytes, _WRITE_AND_WAIT):
        return
    _unless_unsupported(getattr(os, "fdatasync", os.fsync), file)


def rename(name: str, target: str, folder: int) -> None:
    os.rename(name, target, src_dir_fd=folder, dst_dir_fd=folder)


def unlink(name: str, folder: int) -> None:
    with holder(name, folder) as (own, its):
        os.unlink(own, dir_fd=its)


def remove_folder(name: str, folder: int) -> None:
    os.rmdir(name, dir_fd=folder)


def close(file: int) -> None:
    os.close(file)


def lock(file: int, shared: bool = False) -> bool | None:
    """Whether it is ours from here on, alone or `shared`, until it is closed or this process ends. None: nothing can be
    locked there."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        return None
    return True


# -- made of these ---------------------------------------------------------------------------------------------------


def write_all(file: int, memory: memoryview, offset: int) -> None:
    num_idle = 0
    while memory:
        count = write(file, memory, offset)
        num_idle = 0 if count else num_idle + 1
        if num_idle == TRIES:
            raise OSError(errno.EIO, f"{TRIES} writes in a row at {offset} wrote nothing")
        if not count:
            time.sleep(PAUSE_S)
        memory, offset = memory[count:], offset + count


def make_folders(path: Path) -> None:
    """With all above it. Each name is on the disk before anything is put below it."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for path in reversed(missing):
        above = open_folder(path.parent)
        try:
            with suppress(FileExistsError):
                make_folder(path.name, above)
            sync(above)
        finally:
            close(above)


def _set_direct(file: int, direct: int) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0) | direct)
    except OSError:
        return False
    return bool(direct)


def _unless_unsupported(call: Callable[[int], None], file: int) -> None:
    try:
        call(file)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def _found(names: tuple[str, ...], *types: type[ctypes._SimpleCData[int]]) -> Callable[..., int] | None:
    """A function of the C library, where it has it."""
    library = ctypes.CDLL(None, use_errno=True)
    for name in names:
        with suppress(AttributeError):
            function = library[name]
            function.argtypes, function.restype = types, ctypes.c_int
            return function
    return None


# Not os.posix_fallocate: where a file system cannot set space aside, the C library writes into every block.
_fallocate = _found(("fallocate64", "fallocate"), ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_file_range = _found(("sync_file_range",), ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_WRITE_AND_WAIT = 1 | 2 | 4  # for what is under way, begin with the rest, wait for that
