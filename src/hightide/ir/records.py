"""Frozen records, made field by field out of others of their type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")
Rule = Callable[[str, Sequence[Any]], Any]  # the value of a field, from its name and its values in all of them


def joined(found: Sequence[T], rule: Rule, **known: Any) -> T:
    """One for several: of each field what `rule` says, unless it is `known`. No field is left out, so that a rule meets
    every new one; it raises `unruled` for those that it was not made for."""
    kind: Any = type(found[0])
    names = [field.name for field in fields(kind) if field.name not in known]
    values = {name: rule(name, [getattr(one, name) for one in found]) for name in names}
    return kind(**values, **known)  # type: ignore[no-any-return]


def unruled(name: str, value: object) -> TypeError:
    return TypeError(f"nobody has said how several of {name!r}, such as {value!r}, become one")
