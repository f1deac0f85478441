"""Without randomness two runs agree, however they are cut; and what was drawn is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hightide.profiler.trial.quiet import Quiet, float32_precision

RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of channels": lambda x: F.dropout1d(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "noise": lambda x: x + torch.randn_like(x),
    "uniform noise": lambda x: x + torch.empty_like(x).uniform_(),
    "paths": lambda x: x * torch.bernoulli(torch.full((len(x), 1, 1), 0.5)),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "integers": lambda x: x + torch.randint(0, 9, x.shape),
    "a normal distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", RANDOM)
def test_parts_are_the_whole(name: str) -> None:
    x = torch.randn(4, 5, 6)
    with Quiet():
        whole = RANDOM[name](x)
        parts = torch.cat([RANDOM[name](x[:1]), RANDOM[name](x[1:])])
    assert torch.allclose(whole, parts)
    assert not torch.equal(RANDOM[name](x), RANDOM[name](x)), "it is random"


def test_permutations_are_not_the_identity_and_differ_by_size() -> None:
    with Quiet() as quiet:
        assert torch.randperm(3).tolist() == [2, 1, 0]
    assert quiet.draws == [3]


def test_draws_are_counted() -> None:
    with Quiet() as quiet:
        F.dropout(torch.ones(2, 3), 0.5)
        torch.rand(())
        torch.ones(3) + 1
    assert quiet.draws == [6, 1]


@pytest.mark.parametrize("way", ["older", "newer"])
def test_products_are_exact_inside_and_as_the_user_has_them_outside(way: str) -> None:
    """What is asked of torch's older way raises where the newer one was used."""
    matmul = torch.backends.cuda.matmul
    try:
        if way == "older":
            torch.set_float32_matmul_precision("medium")
        else:
            matmul.fp32_precision = "tf32"
        with float32_precision():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
        assert way == "newer" or torch.get_float32_matmul_precision() == "medium"
    finally:
        matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")
