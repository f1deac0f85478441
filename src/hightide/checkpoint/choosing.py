"""Which checkpoint of a folder is meant: the newest whole one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from hightide.checkpoint.files.folder import Found, found, newest_whole, refusal
from hightide.checkpoint.files.manifest import NAME
from hightide.checkpoint.files.names import parse_name
from hightide.checkpoint.training import TRAINING
from hightide.ir.foreign import shown, user_path

TRAINER_STATE = "trainer_state.json"  # of transformers, which need not be there


def latest(folder: str | os.PathLike[str], verify: bool = False) -> Path | None:
    """The newest whole checkpoint in a folder, by number; None where there is none. `verify` reads all of it, and
    passes over one whose sums are not those of its manifest. Those that are passed over are told."""
    newest, damaged = newest_whole(user_path(folder), verify)
    _tell(damaged, newest, stacklevel=3)
    return newest


def chosen(path: Path) -> Path:
    """A checkpoint, or the newest whole one of a folder of them."""
    if (path / NAME).exists():
        return path
    newest, damaged = newest_whole(path)
    if newest is not None:
        _tell(damaged, newest, stacklevel=4)
        return newest
    if ours := next((one for one in damaged if not _is_plain(one.path)), None):
        raise refusal(ours.path, shown(ours.problem))
    if path.is_dir() and parse_name(path.name) is not None:
        raise refusal(path, f"it has no {NAME}")
    raise ValueError(f"there is no whole checkpoint in {shown(path)}; name {_a_folder_with_some(path)}")


def _tell(damaged: Sequence[Found], newest: Path | None, stacklevel: int) -> None:
    """With each of them steps are lost."""
    instead = "there is no whole checkpoint beside it" if newest is None else f"{shown(newest)} is taken instead"
    for one in damaged:
        problem = "is of the plain Trainer" if _is_plain(one.path) else f"is damaged: {shown(one.problem)}"
        warnings.warn(f"{shown(one.path)} {problem}; {instead}", stacklevel=stacklevel)


def _is_plain(path: Path) -> bool:
    """Of transformers' Trainer, whose folders have the same names."""
    names = NAME, TRAINING
    return (path / TRAINER_STATE).is_file() and not any((path / name).is_file() for name in names)


def _a_folder_with_some(path: Path) -> str:
    """`hightide train` has them in a folder of the run's."""
    below = sorted(path.iterdir()) if path.is_dir() else []
    near = next((one for one in below if one.is_dir() and any(it.is_whole for it in found(one))), None)
    return "a folder in which hightide.save has saved" if near is None else f"the folder that has some, {shown(near)}"
