"""What is written, per step, per day and in a disk's life."""

from __future__ import annotations

import pytest

from hightide.planner.predict.wear import in_words, parse_rating, wear


def test_bytes_of_a_step_become_terabytes_of_a_day_and_days_of_a_life() -> None:
    found = wear(32_100_000_000, 10.0, parse_rating("600TBW", "--endurance"))
    assert found.terabytes_per_day == pytest.approx(32.1e9 * 8640 / 1e12)
    assert found.days == pytest.approx(600 / found.terabytes_per_day)
    assert in_words(found) == "29.9 GiB written per step, 277 TB a day; 600 TB last 2.16 days"


def test_without_a_rating_or_without_writing_nothing_is_said_about_days() -> None:
    assert wear(10**12, 1.0).days is None and "last" not in in_words(wear(10**12, 1.0))
    assert wear(0, 1.0, 10**12).days is None


@pytest.mark.parametrize(
    ("text", "rated"), [("600TBW", 6e14), ("1.2 PBW", None), ("3tb", 3e12), ("W", None), ("", None)]
)
def test_ratings_are_read_as_makers_write_them(text: str, rated: float | None) -> None:
    if rated is not None:
        assert parse_rating(text, "--endurance") == rated
    else:
        with pytest.raises(ValueError, match=r"--endurance=.* is no rating.*600TBW"):
            parse_rating(text, "--endurance")
