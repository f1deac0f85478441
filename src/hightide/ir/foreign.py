"""Files of strangers: how they are read whole, and how messages quote them.

Every such file is read here: a regular one of bounded size, UTF-8, nested no deeper than any file that is meant, each
key once. Whatever else it is, is a ValueError that names it.
"""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
import unicodedata
from pathlib import Path
from typing import Any, BinaryIO

MAX_FILE_BYTES = 64 * 1024**2  # of a plan, a machine, settings, a config or an index: real ones have a few megabytes
MAX_DEPTH = 64  # of lists and mappings in each other
MAX_DIGITS = 40  # of an integer
MAX_COUNT = 2**63 - 1
QUOTED = 200  # characters of foreign text in a message
KEPT = 2000  # of another library's message


# -- text in messages ------------------------------------------------------------------------------------------------


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = QUOTED
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 4

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < 10**MAX_DIGITS else f"an integer of {x.bit_length()} bits"


def quoted(value: object) -> str:
    """As `repr`, for a message: short, whatever it is, and without characters that a terminal would obey."""
    return _cut(_Short().repr(value), QUOTED)


def shown(text: object, most: int = QUOTED) -> str:
    """Text of others as it is, but short and without characters that a terminal would obey. Lines stay lines."""
    return "".join(map(_visible, _cut(str(text), most)))


def kind_of(value: object) -> str:
    """In a sentence: "an int", "a Linear", "None"."""
    return "None" if value is None else with_article(type(value).__name__)


def with_article(name: str) -> str:
    """By how a name is said: an Embedding, an LSTM, a UNet, a Linear."""
    is_spelled = name[:2].isupper()
    return f"{'an' if name[:1].lower() in ('aefhilmnorsx' if is_spelled else 'aeio') else 'a'} {name}"


def has_controls(text: str) -> bool:
    """Characters that are for terminals, not for people, or that no file can hold; lines and tabs are text."""
    return not text.isprintable() and any(_visible(char) != char for char in text)


def _visible(char: str) -> str:
    if char.isprintable() or char in "\n\t" or unicodedata.category(char) == "Zs":
        return char
    return char.encode("unicode_escape").decode()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 40]} ... ({len(text)} characters)"


# -- files -----------------------------------------------------------------------------------------------------------


def user_path(value: object, name: str = "folder") -> Path:
    """That an argument names. "~" is the user's home, as a shell has it. ValueError for what is none."""
    if not isinstance(value, str | os.PathLike) or not isinstance(path := os.fspath(value), str) or not path:
        what = "empty" if value == "" else kind_of(value)
        hint = " (hightide.latest returns None where there is no whole checkpoint)" if value is None else ""
        raise ValueError(f"{name} is {what}{hint}; pass a path, such as 'checkpoints'")
    if "\0" in path:
        raise ValueError(f"{name}={quoted(path)} has a NUL in it, which no path may have")
    return Path(path).expanduser() if path.startswith("~") else Path(path)


def open_regular(path: str | Path, what: str, follow: bool = True, folder: int | None = None) -> BinaryIO:
    """For reading. A pipe would wait for whoever writes into it, a device might never end. `follow`: it may be a link.
    A relative path is one of `folder`, which is open."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags, dir_fd=folder)
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        reason = error.strerror if isinstance(error, OSError) else error
        if not follow and isinstance(error, OSError) and error.errno == errno.ELOOP:
            reason = "it is a link, and those are not followed there"
        remedy = "; name another file" if folder is None else ""  # else nobody has named this one
        raise ValueError(f"cannot read the {what} {shown(path)}: {reason}{remedy}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError(f"cannot read the {what} {shown(path)}: it is no regular file; name one that is")
    return os.fdopen(file, "rb", buffering=0)


def read_bytes(
    path: str | Path, what: str, most: int = MAX_FILE_BYTES, follow: bool = True, folder: int | None = None
) -> bytes:
    """The whole file. `what` it should be is said where it cannot be read. See `open_regular`."""
    with open_regular(path, what, follow, folder) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"the {what} {shown(path)} has {size} bytes; one may have {most}: it is no {what}")
        try:
            with os.fdopen(os.dup(file.fileno()), "rb") as buffered:
                return buffered.read(most)
        except OSError as error:
            raise ValueError(f"cannot read the {what} {shown(path)}: {error.strerror}") from error


def read_text(path: str | Path, what: str, most: int = MAX_FILE_BYTES) -> str:
    return decoded(read_bytes(path, what, most), f"the {what} {shown(path)}")


def decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 text: {error.reason} at byte {error.start}; write it anew, or get it again"
        ) from error


# -- JSON ------------------------------------------------------------------------------------------------------------


def read_json(path: str | Path, what: str) -> Any:
    """Plain data of a file."""
    return parse_json(read_text(path, what), shown(path))


def parse_json(text: str, source: str) -> Any:
    """Plain data: each key once, no integer of hundreds of digits, no text that cannot be written again."""
    try:
        data = json.loads(text, object_pairs_hook=_once, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not JSON: {error}; make it anew, or get it again") from error
    except RecursionError:
        raise ValueError(f"{source} is nested deeper than {MAX_DEPTH} levels; it is damaged, get it again") from None
    except ValueError as error:  # of the two functions above
        raise ValueError(f"{source}: {error}") from error
    check_plain(data, source)
    return data


def check_plain(data: object, source: str) -> None:
    """No deeper than any file that is meant; by levels, so that depth costs nothing here."""
    level, depth = [data], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"{source} is nested deeper than {MAX_DEPTH} levels; it is damaged, get it again")
        below: list[object] = []
        for entry in level:
            if isinstance(entry, dict):
                below += entry.keys()
                below += entry.values()
            elif isinstance(entry, list):
                below += entry
            elif isinstance(entry, str) and not entry.isprintable() and _is_broken(entry):
                raise ValueError(f"{source} has text that is no Unicode ({quoted(entry)}); get it again")
        level, depth = below, depth + 1


def _is_broken(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ValueError(f"the key {quoted(twice)} is given twice; leave one")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits; none needs more than {MAX_DIGITS}: write it anew")
    return int(digits)
