"""Factors of gradients that are tensors: kept as they were, and one for all that are scaled by it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hightide
from hightide.runtime.gradients.factors import Factors
from hightide.runtime.surgery import run_of


class OnGpu(Tensor):
    """It says so."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


def on_gpu(value: float) -> Tensor:
    return torch.tensor(value).as_subclass(OnGpu)  # type: ignore[return-value]


def test_who_writes_over_a_factor_changes_no_gradient_that_it_was_given_to() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    model, _ = hightide.wrap(model, torch.optim.SGD(model.parameters()), x, limits=hightide.Limits("4MiB", "4MiB"))
    model(x).square().mean().backward()
    run = run_of(model)
    assert run is not None
    first, second = ("0.weight", "1.weight")
    before = {key: run.gradients.read(key) for key in (first, second)}
    factor = on_gpu(2.0)
    run.gradients.scale(first, factor)
    factor.mul_(50)
    run.gradients.scale(second, factor)
    factor.zero_()
    assert torch.equal(run.gradients.read(first), 2 * before[first])
    assert torch.equal(run.gradients.read(second), 100 * before[second])
    hightide.unwrap(model)


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
