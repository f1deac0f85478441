"""One process per run folder, and none that is dead."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hightide.cli.train.run_folder import FolderLock

HOLDER = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(file, fcntl.LOCK_EX)
if os.fork() == 0:
    print("child", os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""


def test_a_folder_that_another_process_has_is_refused_until_that_is_killed(tmp_path: Path) -> None:
    """A child that it forked lives on, as workers of a compiler do: that is nobody who trains."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline().split()[1])
        try:
            with pytest.raises(ValueError, match=r"another process trains in .*; wait for its end, or begin anew"):
                FolderLock(tmp_path)
            holder.kill()
            holder.wait()
            os.kill(child, 0)  # it lives
            lock = FolderLock(tmp_path)
            assert lock.is_held
            lock.close()
            lock.close()
        finally:
            os.kill(child, 9)


def test_a_link_in_the_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    (tmp_path / "lock").symlink_to("mine")
    with pytest.raises(ValueError, match="cannot lock the run folder"):
        FolderLock(tmp_path)


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    lock = FolderLock(tmp_path)
    assert not lock.is_held
    lock.close()
