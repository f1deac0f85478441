"""Leftovers of crashed saves and removals: only what is ours is touched, and only when nobody is at it.

[Note: removing] A checkpoint that goes is renamed to `step-N.gone` first, which is none any more; its files go, its
manifest last, so that until then whoever comes later knows it for ours. Files that somebody else has put there stay,
under the name that the folder had. An unfinished one is emptied likewise, its marker last. What a crash leaves of
either after that is an empty folder, which goes too: nothing of anybody is in it.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

import psutil

from hightide.checkpoint.files import filesystem
from hightide.checkpoint.files.manifest import MARKER, NAME, Manifest, folders_of, read_manifest
from hightide.checkpoint.files.names import GONE, OLD, TMP, parse_name, whole_name
from hightide.ir.foreign import shown

_MARKER_BYTES = 64 * 1024  # who writes, and on a line each the folders below
_TRIES = 3
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)


# -- looking ---------------------------------------------------------------------------------------------------------


def exists(name: str, folder: int) -> bool:
    return _mode(name, folder) is not None


def checkpoint_in(name: str, parent: int, path: Path) -> Manifest:
    """The manifest of a folder that is a checkpoint of ours by it; else a ValueError."""
    try:
        folder = filesystem.open_below(name, parent)
    except OSError as error:
        raise ValueError(f"{shown(path / name)} is no folder, or a link: {error.strerror}") from error
    try:
        manifest = read_manifest(folder, path / name)
    finally:
        filesystem.close(folder)
    parsed = parse_name(name)
    if parsed is None or parsed[0] != manifest.step:
        raise ValueError(f"{shown(path / name)} has the manifest of step {manifest.step}")
    return manifest


def check_replaceable(parent: int, path: Path) -> None:
    """A step that is saved again takes the place of a checkpoint, and of nothing else."""
    if exists(path.name, parent):
        try:
            checkpoint_in(path.name, parent, path.parent)
        except ValueError as error:
            raise ValueError(
                f"{shown(path)} is there and is no checkpoint of hightide that could be replaced ({error}); move it "
                "away, or name another folder"
            ) from error


def _mode(name: str, folder: int) -> int | None:
    try:
        return filesystem.status(name, folder).st_mode
    except (FileNotFoundError, NotADirectoryError):  # the latter: a link in the place of the folder it was in
        return None


# -- the marker ------------------------------------------------------------------------------------------------------


def claim(name: str, parent: int, path: Path) -> tuple[int, int]:
    """Makes the folder of an unfinished checkpoint, or takes an empty one, and marks it as ours. Returns both, open."""
    for left in reversed(range(_TRIES)):
        folder = marker = -1
        try:
            with suppress(FileExistsError):
                filesystem.make_folder(name, parent)
            folder = filesystem.open_below(name, parent)
            if any(entry != MARKER for entry in os.listdir(folder)):
                raise ValueError(_in_the_way(name, path))
            marker = filesystem.create(MARKER, folder)
            is_locked = filesystem.lock(marker)
            if is_locked is None:
                filesystem.write_all(marker, memoryview(_this_process().encode()), 0)
            if is_locked is not False and os.fstat(marker).st_nlink:  # else somebody took it for left over
                return folder, marker
        except FileNotFoundError:
            if not left:  # else somebody took the empty folder for left over
                _close(folder, marker)
                raise
        except (FileExistsError, NotADirectoryError) as error:
            _close(folder, marker)
            raise ValueError(_in_the_way(name, path)) from error
        except BaseException:
            _close(folder, marker)
            raise
        _close(folder, marker)
    raise ValueError(_in_the_way(name, path))


def _in_the_way(name: str, path: Path) -> str:
    return (
        f"{shown(path.parent / name)} is there: another process writes it, or it is not of hightide; wait for it, "
        "move the folder away, or name another one to save in"
    )


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            filesystem.close(descriptor)


def _writer_is_gone(marker: int) -> bool:
    """Where nothing can be locked, the marker says who writes; of processes of other machines nothing is known."""
    is_locked = filesystem.lock(marker)
    if is_locked is not None:
        return is_locked
    owner, *_ = os.pread(marker, _MARKER_BYTES, 0).decode(errors="replace").split("\n")
    host, _, number = owner.partition(" ")
    if host != _this_process().partition(" ")[0] or not number.isdecimal():
        return False
    return not psutil.pid_exists(int(number))


def note_folder(marker: int, name: str) -> None:
    """That it is ours, before it is made."""
    filesystem.write_all(marker, memoryview(f"\n{name}".encode()), os.fstat(marker).st_size)
    filesystem.sync(marker)


def _noted(folder: int) -> set[str]:
    try:
        marker = filesystem.open_existing(MARKER, folder)
    except OSError:
        return set()
    try:
        return set(os.pread(marker, _MARKER_BYTES, 0).decode(errors="replace").split("\n")[1:])
    finally:
        filesystem.close(marker)


def _this_process() -> str:
    return f"{ascii(socket.gethostname())[1:-1].replace(' ', '_')} {os.getpid()}"


# -- removing --------------------------------------------------------------------------------------------------------


def clear(parent: int, path: Path) -> None:
    """Before a save: unfinished checkpoints of processes that are gone, removals and exchanges that were cut off.
    What cannot be removed stays."""
    for name in sorted(os.listdir(parent), key=lambda name: not name.endswith(TMP)):  # others may wait for these
        _, kind = parse_name(name) or (0, "")
        with suppress(OSError, ValueError):
            if kind in (TMP, GONE) and _is_empty(name, parent):
                filesystem.remove_folder(name, parent)
            elif kind == TMP:
                _clear_unfinished(name, parent)
            elif kind == GONE:
                remove_checkpoint(name, parent, path)
            elif kind == OLD:
                _clear_old(name, parent, path)


def _is_empty(name: str, parent: int) -> bool:
    return not _listed(name, parent)


def _listed(name: str, parent: int) -> list[str]:
    folder = filesystem.open_below(name, parent)
    try:
        return os.listdir(folder)
    finally:
        filesystem.close(folder)


def _clear_unfinished(name: str, parent: int) -> None:
    folder = marker = -1
    try:
        folder = filesystem.open_below(name, parent)
        marker = filesystem.open_existing(MARKER, folder)
        if stat.S_ISREG(os.fstat(marker).st_mode) and _writer_is_gone(marker):
            remove_unfinished(name, folder, parent)
    finally:
        _close(folder, marker)


def remove_unfinished(name: str, folder: int, parent: int) -> None:
    """See [Note: removing]. Nothing of it, if there is anything that no save makes: a link, a folder of others."""
    names, noted = os.listdir(folder), _noted(folder)
    below = [entry for entry in names if entry in noted and stat.S_ISDIR(_mode(entry, folder) or 0)]
    files = [entry for entry in names if entry not in below]
    for entry in below:
        files += [f"{entry}/{one}" for one in _listed(entry, folder)]
    if not all(stat.S_ISREG(_mode(entry, folder) or 0) for entry in files):
        return
    for entry in files:
        if entry != MARKER:
            filesystem.unlink(entry, folder)
    for entry in below:
        filesystem.remove_folder(entry, folder)
    filesystem.sync(folder)
    if MARKER in names:
        filesystem.unlink(MARKER, folder)
    filesystem.remove_folder(name, parent)


def _clear_old(name: str, parent: int, path: Path) -> None:
    """One of a step that was being replaced; see [Note: a checkpoint]. While its writer lives, that one goes on."""
    whole = whole_name(name)
    if exists(whole + TMP, parent):
        return
    checkpoint_in(name, parent, path)
    if exists(whole, parent):
        checkpoint_in(whole, parent, path)
        remove_checkpoint(name, parent, path)
    else:
        filesystem.rename(name, whole, parent)
        filesystem.sync(parent)


def remove_checkpoint(name: str, parent: int, path: Path) -> None:
    """See [Note: removing]. ValueError for what is none."""
    manifest = checkpoint_in(name, parent, path)
    gone = whole_name(name) + GONE
    if name != gone:
        filesystem.rename(name, gone, parent)
        filesystem.sync(parent)
    folder = filesystem.open_below(gone, parent)
    try:
        for entry in (*(file.name for file in manifest.files), MARKER):
            if stat.S_ISREG(_mode(entry, folder) or 0):
                with suppress(FileNotFoundError):  # another save may clear it at the same time
                    filesystem.unlink(entry, folder)
        for below in folders_of(file.name for file in manifest.files):
            with suppress(OSError):  # files of somebody else stay, and with them all that is above
                filesystem.remove_folder(below, folder)
        filesystem.sync(folder)
        with suppress(FileNotFoundError):
            filesystem.unlink(NAME, folder)
    finally:
        filesystem.close(folder)
    try:
        with suppress(FileNotFoundError):
            filesystem.remove_folder(gone, parent)
    except OSError as error:
        if error.errno not in _NOT_EMPTY:
            raise
        before = whole_name(name) if name == gone else name
        if not exists(before, parent):
            filesystem.rename(gone, before, parent)
