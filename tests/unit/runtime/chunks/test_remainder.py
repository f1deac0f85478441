"""Masters in two parts: the parameter that torch would round to, and a remainder that gives the master back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hightide.runtime.chunks.remainder import join, split


def parts_of(master: Tensor) -> tuple[Tensor, Tensor]:
    param, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split(master, param, remainder)
    return param, remainder


def from_bits(high: Tensor, low: Tensor) -> Tensor:
    return ((high << 16) + low).to(torch.int32).view(torch.float32)


def neighbours_of_every_parameter() -> Tensor:
    """Every bf16 value, with lower halves at all the edges."""
    high = torch.arange(-(2**15), 2**15)[:, None]
    low = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    return from_bits(high, low).flatten()


def test_parameters_are_rounded_as_by_torch_and_masters_come_back() -> None:
    master = neighbours_of_every_parameter()
    param, remainder = parts_of(master)
    assert torch.equal(param.view(torch.int16), master.bfloat16().view(torch.int16))
    again = join(param, remainder)
    bits, found = master.view(torch.int32), again.view(torch.int32)
    halfway_down = ((bits & 0x1FFFF) == 0x8000) & ~master.isnan()
    assert int(halfway_down.sum()) == 2 * (2**14 - 2**6)  # half of all finite parameters, both infinities aside
    exact = ~halfway_down & ~master.isnan()
    assert torch.equal(found[exact], bits[exact])
    assert torch.equal(found[halfway_down], bits[halfway_down] - 1)  # one ulp less, in absolute value
    assert bool(again[master.isnan()].isnan().all())
    assert torch.equal(again.bfloat16()[~master.isnan()], param[~master.isnan()])  # the parameter stays the same


def test_a_second_round_changes_nothing() -> None:
    master = neighbours_of_every_parameter()
    once = parts_of(master)
    twice = parts_of(join(*once))
    finite = ~master.isnan()
    assert torch.equal(once[0].view(torch.int16)[finite], twice[0].view(torch.int16)[finite])
    assert torch.equal(once[1][finite], twice[1][finite])


@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    master = torch.randn(shape)
    assert torch.equal(join(*parts_of(master)), master)
