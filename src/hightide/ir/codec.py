"""Frozen dataclasses to JSON and back. Unknown, missing and mistyped fields are errors that name the field."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union

from hightide.ir.foreign import MAX_COUNT, QUOTED, has_controls, parse_json, quoted, read_json, shown
from hightide.ir.tier import Lane
from hightide.process import files

T = TypeVar("T")
NAMED = 4  # as many keys are named in a message


def to_json(value: object) -> str:
    return json.dumps(_plain(value), indent=1)


def from_json(cls: type[T], text: str, source: str = "JSON") -> T:
    return typing.cast(T, build(cls, parse_json(text, source), source))


def save(value: object, path: str | Path) -> None:
    files.write_text(path, to_json(value) + "\n")


def load(cls: type[T], path: str | Path, what: str) -> T:
    return typing.cast(T, build(cls, read_json(path, what), shown(path)))


def build(cls: Any, data: Any, where: str) -> Any:
    """Builds a value of type `cls` from plain data, checking every field."""
    origin = typing.get_origin(cls)
    if origin in (Union, types.UnionType):
        return _build_union(cls, data, where)
    if origin is tuple:
        (item,) = {arg for arg in typing.get_args(cls) if arg is not Ellipsis}
        if not isinstance(data, list | tuple):
            raise ValueError(f"{where} must be a list, not {quoted(data)}")
        return tuple(build(item, entry, f"{where}[{index}]") for index, entry in enumerate(data))
    if dataclasses.is_dataclass(cls):
        return _build_dataclass(cls, data, where)
    if isinstance(cls, type) and issubclass(cls, Enum | Lane):
        try:
            return cls(data)
        except (ValueError, TypeError):
            raise ValueError(
                f"{where} is {quoted(data)}; it must be one of {', '.join(str(one) for one in cls)}"
            ) from None
    return _build_scalar(cls, data, where)


def _build_scalar(cls: Any, data: Any, where: str) -> Any:
    if isinstance(data, bool) and cls is not bool:
        raise ValueError(f"{where} is {data}; it must be of type {cls.__name__}")
    if isinstance(data, int) and abs(data) > MAX_COUNT:
        raise ValueError(f"{where} is {quoted(data)}; it must be at most {MAX_COUNT}")
    if cls is float and isinstance(data, int):
        return float(data)
    if not isinstance(data, cls):
        raise ValueError(f"{where} is {quoted(data)}; it must be of type {cls.__name__}")
    if isinstance(data, float) and not math.isfinite(data):
        raise ValueError(f"{where} is {data}; it must be finite")
    if isinstance(data, str) and has_controls(data):
        raise ValueError(f"{where} is {quoted(data)}; it must be text without control characters")
    return data


def check_numbers(value: object, where: str, least: float = 0, most: float = MAX_COUNT) -> None:
    """Every number in a value of `build`, however deep, lies between these two; both of them are meant."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            check_numbers(getattr(value, field.name), f"{where}: {field.name}", least, most)
    elif isinstance(value, tuple):
        for index, entry in enumerate(value):
            check_numbers(entry, f"{where}[{index}]", least, most)
    elif isinstance(value, int | float) and not isinstance(value, bool) and not least <= value <= most:
        raise ValueError(f"{where} is {quoted(value)}; it must be from {least} to {most}: make the file anew")


def _build_union(cls: Any, data: Any, where: str) -> Any:
    problems = []
    for option in typing.get_args(cls):
        if option is type(None):
            if data is None:
                return None
            continue
        try:
            return build(option, data, where)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError("; or ".join(problems) or f"{where} must be null, not {quoted(data)}")


def _build_dataclass(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        names = [field.name for field in dataclasses.fields(cls)]
        keys = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
        raise ValueError(f"{where} must be a mapping with keys such as {keys}, not {quoted(data)}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    required = [name for name, field in fields.items() if _is_required(field)]
    if data and required and not any(name in data for name in required):  # another file, and not a slip
        raise ValueError(f"{where} is no {cls.__name__}: it has none of the keys {', '.join(required[:NAMED])}")
    for key in data:
        if key not in fields:
            nearest = difflib.get_close_matches(str(key)[:QUOTED], fields, n=1, cutoff=0.0)
            raise ValueError(f"{where} has an unknown key {quoted(key)}; did you mean {nearest[0]!r}?")
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = build(hints[name], data[name], f"{where}: {name}")
        elif _is_required(field):
            raise ValueError(f"{where} lacks the key {name!r}")
    return cls(**values)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
