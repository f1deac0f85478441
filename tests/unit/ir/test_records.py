"""Records made of several: no field is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hightide.ir.block import Affine, Glue
from hightide.ir.records import joined, unruled


def larger(name: str, values: Sequence[Any]) -> Any:
    if isinstance(values[0], int):
        return max(values)
    raise unruled(name, values[0])


def test_each_field_is_made_by_the_rule_unless_it_is_known() -> None:
    assert joined([Affine(1, 5), Affine(2, 3)], larger) == Affine(2, 5)
    assert joined([Affine(1, 5), Affine(2, 3)], larger, fixed=7) == Affine(7, 5)


def test_what_the_rule_was_not_made_for_is_an_error() -> None:
    with pytest.raises(TypeError, match="how several of 'held'"):
        joined([Glue(), Glue()], larger)
