"""Terminals, pipes and files as they are found: what cannot be shown is shown otherwise, never refused."""

from __future__ import annotations

import codecs
import io
import os
import sys
from contextlib import suppress

_PLAIN = {"→": "->", "←": "<-", "×": "x", "µ": "u", "…": "...", "–": "-", "—": "-", "•": "*", "·": "*"}
_WIDEST = 1000  # columns
_ERRORS = "hightide.plain"


def make_usable() -> None:
    """Once, before anything else opens a file: what is opened takes the first number that is free, and what C libraries
    print would land in it where standard output is closed."""
    for number, mode in enumerate(("r", "w", "w")):
        with suppress(OSError):
            _fill(number, mode)
    codecs.register_error(_ERRORS, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)
    width = os.environ.get("COLUMNS", "")
    if width and not (width.isascii() and width.isdigit() and 0 < int(width[:9]) <= _WIDEST):
        del os.environ["COLUMNS"]  # a rule as wide as that would not fit the memory


def check_working_folder() -> None:
    """Where it was deleted, torch ends the process as soon as it multiplies matrices, which importing it may do."""
    try:
        os.getcwd()
    except OSError as error:
        print(f"error: the working folder is gone ({error.strerror}); change to one that exists", file=sys.stderr)
        raise SystemExit(2) from None


def _fill(number: int, mode: str) -> None:
    name = ("stdin", "stdout", "stderr")[number]
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number: those below are in use by now
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
    if getattr(sys, name) is None:
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    shown = "".join(_PLAIN.get(character, "?") for character in text)
    return shown.encode(error.encoding, "replace").decode(error.encoding), error.end
