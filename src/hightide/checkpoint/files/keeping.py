"""Which checkpoints stay: the last few, and every so many steps one. The others are removed, and nothing else is."""

from __future__ import annotations

from pathlib import Path

from hightide.checkpoint.files import filesystem, leftovers
from hightide.checkpoint.files.folder import Found, found, newest_whole
from hightide.checkpoint.files.names import parse_name, step_of
from hightide.ir.foreign import quoted


def check_keeping(keep: int | None, keep_every: int | None) -> None:
    for name, value in (("keep", keep), ("keep_every", keep_every)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={quoted(value)}; it must be an integer from 1 on, or None")
    if keep is None and keep_every is not None:
        raise ValueError(f"keep_every={keep_every} says what stays besides the last ones; say how many: keep=")


def superfluous(there: list[Found], keep: int, keep_every: int | None, written_step: int) -> list[Found]:
    """Those to be removed. The last `keep` whole ones stay, every `keep_every`-th step, the one just written, and what
    has no manifest of ours. One that is not whole goes when as many whole ones are newer."""
    whole = [one for one in there if one.is_whole]
    if len(whole) <= keep:
        return []
    oldest = whole[-keep]
    return [
        one
        for one in there[: there.index(oldest)]
        if one.manifest is not None
        and parse_name(one.path.name) == (one.step, "")
        and one.step != written_step
        and not (keep_every and one.step % keep_every == 0)
    ]


def later(folder: Path, written_step: int) -> Path | None:
    """A whole checkpoint that a load takes before the one just written: of another run, or of one that went back."""
    newest, _ = newest_whole(folder)
    return newest if newest is not None and step_of(newest) > written_step else None


def keep_only(folder: str | Path, keep: int | None, keep_every: int | None, written_step: int) -> list[Path]:
    """After a save. Returns what was removed; ValueError for what could not be. One that is being read goes after a
    later save."""
    check_keeping(keep, keep_every)
    if keep is None:
        return []
    folder, removed = Path(folder), []
    parent = filesystem.open_folder(folder)
    try:
        for one in superfluous(found(folder), keep, keep_every, written_step):
            if _remove(one.path.name, parent, folder):
                removed.append(one.path)
    except OSError as error:
        raise ValueError(f"an old checkpoint cannot be removed: {error}") from error
    finally:
        filesystem.close(parent)
    return removed


def _remove(name: str, parent: int, folder: Path) -> bool:
    """False: somebody reads it, or another process has removed it meanwhile."""
    try:
        there = filesystem.open_below(name, parent)
    except FileNotFoundError:
        return False
    try:
        if filesystem.lock(there) is False or not leftovers.exists(name, parent):
            return False
        leftovers.remove_checkpoint(name, parent, folder)
        return True
    finally:
        filesystem.close(there)
