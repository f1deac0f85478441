"""Rates of products and of memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hightide.doctor import rates


@pytest.mark.parametrize(("burst_s", "size"), [(1e-9, 32), (1.0, 8)], ids=["the largest", "slow enough"])
def test_products_are_rated_by_the_largest_for_a_while(
    burst_s: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever shorter bursts of smaller ones reach."""

    def sustained_s(work: Callable[[], object], device: torch.device, least_s: float) -> float:
        work()
        return 0.5 if least_s else burst_s

    monkeypatch.setattr(rates, "MATMUL_SIZES", (8, 16, 32))
    monkeypatch.setattr(rates, "_sustained_s", sustained_s)
    assert rates.matmul_rates(torch.device("cpu")).float32 == pytest.approx(2 * size**3 / 0.5)
