"""Products of parameters: in every run each value of each of them, in `make test-long` all combinations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def each_value(*columns: Sequence[Any]) -> list[Any]:
    """The product of the columns. As many cells as the longest column has values are for every run: in these the values
    of all columns go round together. The others are `long`."""
    longest = max(map(len, columns))
    quick = {tuple(row % len(column) for column in columns) for row in range(longest)}
    places = product(*(range(len(column)) for column in columns))
    return [
        pytest.param(
            *(column[at] for column, at in zip(columns, place, strict=True)),
            marks=() if place in quick else pytest.mark.long,
        )
        for place in places
    ]
