"""Whatever is planned for several disks fits on them, region by region."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import nn

import hightide
from hightide.ir.chunk import DISK_REGION_BYTES
from hightide.planner import disk_room
from hightide.planner.disk_room import usable_bytes
from hightide.planner.layout import ADAM_STATES, pack
from hightide.stores.freelist import FreeLists
from unit.planner.profiles import stack


def test_one_disk_is_used_up() -> None:
    assert usable_bytes(stack(), ADAM_STATES, [12345]) == 12345 and usable_bytes(stack(), ADAM_STATES, []) == 0


def test_regions_fit_in_any_order() -> None:
    """As the store sets them aside, up to the last of what is usable."""
    profile, draw, num_tight = stack(), random.Random(3), 0
    chunks = pack(profile, 1 << 40, ADAM_STATES).chunks
    largest = max(disk_room.on_disk_bytes(chunk.state_bytes) for chunk in chunks)
    for _ in range(300):
        sizes = [
            draw.randrange(1, 4 * largest // DISK_REGION_BYTES) * DISK_REGION_BYTES for _ in range(draw.randint(2, 5))
        ]
        left, free = usable_bytes(profile, ADAM_STATES, sizes), FreeLists(sizes)
        while left >= DISK_REGION_BYTES:
            size = min(left, draw.randint(1, largest // DISK_REGION_BYTES) * DISK_REGION_BYTES)
            size = size // DISK_REGION_BYTES * DISK_REGION_BYTES
            assert free.take(size) is not None, (sizes, left, size)
            left -= size
        num_tight += free.take(largest) is None
    assert num_tight > 150


def test_a_model_on_three_disks_that_have_just_enough_together(tmp_path: Path) -> None:
    """Two of them hold the states of one layer, and not of two."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 128)
    for name in "abc":
        (tmp_path / name).mkdir()
    disks = [f"{tmp_path / 'a'}:256KiB", f"{tmp_path / 'b'}:256KiB", f"{tmp_path / 'c'}:512KiB"]
    limits = hightide.Limits(gpu="600KiB", host="1200KiB", disk=disks)
    wrapped, optimizer = hightide.wrap(model, optimizer, batch, limits=limits)
    wrapped(batch).sum().backward()
    optimizer.step()
