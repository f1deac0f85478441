"""A folder of checkpoints: which are whole, which is the newest, what is damaged and where."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hightide.checkpoint.files import filesystem
from hightide.checkpoint.files.checked import CheckedFile
from hightide.checkpoint.files.leftovers import checkpoint_in, exists
from hightide.checkpoint.files.manifest import Manifest, read_manifest
from hightide.checkpoint.files.names import GONE, OLD, TMP, parse_name
from hightide.ir.foreign import shown

LOOKS = 5
_UNFINISHED = {TMP: "a save that is under way, or was cut off", GONE: "a removal that is under way, or was cut off"}


@dataclass(frozen=True)
class Found:
    """A folder that is a checkpoint by its name."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None  # why it is not whole; None: as far as names and sizes tell it is

    @property
    def is_whole(self) -> bool:
        return self.problem is None


class DamagedCheckpoint(ValueError):
    """What is wrong with one, and which one is whole."""


class GoneCheckpoint(ValueError):
    """It is not there any more; see `held`."""


def found(folder: str | Path) -> list[Found]:
    """By step, the oldest first. Sums are not looked at (`verify` does), and links are not followed."""
    folder = Path(folder)
    try:
        parent = filesystem.open_folder(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{shown(folder)} cannot be looked into: {error.strerror}; name a folder") from error
    try:
        there = _looked_at(folder, parent)
        for _ in range(LOOKS - 1):  # a save of another process may rename some meanwhile
            if all(one.is_whole or exists(one.path.name, parent) for one in there):
                break
            there = _looked_at(folder, parent)
        return there
    finally:
        filesystem.close(parent)


def _looked_at(folder: Path, parent: int) -> list[Found]:
    named = [(parsed, name) for name in os.listdir(parent) if (parsed := parse_name(name)) is not None]
    # Of one step, one that was being replaced is the older one.
    named.sort(key=lambda one: (one[0][0], one[0][1] == ""))
    return [_look_at(folder, parent, name, step, kind) for (step, kind), name in named]


def newest_whole(folder: str | Path, verify: bool = False) -> tuple[Path | None, list[Found]]:
    """By number, and those that are newer and damaged, the newest first. A save that was cut off never was one."""
    damaged: list[Found] = []
    for one in reversed(found(folder)):
        if one.path.suffix in _UNFINISHED:
            continue
        wrong = damages(one.path) if one.is_whole and verify else []
        if one.is_whole and not wrong:
            return one.path, damaged
        damaged.append(replace(one, problem=wrong[0]) if wrong else one)
    return None, damaged


def damages(path: str | Path, read: Callable[[int], object] | None = None) -> list[str]:
    """All that is wrong with a checkpoint, read from front to back; each names its file, and the piece. `read` is told
    how many bytes were read, each time."""
    path = Path(path)
    try:
        manifest = manifest_of(path)
    except ValueError as error:
        return [str(error)]
    wrong: list[str] = []
    for file in manifest.files:
        try:
            with CheckedFile(path, manifest, file.name) as opened:
                for num_bytes, problem in opened.looked_through():
                    wrong += [problem] if problem else []
                    if read is not None:
                        read(num_bytes)
        except ValueError as error:
            wrong.append(f"{file.name}: {error}")
    return wrong


def verify(path: str | Path) -> Manifest:
    """Reads all of a checkpoint. ValueError for one that is damaged: where, and which one is whole."""
    wrong = damages(path)
    if wrong:
        raise refusal(path, wrong[0], len(wrong) - 1)
    return manifest_of(Path(path))


def refusal(path: str | Path, problem: str, num_more: int = 0) -> DamagedCheckpoint:
    """Of a checkpoint that is damaged: what is wrong, and the newest one that is whole, which is read for that."""
    path = Path(path)
    more = f" (and {num_more} more)" if num_more else ""
    whole, _ = newest_whole(path.absolute().parent, verify=True)
    offer = f"the newest whole checkpoint is {shown(whole)}" if whole else "there is no whole checkpoint beside it"
    return DamagedCheckpoint(f"{shown(path)} is damaged: {problem}{more}; {offer}")


def whole_manifest_of(path: Path) -> Manifest:
    """Of a checkpoint that is about to be used: for one that is damaged, which one is whole is told."""
    try:
        return manifest_of(path)
    except ValueError as error:
        raise refusal(path, str(error)) from error


def manifest_of(path: Path) -> Manifest:
    """Of a checkpoint that the user names: its own path may be a link."""
    try:
        folder = filesystem.open_folder(path)
    except OSError as error:
        raise ValueError(f"{shown(path)} is no checkpoint: {error.strerror}; name a folder of one") from error
    try:
        manifest = read_manifest(folder, path)
        problem = _missing(folder, manifest)
    finally:
        filesystem.close(folder)
    if problem is not None:
        raise ValueError(problem)
    return manifest


@contextmanager
def held(path: Path) -> Iterator[None]:
    """While a checkpoint is read, no save removes it to keep fewer, where folders can be locked. GoneCheckpoint if it
    went all the same, or another save took its place: then nothing is wrong with it."""
    try:
        folder = filesystem.open_folder(path)
    except FileNotFoundError:
        raise _gone(path) from None
    except OSError as error:
        raise ValueError(f"{shown(path)} is no checkpoint: {error.strerror}; name a folder of one") from error
    try:
        if filesystem.lock(folder, shared=True) is False or not _is_there(path, folder):
            raise _gone(path)
        try:
            yield
        except (ValueError, OSError) as error:
            if _is_there(path, folder):
                raise
            raise _gone(path) from error
    finally:
        filesystem.close(folder)


def _gone(path: Path) -> GoneCheckpoint:
    return GoneCheckpoint(
        f"{shown(path)} was removed, or replaced by another save, while it was read: load again, and let more "
        "checkpoints stay (keep=) if that happens often"
    )


def _is_there(path: Path, folder: int) -> bool:
    """It is still the folder that is open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(folder))
    except FileNotFoundError:
        return False


def _look_at(folder: Path, parent: int, name: str, step: int, kind: str) -> Found:
    path, manifest = folder / name, None
    if kind not in ("", OLD):
        return Found(path, step, None, _UNFINISHED[kind])
    try:
        manifest = checkpoint_in(name, parent, folder)
        descriptor = filesystem.open_below(name, parent)
        try:
            problem = _missing(descriptor, manifest)
        finally:
            filesystem.close(descriptor)
    except (ValueError, OSError) as error:
        problem = str(error)
    return Found(path, step, manifest, problem)


def _missing(folder: int, manifest: Manifest) -> str | None:
    """What is not there as the manifest has it, by size."""
    for file in manifest.files:
        try:
            status = filesystem.status(file.name, folder)
        except OSError as error:
            return f"{file.name} is missing ({error.strerror})"
        if not stat.S_ISREG(status.st_mode):
            return f"{file.name} is no regular file, and links are not followed there"
        if status.st_size != file.num_bytes:
            return f"{file.name} has {status.st_size} bytes, it must have {file.num_bytes}"
    return None
