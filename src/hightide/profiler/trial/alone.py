"""One block with values of its own, without the rest of its model: random parameters, real buffers, nobody's hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hightide.profiler.fake.exchange import exchange
from hightide.profiler.fake.fake import Originals
from hightide.profiler.fake.values import random_values
from hightide.profiler.model.hooks import users_hooks_aside
from hightide.profiler.trial.quiet import float32_precision


@contextmanager
def alone(
    module: nn.Module, originals: Originals, device: torch.device, dtype: torch.dtype | None
) -> Iterator[list[nn.Parameter]]:
    """The block with random parameters on the device, its own buffers, and without the user's hooks. `dtype` None: its
    own. To be called with fake parameters, which are there again afterwards."""
    generator = torch.Generator(device).manual_seed(1)
    modules = list(module.modules())
    kept = [(there, dict(there)) for one in modules for there in (one._parameters, one._buffers, vars(one))]

    def real(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return _real_buffer(originals.of(tensor), dtype, device, generator)
        values = random_values(tensor, device, generator)
        return nn.Parameter(values.to(dtype or tensor.dtype), requires_grad=tensor.requires_grad)

    try:
        others = exchange(modules, real).values()
        with float32_precision(), users_hooks_aside(module):
            yield [other for other in others if isinstance(other, nn.Parameter)]
    finally:
        for there, before in kept:
            there.clear()
            there.update(before)


def _real_buffer(buffer: Tensor, dtype: torch.dtype | None, device: torch.device, generator: torch.Generator) -> Tensor:
    target = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
    if not buffer.is_meta:
        return buffer.detach().to(device, target, copy=True)
    if not buffer.is_floating_point():
        return torch.zeros(buffer.shape, dtype=target, device=device)
    return torch.rand(buffer.shape, generator=generator, device=device).to(target)  # also good for a variance
