"""Numbers on the GPU that gradients are multiplied by later."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hightide
from hightide.runtime.gradients.factors import GivenFactor
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


def test_one_copy_serves_all_that_are_given_the_same() -> None:
    given, factor = GivenFactor(), torch.tensor(2.0)
    one = given.copy_of(factor)
    assert one is not factor
    assert given.copy_of(factor) is one  # there is one number to bring to the host, not one for each parameter
    factor.fill_(3.0)
    two = given.copy_of(factor)
    assert (float(one), float(two)) == (2.0, 3.0)
    assert given.copy_of(torch.tensor(4.0)) not in (one, two)
    given.forget()
    assert float(given.copy_of(factor)) == 3.0
