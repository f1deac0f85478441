"""Files of training data as rows, one after the other: nothing is held but the row that is read.

Text files are one document each, in pieces that end with a line, so that a large one need not be in memory. JSON lines,
JSON and CSV are read by the standard library; Parquet and folders of `datasets` by that library. What cannot be read is
a ValueError with the file and the line, or the row."""

from __future__ import annotations

import csv
import io
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hightide.ir.foreign import open_regular, quoted, shown

TEXT_FILES = (".txt", ".py", ".md")
KNOWN = (".txt", ".jsonl", ".json", ".csv", ".parquet")
ROW_FILES = (".jsonl", ".ndjson", ".csv", ".parquet")  # of a folder not read, which is told
SAVED_BY_DATASETS = ("state.json", "dataset_dict.json")
COMPRESSED = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
GZIP_BEGINS = b"\x1f\x8b"
LFS_BEGINS, LFS_BYTES = b"version https://git-lfs.github.com/", 1024  # a pointer is shorter
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}  # of a folder of text files
ABOUT_DATA = ("readme", "license", "licence", "notice", "citation", "changelog")  # text files, by their names
CONVERT = "convert the file: iconv -f ITS-ENCODING -t UTF-8"
PIECE_BYTES = 1 << 20  # of a text file, about
CHARACTER_BYTES = 4  # of UTF-8, at most
MAX_ROW_BYTES = 1 << 28  # of a line
ROWS_AT_ONCE = 1000
NEVER_FILL = ("role", "content")  # each message has them: what is missing there is told
MESSAGE_DEPTH = 2  # of mappings: in a list, in a column

Progress = Callable[[float], None]  # the share that is read


@dataclass(frozen=True)
class Row:
    where: str  # for messages: the file and the line
    fields: Mapping[str, Any]
    goes_on: bool = False  # the next row is more of this document


def read_rows(path: Path, progress: Progress, most_bytes: int | None = None) -> Iterator[Row]:
    """`most_bytes`: of text files, at most so much is read."""
    if path.is_dir():
        if any((path / name).is_file() for name in SAVED_BY_DATASETS):
            return _saved_by_datasets(path, progress)
        return _text_files(_texts_in(path), progress, most_bytes)
    if not path.exists():
        raise ValueError(f"there is no data at {shown(path)}; name a file ({', '.join(KNOWN)}) or a folder")
    kind = path.suffix.lower()
    if kind in (".jsonl", ".ndjson"):
        return _json_lines(path, progress)
    if kind == ".json":
        return _json(path, progress)
    if kind == ".csv":
        return _csv(path, progress)
    if kind == ".parquet":
        return _parquet(path, progress)
    if kind in TEXT_FILES:
        return _text_files([path], progress, most_bytes)
    if kind in COMPRESSED:
        raise ValueError(f"{shown(path)} is compressed: {COMPRESSED[kind]} it first")
    raise ValueError(
        f"{shown(path)} is of no known format; data are {', '.join(KNOWN)} files or a folder that "
        "datasets.Dataset.save_to_disk wrote: rename or convert it"
    )


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    with open_regular(path, "data file") as raw, open(raw.fileno(), "rb", closefd=False) as file:
        begins = file.peek(LFS_BYTES)
        if begins.startswith(GZIP_BEGINS):
            raise ValueError(f"{shown(path)} is compressed: gunzip it first, it lacks the ending .gz")
        is_short = os.fstat(file.fileno()).st_size < LFS_BYTES
        if is_short and begins.startswith(LFS_BEGINS) and b"\noid " in begins:  # as text it would be learned
            raise ValueError(f"{shown(path)} is a pointer of Git LFS, without the file itself; get it: git lfs pull")
        yield file


# -- text ------------------------------------------------------------------------------------------------------------


