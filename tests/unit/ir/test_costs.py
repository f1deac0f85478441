from __future__ import annotations

from pathlib import Path

import pytest

from hightide.ir.costs import CallCost, CallPeaks, Costs, Curve, LossCost, Point

CURVE = Curve((Point(2, 3.0), Point(4, 5.0), Point(8, 6.0)))


@pytest.mark.parametrize(
    ("num_samples", "value"),
    [(0, 0.0), (1, 1.5), (2, 3.0), (3, 4.0), (4, 5.0), (6, 5.5), (8, 6.0), (12, 9.0)],
)
def test_a_curve_is_linear_between_its_points_and_proportional_outside(num_samples: int, value: float) -> None:
    assert CURVE.at(num_samples) == pytest.approx(value)


def test_a_curve_without_points_is_zero() -> None:
    assert Curve(()).at(7) == 0.0


@pytest.mark.parametrize("points", [((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0)), ((0, 1.0),), ((1, -1.0),)])
def test_nonsense_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="growing sizes from 1 and values from 0"):
        Curve(tuple(Point(*point) for point in points))


def test_costs_survive_a_file(tmp_path: Path) -> None:
    peaks = CallPeaks(CURVE, Curve(()), CURVE)
    costs = Costs(
        "measured on a test",
        "feed",
        (CallCost(CURVE, CURVE, Curve(()), CURVE, 0.1),),
        LossCost(8, 1.0, 2.0, 0.5),
        1e12,
        5e11,
    )
    for saved in (costs, Costs("estimated", "feed", (), None, 1.0, 1.0, 0.5, (peaks,))):
        saved.save(tmp_path / "costs.json")
        assert Costs.load(tmp_path / "costs.json") == saved


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_rates_must_be_positive(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"_bytes_per_s of these costs is .*; it must be more than 0"):
        Costs("estimated", "feed", (), None, *rates)


def test_a_tile_has_tokens() -> None:
    with pytest.raises(ValueError, match="a tile of the loss has 0 tokens"):
        LossCost(0, 1.0, 1.0, 1.0)


def test_missing_costs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the costs .*none\.json: No such file"):
        Costs.load(tmp_path / "none.json")
