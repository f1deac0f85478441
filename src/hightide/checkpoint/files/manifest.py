"""The manifest of a checkpoint: which files it has, how long they are, and a checksum of each piece of them.

[Note: sums] A sum is the CRC-32 of 64 MiB (the last one of a file: of what is left). zlib has it in C, without Python's
lock, at some GB/s; any tool can check it; every change of up to 32 bits in a row shows, any other but for one in 2^32.
The manifest has one of its own, over its other entries, so that a changed figure in it is noticed too.

A manifest may be a stranger's: names are those of files in its own folder, or one below it, and nothing else; numbers
are bounded.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hightide.ir.codec import build
from hightide.ir.foreign import MAX_COUNT, MAX_FILE_BYTES, decoded, has_controls, parse_json, quoted, read_bytes, shown

NAME = "manifest.json"
MARKER = "hightide-save-in-progress"
SHOWN = "hightide-save-of-ranks"  # while several ranks write
WHAT = "checkpoint's manifest"
FORMAT, VERSION = "hightide checkpoint", 1
PIECE_BYTES = 64 * 1024**2
MAX_PIECE_BYTES = PIECE_BYTES  # a reader has one in memory
WRITTEN_S = "written_s"  # among the facts
MAX_NAME_CHARS = 255  # as file systems have it
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
_FOLDER_NAME = re.compile(r"\w[^/\0]*")  # whatever an adapter may be called
_KEYS = ("format", "version", "step", "time", "piece_bytes", "files", "facts", "crc32")


@dataclass(frozen=True)
class FileSums:
    name: str
    num_bytes: int
    crc32: tuple[int, ...]  # of each piece


@dataclass(frozen=True)
class Manifest:
    step: int
    time: float  # seconds since 1970, when it was written
    files: tuple[FileSums, ...]
    facts: Mapping[str, Any]  # whatever the save tells about itself: plain data
    piece_bytes: int = PIECE_BYTES

    @property
    def num_bytes(self) -> int:
        """Without the manifest itself."""
        return sum(file.num_bytes for file in self.files)

    @property
    def written_s(self) -> float | None:
        """In which it was written, if that is told; it may be a stranger's."""
        found = self.facts.get(WRITTEN_S)
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) and found > 0 else None

    def file(self, name: str) -> FileSums:
        for file in self.files:
            if file.name == name:
                return file
        raise ValueError(
            f"there is no {quoted(name)} in this checkpoint; it has {', '.join(f.name for f in self.files)}"
        )

    def to_bytes(self) -> bytes:
        entries = {"format": FORMAT, "version": VERSION, **asdict(self)}
        try:
            entries = parse_json(json.dumps(entries, allow_nan=False), "the manifest")  # as it will be read
        except (TypeError, ValueError) as error:
            raise ValueError(f"facts of a checkpoint must be plain data: {error}") from error
        text = json.dumps({**entries, "crc32": _own_sum(entries)}, indent=1).encode()
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(
                f"the manifest would have {len(text)} bytes, it may have {MAX_FILE_BYTES}: give fewer facts"
            )
        return text


def num_pieces(num_bytes: int, piece_bytes: int) -> int:
    return -(-num_bytes // piece_bytes)


def check_name(name: str) -> None:
    """Of a file of a checkpoint, whoever says so."""
    above, slash, own = name.rpartition("/")
    is_known = bool(_FILE_NAME.fullmatch(own)) and len(own) <= MAX_NAME_CHARS and own not in (NAME, MARKER, SHOWN)
    if slash:
        is_known &= bool(_FOLDER_NAME.fullmatch(above)) and len(above.encode(errors="replace")) <= MAX_NAME_CHARS
    if not is_known or has_controls(name):
        raise ValueError(
            f"{quoted(name)} is no name of a file in a checkpoint: letters, digits, '.', '_', '+' and '-', with one "
            "folder in front at most"
        )


def folders_of(names: Iterable[str]) -> list[str]:
    """Below a checkpoint's own, in which some of its files are."""
    return sorted({name.rpartition("/")[0] for name in names} - {""})


def read_manifest(folder: int, path: Path) -> Manifest:
    """Of a folder that is open; messages call it `path`. ValueError for a manifest that is missing, damaged, of another
    format, or reaches out of its folder."""
    source = shown(path / NAME)
    return parse(decoded(read_bytes(NAME, WHAT, follow=False, folder=folder), source), source)


def parse(text: str, source: str) -> Manifest:
    entries = parse_json(text, source)
    if not isinstance(entries, dict) or entries.get("format") != FORMAT:
        raise ValueError(f"{source} is no manifest of a hightide checkpoint")
    version = entries.get("version")
    if version != VERSION:
        raise ValueError(
            f"{source} has format version {quoted(version)}, this hightide reads {VERSION}: use the one that wrote it"
        )
    if set(entries) != set(_KEYS):
        wrong = sorted(set(entries) ^ set(_KEYS))
        raise ValueError(f"{source} is damaged: {quoted(wrong)} are unknown or missing")
    told = entries.pop("crc32")
    if told != _own_sum(entries):
        raise ValueError(f"{source} is damaged: its entries have the sum {_own_sum(entries)}, it says {quoted(told)}")
    del entries["format"], entries["version"]
    facts = entries.pop("facts")
    if not isinstance(facts, dict):
        raise ValueError(f"{source}: facts must be a mapping, not {quoted(facts)}")
    manifest = Manifest(
        step=build(int, entries["step"], f"{source}: step"),
        time=build(float, entries["time"], f"{source}: time"),
        files=build(tuple[FileSums, ...], entries["files"], f"{source}: files"),
        facts=facts,
        piece_bytes=build(int, entries["piece_bytes"], f"{source}: piece_bytes"),
    )
    _check(manifest, source)
    return manifest


def _check(manifest: Manifest, source: str) -> None:
    if not 0 <= manifest.step <= MAX_COUNT:
        raise ValueError(f"{source}: step is {manifest.step}; it must be from 0 to {MAX_COUNT}")
    if not 1 <= manifest.piece_bytes <= MAX_PIECE_BYTES:
        raise ValueError(f"{source}: piece_bytes is {manifest.piece_bytes}; it must be from 1 to {MAX_PIECE_BYTES}")
    names = set()
    for file in manifest.files:
        check_name(file.name)
        if file.name in names:
            raise ValueError(f"{source} names {quoted(file.name)} twice")
        names.add(file.name)
        if not 0 <= file.num_bytes <= MAX_COUNT:
            raise ValueError(f"{source}: {file.name} would have {file.num_bytes} bytes")
        if len(file.crc32) != num_pieces(file.num_bytes, manifest.piece_bytes):
            raise ValueError(f"{source}: {file.name} ({file.num_bytes} bytes) has {len(file.crc32)} sums")
        if not all(0 <= one < 2**32 for one in file.crc32):
            raise ValueError(f"{source}: {file.name} has a sum that is no CRC-32")


def _own_sum(entries: Mapping[str, Any]) -> int:
    """Of the entries as they mean, not as they are laid out."""
    return zlib.crc32(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode())
