"""Where the output of a command goes. Files that it is told to write are refused before the work where they cannot be,
and give one message where it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]


def check_target(option: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {folder}; make it first")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror or error}") from error
