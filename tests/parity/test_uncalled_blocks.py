"""Blocks that the example does not call: they have a place where there is room for one, and are used as in plain
PyTorch when they are called at last."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from harness import assert_close_weights
from torch import Tensor, nn

import hightide
from even_alone import talking


class TwoHeads(nn.Module):
    """`second` is an argument; `tells` is not, and is seen by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 64)
        self.tells = False

    def forward(self, x: Tensor, second: bool = False) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (self.other(x) if second or self.tells else self.one(x)).square().mean()


def pair(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def wrapped(plain: TwoHeads, x: Tensor, gpu: str) -> tuple[TwoHeads, torch.optim.Optimizer]:
    limits = hightide.Limits(gpu=gpu, host="64MiB")
    return hightide.wrap(*pair(copy.deepcopy(plain)), {"x": x}, limits=limits)  # type: ignore[return-value]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, **options: bool) -> float:
    loss = model(x, **options)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def test_a_head_for_evaluation_only_has_a_place_that_is_counted() -> None:
    plain, x = TwoHeads(), torch.randn(8, 16)
    plain.other.requires_grad_(False)
    model, optimizer = wrapped(plain, x, "1MiB")
    other = next(block for block in hightide.stats(model).plan.blocks if block.name == "other")
    assert other.params == "gpu" and hightide.stats(model).plan.num_slots == 0
    held = sum(param.nbytes for param in model.parameters())
    assert hightide.stats(model).plan.forecast.gpu_peak_bytes >= held
    plain_optimizer = pair(plain)[1]
    for _ in range(2):
        assert step(model, optimizer, x) == pytest.approx(step(plain, plain_optimizer, x), rel=1e-6)
    model.tells = plain.tells = True
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*did not foresee.*")
        assert float(model(x)) == pytest.approx(float(plain(x)), rel=1e-6)
    assert_close_weights(plain.state_dict(), model.state_dict())


@pytest.mark.parametrize("gpu", ["1MiB", "40KiB"], ids=["has a place", "is planned for when it comes"])
def test_a_head_that_trains_later_trains_as_in_plain_pytorch(gpu: str) -> None:
    plain, x = TwoHeads(), torch.randn(8, 16)
    model, optimizer = wrapped(plain, x, gpu)
    plain_optimizer = pair(plain)[1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(did not foresee|Planned again|were forecast).*")
        for second in (False, True, False, True):
            expected = step(plain, plain_optimizer, x, second=second)
            assert step(model, optimizer, x, second=second) == pytest.approx(expected, rel=1e-6)
    assert_close_weights(plain.state_dict(), model.state_dict())
    assert hightide.stats(model).peak_bytes["gpu"] <= hightide.stats(model).plan.gpu_limit_bytes


def test_one_for_which_there_is_no_room_is_refused_and_training_goes_on() -> None:
    plain, x = TwoHeads(), torch.randn(8, 16)
    model, optimizer = wrapped(plain, x, "20KiB")
    plain_optimizer = pair(plain)[1]
    model.tells = True
    with pytest.raises(hightide.Refused, match="'other'"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(x)
    model.tells = False
    with pytest.raises(hightide.Refused, match="it does not fit"):
        model(x, second=True)
    assert step(model, optimizer, x) == pytest.approx(step(plain, plain_optimizer, x), rel=1e-6)


def test_in_shards_a_place_without_a_slot_is_of_no_use() -> None:
    """Also in those of one rank that talks to itself: what it takes would be taken for nothing."""
    with talking():
        model, _ = wrapped(TwoHeads(), torch.randn(8, 16), "1MiB")
    plan = hightide.stats(model).plan
    assert plan.is_cut and plan.num_slots == 0
    assert {block.name: block.params for block in plan.blocks}["other"] == "host"
    hightide.unwrap(model)
