"""How much of several disks a plan may use.

A region lies on one disk. Of several disks each but one may end with almost as much left as the largest region takes.
So much is left out of what is planned: then every plan fits, in whatever order its regions are set aside."""

from __future__ import annotations

from collections.abc import Sequence

from hightide.ir.block import ModelProfile
from hightide.ir.chunk import on_disk_bytes
from hightide.ir.foreign import MAX_COUNT
from hightide.ir.state_spec import StateSpecs
from hightide.planner.disk_inputs import place_bytes
from hightide.planner.layout import pack


def usable_bytes(profile: ModelProfile, states: StateSpecs, sizes: Sequence[int]) -> int:
    """`sizes`: of the files."""
    if len(sizes) < 2:
        return sum(sizes)
    chunks = pack(profile, MAX_COUNT, states).chunks  # in smaller slots they are no larger
    regions = [size for chunk in chunks for size in (chunk.param_bytes, chunk.grad_bytes, chunk.state_bytes)]
    inputs = [place_bytes(profile.num_samples, call) for call in profile.calls]
    largest = max(map(on_disk_bytes, (*regions, *inputs)), default=0)
    return sum(sizes) - sum(min(size, largest) for size in sorted(sizes)[:-1])
