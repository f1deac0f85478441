"""Files that are there as a whole or not at all: a full disk, a kill or an error leaves the old one as it was.

[Note: writing a file] What is written goes beside the target, to the disk, and then under its name. A link stays a
link: what it points to is written, as `open` does. An existing file keeps its permissions, a new one has those that the
umask gives. What is no regular file (a pipe, a terminal, /dev/stdout) is written straight, and so is a file that cannot
be renamed over: in a folder where nothing new may be made, or mounted alone into a container.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path

_NO_NEIGHBOUR = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_RENAME = (errno.EBUSY, errno.EXDEV)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # some network and user-space file systems
_NEW_MODE = 0o666  # less the umask


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: str | Path, content: bytes, mode: int = _NEW_MODE) -> None:
    """Errors name `path`. `mode` is that of a new file, less the umask."""
    try:
        before = _status(path)
        if before is not None and (not stat.S_ISREG(before.st_mode) or _is_stream(path, before)):
            _write_straight(path, content)
        else:
            _replace(Path(os.path.realpath(path)), content, mode, before)
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None
        raise


def _status(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _is_stream(path: str | Path, status: os.stat_result) -> bool:
    """Whether somebody has it open and goes on writing there: output that a shell has sent into a file."""
    if os.path.abspath(path).startswith(("/dev/", "/proc/")):
        return True
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), status):
                return True
    return False


def _replace(target: Path, content: bytes, mode: int, before: os.stat_result | None) -> None:
    if before is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # a rename would not ask
    beside = target.parent / f".{secrets.token_hex(8)}.hightide"
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        if before is None or error.errno not in _NO_NEIGHBOUR:
            raise
        return _write_straight(target, content)
    try:
        with open(descriptor, "wb") as file:
            if before is not None:
                _take_over(descriptor, before)
            file.write(content)
            file.flush()
            _sync(descriptor)
        try:
            os.replace(beside, target)
        except OSError as error:
            if before is None or error.errno not in _NO_RENAME:
                raise
            _write_straight(target, content)
            beside.unlink()
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    _sync_folder(target.parent)


def _take_over(descriptor: int, before: os.stat_result) -> None:
    """Owner and permissions, as far as the system lets us."""
    with suppress(OSError):
        os.fchown(descriptor, before.st_uid, before.st_gid)
    with suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _write_straight(path: str | Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def _sync_folder(folder: Path) -> None:
    """So that the name survives a power failure. The file is there already: nothing that fails here is told."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def free_bytes_of(place: int) -> int:
    """Of the disk that an open file or folder is on; some file systems of users do not say."""
    found = os.fstatvfs(place)
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize


def has_names_left(place: int) -> bool:
    """Some file systems have room for so many files, whatever is in them."""
    found = os.fstatvfs(place)
    return not found.f_files or found.f_favail > 0