def _texts_in(folder: Path) -> list[Path]:
    """Sorted, so that a seed means the same run everywhere."""
    found = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in (*TEXT_FILES, *ROW_FILES, ".json")
        and path.is_file()
        and not any(part in SKIPPED or part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    files = [path for path in found if path.suffix.lower() in TEXT_FILES]
    others = [path for path in found if path.suffix.lower() in ROW_FILES]
    tables = others or [path for path in found if path not in files]  # .json may hold settings as well
    are_about = all(path.stem.lower().startswith(ABOUT_DATA) for path in files)
    if not files or (tables and are_about):
        but = f" but {shown(files[0].name)}" if files else ""
        such = f", such as {shown(tables[0])}" if tables else ""
        raise ValueError(
            f"{shown(folder)} has no text files ({', '.join(TEXT_FILES)}){but} and was not written by "
            f"datasets.Dataset.save_to_disk; name the file with the data itself{such}"
        )
    if others:
        warnings.warn(
            f"of the folder {shown(folder)} only text files ({', '.join(TEXT_FILES)}) are read, and not "
            f"{shown(others[0].relative_to(folder))}{', ...' if len(others) > 1 else ''}: name such a file itself",
            stacklevel=3,
        )
    return files


def _text_files(files: list[Path], progress: Progress, most_bytes: int | None) -> Iterator[Row]:
    total = max(1, sum(file.stat().st_size for file in files))
    total = total if most_bytes is None else min(total, most_bytes)
    num_read = 0
    for path in files:
        if most_bytes is not None and num_read >= most_bytes:
            return
        for piece, size, is_last in _pieces(path, None if most_bytes is None else most_bytes - num_read):
            num_read += size
            progress(min(1.0, num_read / total))
            if piece or is_last:
                yield Row(shown(path), {"text": piece}, goes_on=not is_last)


def _pieces(path: Path, most_bytes: int | None) -> Iterator[tuple[str, int, bool]]:
    """Whole lines of about PIECE_BYTES, the bytes that they are, and whether the file ends there."""
    with _opened(path) as file:
        left, line = most_bytes, 1
        piece = _some_lines(file, left)
        while True:
            left = None if left is None else left - len(piece)
            later = _some_lines(file, left) if left is None or left > 0 else b""
            text = _decoded(piece, path, line, is_cut=left == 0)
            line += piece.count(b"\n")
            yield text, len(piece), not later
            if not later:
                return
            piece = later


def _some_lines(file: io.BufferedReader, most_bytes: int | None) -> bytes:
    size = PIECE_BYTES if most_bytes is None else min(PIECE_BYTES, most_bytes)
    piece = file.read(size)
    if len(piece) == PIECE_BYTES:
        rest = PIECE_BYTES if most_bytes is None else min(PIECE_BYTES, most_bytes - len(piece))
        piece += file.readline(rest)
        for _ in range(CHARACTER_BYTES - 1):  # of a line without end, which was cut in the middle of a character
            if len(piece) == most_bytes or not _is_inside_character(file.peek(1)[:1]):
                break
            piece += file.read(1)
    return piece


def _is_inside_character(byte: bytes) -> bool:
    return bool(byte) and byte[0] & 0xC0 == 0x80


def _decoded(data: bytes, path: Path, line: int, is_cut: bool = False) -> str:
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        if is_cut and error.end >= len(data) - 3:  # a limit in the middle of a character
            return data[: error.start].decode()
        line += data.count(b"\n", 0, error.start)
        raise ValueError(f"{shown(path)}, line {line}: it is not UTF-8 text ({error.reason}); {CONVERT}") from error


# -- rows ------------------------------------------------------------------------------------------------------------


def _json_lines(path: Path, progress: Progress) -> Iterator[Row]:
    with _opened(path) as file:
        total, num_read, number = max(1, os.fstat(file.fileno()).st_size), 0, 0
        while line := file.readline(MAX_ROW_BYTES):
            number += 1
            num_read += len(line)
            progress(num_read / total)
            text = _decoded(line, path, number)
            if text.strip():
                yield _row(_parsed(text, f"{shown(path)}, line {number}"), f"{shown(path)}, line {number}")


def _parsed(text: str, where: str) -> Any:
    try:
        # Behind the end of a line characters would be counted anew.
        return json.loads(text.rstrip(), object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: it is not JSON ({error.msg.removesuffix(' at')} at character {error.colno}); correct it"
        ) from error
    except _Twice as error:
        raise ValueError(f"{where}: {error}") from None
    except RecursionError:
        raise ValueError(f"{where}: it is nested too deeply; correct it") from None
    except ValueError:  # of int
        raise ValueError(f"{where}: it has a number of thousands of digits; correct it") from None


class _Twice(Exception):
    """A name that a mapping has twice: JSON would keep the last value, and the others would be lost."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = _first_twice(name for name, _ in pairs)
        raise _Twice(f"it names {quoted(name)} twice in one mapping; leave one of them out, or rename it")
    return found


def _first_twice(names: Iterable[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _row(data: object, where: str) -> Row:
    if not isinstance(data, dict):
        hint = "; a list of rows belongs into a .json file" if isinstance(data, list) else ""
        raise ValueError(f'{where}: a row is a mapping, such as {{"text": "..."}}, not {quoted(data)}{hint}')
    return Row(where, data)


def _json(path: Path, progress: Progress) -> Iterator[Row]:
    """A list of rows; or rows one per line, which is often called .json too."""
    with _opened(path) as file:
        start = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] == b"{":
        if start[1:].lstrip(b" \t")[:1] in (b"\r", b"\n"):
            raise ValueError(
                f"{shown(path)} holds one mapping over several lines; it must be a list of rows, or one row per line"
            )
        yield from _json_lines(path, progress)
        return
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        try:
            rows = json.load(text, object_pairs_hook=_each_once)
        except _Twice as error:
            raise ValueError(f"{shown(path)}: {error}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{shown(path)}, line {error.lineno}: it is not JSON ({error.msg}); correct it") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{shown(path)} is not UTF-8 text ({error.reason}); {CONVERT}") from error
        except RecursionError:
            raise ValueError(f"{shown(path)} is nested too deeply; it holds no rows") from None
        except ValueError:  # of int
            raise ValueError(f"{shown(path)} has a number of thousands of digits; correct it") from None
    if not isinstance(rows, list):
        raise ValueError(f"{shown(path)} holds {quoted(rows)}; it must be a list of rows, or one row per line")
    for number, data in enumerate(rows, 1):
        progress(number / len(rows))
        yield _row(data, f"{shown(path)}, row {number}")


def _csv(path: Path, progress: Progress) -> Iterator[Row]:
    csv.field_size_limit(MAX_ROW_BYTES)
    total = max(1, path.stat().st_size)
    with _opened(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        begins = 2  # lines: the first has the names
        try:
            if twice := _first_twice(reader.fieldnames or ()):
                raise ValueError(f"{shown(path)}, line 1: it names {quoted(twice)} twice; rename one of the columns")
            if len(names := reader.fieldnames or ()) == 1 and (other := set(";\t").intersection(names[0])):
                raise ValueError(
                    f"{shown(path)}, line 1: columns seem to be separated by {quoted(other.pop())}; write commas there"
                )
            for values in reader:
                where = f"{shown(path)}, line {begins}"
                begins = reader.line_num + 1
                if None in values or None in values.values():
                    given = sum(value is not None for value in values.values())
                    raise ValueError(
                        f"{where}: it has {given} values, and the first line names {len(reader.fieldnames or ())} "
                        "columns; put quotes around values with commas"
                    )
                progress(min(1.0, raw.tell() / total))
                yield Row(where, values)
        except csv.Error as error:
            raise ValueError(f"{shown(path)}, line {begins}: it is not CSV ({error}); correct it") from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{shown(path)}, line {begins}: it is not UTF-8 text ({error.reason}); {CONVERT}"
            ) from error


# -- what needs `datasets` -------------------------------------------------------------------------------------------

MISSING = "needs `datasets`: pip install datasets, or convert the data to .jsonl"


def _parquet(path: Path, progress: Progress) -> Iterator[Row]:
    try:
        from pyarrow import ArrowInvalid, parquet  # of `datasets`
    except ImportError as error:
        raise ValueError(f"{shown(path)} {MISSING}") from error
    with _opened(path):  # whatever else it may be
        pass
    try:
        file = parquet.ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{shown(path)} is no Parquet file: {shown(error)}; get it again") from error
    with file:
        if twice := _first_twice(file.schema_arrow.names):
            raise ValueError(f"{shown(path)} names the column {quoted(twice)} twice; rename one of the two")
        total, number = max(1, file.metadata.num_rows), 0
        batches = file.iter_batches(batch_size=ROWS_AT_ONCE)
        while True:
            try:
                rows = next(batches, None)
                values = [] if rows is None else rows.to_pylist()
            except (ArrowInvalid, OSError) as error:
                raise ValueError(
                    f"{shown(path)} is damaged behind row {number}: {shown(_first_line(error))}; get it again"
                ) from error
            except OverflowError as error:  # of dates, in whatever column
                raise ValueError(
                    f"{shown(path)} has a value behind row {number} that Python cannot hold: "
                    f"{shown(_first_line(error))}; correct it, or leave its column out"
                ) from error
            if rows is None:
                return
            for row in values:
                number += 1
                yield Row(f"{shown(path)}, row {number}", _without_fill(row))
            progress(number / total)


def _saved_by_datasets(folder: Path, progress: Progress) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"the folder {shown(folder)} {MISSING}") from error
    try:
        data = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise ValueError(f"datasets cannot read {shown(folder)}: {shown(error)}; save it again") from error
    if isinstance(data, datasets.DatasetDict):
        names = ", ".join(data)
        first = next(iter(data), "train")
        raise ValueError(f"{shown(folder)} has several parts ({names}); name one of them: {shown(folder / first)}")
    data = data.with_format(None)  # one of tensors, or of some columns, may have been saved with it
    for start in range(0, len(data), ROWS_AT_ONCE):
        columns = data[start : start + ROWS_AT_ONCE]
        for index in range(len(next(iter(columns.values()), []))):
            values = {name: column[index] for name, column in columns.items()}
            yield Row(f"{shown(folder)}, row {start + index + 1}", _without_fill(values))
        progress(min(1.0, (start + ROWS_AT_ONCE) / len(data)))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _without_fill(row: dict[str, Any]) -> dict[str, Any]:
    """Tables have one set of keys for all mappings of a column: each mapping has the keys of all others too, without
    values. They are not of the data, and templates would write them."""
    return {name: _as_given(value, 1) for name, value in row.items()}


def _as_given(value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        kept = NEVER_FILL if depth == MESSAGE_DEPTH else ()  # deeper, an argument may be called so
        return {name: _as_given(one, depth + 1) for name, one in value.items() if one is not None or name in kept}
    return [_as_given(one, depth + 1) for one in value] if isinstance(value, list) else value
