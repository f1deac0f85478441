"""One process per run folder: a lock that dies with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # some network and user-space file systems


class FolderLock:
    """Held until it is closed. A POSIX lock: children that are forked do not hold it, so none that outlives a killed
    run keeps the folder from the next one. Where the file system has no locks nothing is held, and `is_held` says so.
    """

    def __init__(self, folder: Path) -> None:
        """Refused while another process has it."""
        path = folder / LOCK
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise ValueError(
                f"cannot lock the run folder {folder}: {error.strerror} ({LOCK}); make it writable, or begin anew "
                "elsewhere with --no-resume and --out"
            ) from error
        self.is_held = True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                self.is_held = False
                return
            os.close(self._file)
            raise ValueError(
                f"another process trains in {folder}; wait for its end, or begin anew: --no-resume or another --name"
            ) from error

    def close(self) -> None:
        """Letting go is for who goes on living: the file stays, for a lock on a file that is gone excludes nobody."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
