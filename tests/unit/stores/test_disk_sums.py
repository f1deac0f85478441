"""Sums of sectors: which changes they show."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from hightide.stores.disk_sums import SectorSums

SECTOR = 4096


def changes(sector: torch.Tensor, before: torch.Tensor) -> dict[str, Callable[[], object]]:
    words = sector.view(torch.int64)
    floats = sector.view(torch.float32)
    return {
        "zeros": sector.zero_,
        "an older sector": lambda: sector.copy_(before),
        "halves exchanged": lambda: sector.copy_(sector.roll(SECTOR // 2)),
        "eighths exchanged": lambda: sector.copy_(torch.cat((sector[512:1024], sector[:512], sector[1024:]))),
        "all signs": lambda: floats.neg_(),
        "one word less": lambda: words[3].sub_(1),
        "the top bits of two words": lambda: words[3:200:100].bitwise_xor_(-(1 << 63)),
        "constant": lambda: floats.fill_(1.0),
    }


@pytest.mark.parametrize("what", list(changes(*torch.zeros(2, SECTOR, dtype=torch.uint8))))
def test_changes_show(what: str) -> None:
    before, memory = torch.randn(2, 4 * SECTOR // 4).view(torch.uint8)
    sums = SectorSums(8 * SECTOR)
    sums.note(2 * SECTOR, memory.data_ptr(), len(memory))
    assert sums.first_difference(2 * SECTOR, memory.data_ptr(), len(memory)) is None
    sector = memory[2 * SECTOR : 3 * SECTOR]
    changes(sector, before[2 * SECTOR : 3 * SECTOR])[what]()
    assert sums.first_difference(2 * SECTOR, memory.data_ptr(), len(memory)) == 4 * SECTOR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_constants_differ(dtype: torch.dtype) -> None:
    """Parameters and states often begin as such: an older sector must not look like a later one."""
    sums = SectorSums(SECTOR)
    values = [0.0, 1.0, -1.0, 2.0, 0.5, 1e-8, 3.0]
    for value in values:
        memory = torch.full((SECTOR // dtype.itemsize,), value, dtype=dtype)
        sums.note(0, memory.data_ptr(), SECTOR)
        for other in values:
            memory.fill_(other)
            assert (sums.first_difference(0, memory.data_ptr(), SECTOR) is None) == (value == other), (value, other)


def test_every_bit_counts() -> None:
    memory = torch.randint(256, (SECTOR,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    sums = SectorSums(SECTOR)
    sums.note(0, memory.data_ptr(), SECTOR)
    chance = random.Random(0)
    for number in [*range(64), *(chance.randrange(8 * SECTOR) for _ in range(500))]:
        memory[number // 8] ^= 1 << number % 8
        assert sums.first_difference(0, memory.data_ptr(), SECTOR) == 0, number
        memory[number // 8] ^= 1 << number % 8
    assert sums.first_difference(0, memory.data_ptr(), SECTOR) is None


def test_what_was_never_written_is_zeros_and_what_is_spoilt_is_nothing() -> None:
    zeros = torch.zeros(3 * SECTOR, dtype=torch.uint8)
    sums = SectorSums(3 * SECTOR)
    assert sums.first_difference(0, zeros.data_ptr(), 3 * SECTOR) is None
    for _ in range(2):  # twice is not undone
        sums.spoil(SECTOR, SECTOR)
        assert sums.first_difference(0, zeros.data_ptr(), 3 * SECTOR) == SECTOR
    sums.note(SECTOR, zeros.data_ptr(), SECTOR)
    assert sums.first_difference(0, zeros.data_ptr(), 3 * SECTOR) is None
