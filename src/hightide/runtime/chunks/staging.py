"""Gradients whose finished values are narrower than their sums.

[Note: rounded gradients] With plan.gradients="param" a gradient is summed in fp32 on the GPU, and rounded to its
parameter's dtype when its block's backward is done: on its way home; or, if its parameters are used by several calls
(whose gradients may or may not leave in between), where it is. Home may be on the GPU, for updates there; where that
has fp32 all the same, it is rounded in its place too. So every plan rounds at the same moments, and placement does not
change results. What is home in its own dtype has half the bytes and comes back exactly.

In a step of several passes only the last addition of the last pass is followed by rounding: a sum that has stayed on
the GPU until then is rounded on its way home, others where they are, and those that go home in between are fp32 there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hightide.stores.array import Array
from hightide.stores.store import Accelerator, Region


class Staging:
    """A small buffer on the accelerator. A copy to or from pinned memory cannot convert, so conversions happen here,
    tile by tile; the order of the one stream that uses it keeps tiles apart."""

    def __init__(self, gpu: Accelerator, region: Region) -> None:
        self._gpu, self._region = gpu, region

    def send(self, source: Tensor, home: Array, at: int = 0) -> None:
        """To the elements from `at` on."""
        for start, tile, buffer in self._tiles(source, home.dtype):
            buffer.copy_(tile)
            home.write(buffer, at + start).wait()

    def bring(self, target: Tensor, home: Array, at: int = 0) -> None:
        for start, tile, buffer in self._tiles(target, home.dtype):
            home.read(buffer, at + start).wait()
            tile.copy_(buffer)

    def round(self, values: Tensor, dtype: torch.dtype) -> None:
        for _, tile, buffer in self._tiles(values, dtype):
            buffer.copy_(tile)
            tile.copy_(buffer)

    def _tiles(self, values: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor]]:
        buffer = self._gpu.view(self._region, dtype)
        size = buffer.numel()
        for start in range(0, values.numel(), size):
            tile = values[start : start + size]
            yield start, tile, buffer if start + size <= values.numel() else buffer[: tile.numel()]
