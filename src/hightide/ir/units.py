"""Bytes, seconds and operations as people write them."""

from __future__ import annotations

import re

from hightide.ir.foreign import MAX_COUNT, quoted

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, name: str) -> int:
    """Turns 25769803776, "24GiB" or "1.5TB" into bytes. `name` is what an error calls the value."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{name}={quoted(value)} is not a size; write bytes as an integer or text such as '24GiB'")
    if isinstance(value, int):
        num_bytes = value
    else:
        match = _PATTERN.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            known = "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
            raise ValueError(
                f"{name}={quoted(value)} is not a size; write a number and a unit ({known}), such as '24GiB'"
            )
        size = float(match[1]) * _UNITS[match[2].lower()]
        if not match[2] and 0 < size < 1024:
            raise ValueError(f"{name}={quoted(value)} is {size:g} bytes; write a unit too, such as '24GiB'")
        num_bytes = int(min(size, 2.0 * MAX_COUNT))  # hundreds of digits are infinite
    if num_bytes <= 0:
        raise ValueError(f"{name}={quoted(value)} must be more than zero bytes")
    if num_bytes > MAX_COUNT:
        raise ValueError(f"{name}={quoted(value)} must be at most {MAX_COUNT} bytes; write a size such as '24GiB'")
    return num_bytes


def counted(number: int, what: str, several: str = "") -> str:
    """1 -> '1 row', 2000 -> '2,000 rows'. `several`: the plural, where it is not made with an s."""
    return f"{number:,} {what if number == 1 else several or f'{what}s'}"


def format_count(number: int) -> str:
    """Short text for people: 8030261248 -> '8.03B'."""
    if abs(number) >= 10**15:
        return f"{number:.0e}"
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(number) >= size:
            return f"{number / size:.2f}{letter}"
    return str(number)


def format_bytes(num_bytes: int) -> str:
    """Short text for people: 1536 -> '1.5 KiB'."""
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{int(size)} B" if unit == "B" else f"{size:.{1 if abs(size) < 100 else 0}f} {unit}"


def exactly(num_bytes: int) -> str:
    """1536 -> '1536 bytes (1.5 KiB)'."""
    return f"{num_bytes} bytes ({format_bytes(num_bytes)})"


def clipped(text: str, width: int) -> str:
    """Its beginning, where it is wider."""
    return text if len(text) <= width else text[: width - 1] + "…"


def format_seconds(seconds: float) -> str:
    """Short text for people: 0.00125 -> '1.25 ms'."""
    size = abs(seconds)
    if size >= 1 or not seconds:
        return f"{seconds:.3f} s" if seconds else "0 s"
    unit, factor = ("ms", 1e3) if size >= 1e-3 else ("µs", 1e6)
    return f"{seconds * factor:.3g} {unit}" if size * factor < 99.95 else f"{seconds * factor:.0f} {unit}"


def format_flop(flop: float) -> str:
    """Short text for people: 2.1e15 -> '2.1 PFLOP'. Floating point operations."""
    size, unit = float(flop), ""
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        if size < 1000 or unit == "E":
            break
        size /= 1000
    return f"{size:.{1 if unit and size < 100 else 0}f} {unit}FLOP"
