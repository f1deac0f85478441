"""Numbers as people read them."""

from __future__ import annotations

import pytest

from hightide.ir.units import format_count


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00k"),
        (34_500_000, "34.50M"),
        (8_030_261_248, "8.03B"),
        (2 * 10**12, "2.00T"),
        (-5000, "-5.00k"),
        (10**30, "1e+30"),
    ],
)
def test_counts_are_short(number: int, text: str) -> None:
    assert format_count(number) == text
