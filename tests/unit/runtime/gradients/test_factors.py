"""Factors of gradients that are tensors: kept as they were, and one for all that are scaled by it."""

from __future__ import annotations

import torch

from hightide.runtime.gradients.factors import Factors


def test_a_factor_is_what_it_was_whatever_its_owner_does_with_it_later() -> None:
    factors, given = Factors(), torch.tensor(0.5)
    first = factors.kept(given)
    assert factors.kept(given) is first, "neighbours are scaled by one number"
    given.fill_(3.0)
    second = factors.kept(given)
    assert (first.item(), second.item()) == (0.5, 3.0)
    assert factors.kept(torch.tensor(3.0)) is not second


def test_of_a_tensor_whose_writes_nobody_sees_there_is_a_copy_each_time() -> None:
    with torch.inference_mode():
        given = torch.tensor(0.5)
        first = Factors().kept(given)
        factors = Factors()
        before = factors.kept(given)
        given.fill_(3.0)
        assert (first.item(), before.item(), factors.kept(given).item()) == (0.5, 0.5, 3.0)


def test_what_all_are_scaled_by_in_turn_is_one_product() -> None:
    factors, scale, clip = Factors(), torch.tensor(0.25), torch.tensor(0.5)
    product = factors.product(scale, clip)
    assert isinstance(product, torch.Tensor) and product.item() == 0.125
    assert factors.product(scale, clip) is product
    assert factors.product(2.0, 3.0) == 6.0 == factors.product(2.0, 3.0)
    assert factors.product(2.0, 4.0) == 8.0
    half = factors.product(2.0, clip)
    assert factors.product(2.0, clip) is half and factors.product(scale, clip) is not half
