"""Wear of a disk: what training writes to it, and how long it lasts by the bytes that its maker rates it for."""

from __future__ import annotations

from dataclasses import dataclass

from hightide.ir.foreign import quoted
from hightide.ir.units import format_bytes, parse_bytes

DAY_S = 86_400
TERABYTE = 10**12  # as ratings count


@dataclass(frozen=True)
class Wear:
    written_bytes: int  # per step
    terabytes_per_day: float  # of steps one after the other
    rated_bytes: int | None  # that may be written in the disk's life; None: nobody has said
    days: float | None  # until so many are written


def wear(written_bytes: int, step_s: float, rated_bytes: int | None = None) -> Wear:
    per_day = written_bytes / step_s * DAY_S
    days = rated_bytes / per_day if rated_bytes and per_day else None
    return Wear(written_bytes, per_day / TERABYTE, rated_bytes, days)


def parse_rating(text: str, name: str) -> int:
    """Turns "600TBW", as makers write it, or "600TB" into bytes. `name` is what an error calls the value."""
    size = text.strip()
    try:
        return parse_bytes(size[:-1] if size[-1:] in "Ww" else size, name)
    except ValueError:
        raise ValueError(
            f"{name}={quoted(text)} is no rating; write the bytes that may be written to the disk in its life, such as "
            "600TBW"
        ) from None


def in_words(one: Wear) -> str:
    daily = f"{one.terabytes_per_day:.3g} TB a day"
    rating = ""
    if one.days is not None and one.rated_bytes is not None:
        rating = f"; {one.rated_bytes / TERABYTE:.4g} TB last {one.days:.3g} days"
    return f"{format_bytes(one.written_bytes)} written per step, {daily}{rating}"
