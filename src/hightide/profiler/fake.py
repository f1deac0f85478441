"""A model without its values: parameters and buffers become fake tensors for a while, so that it runs without memory.

Inputs stay real: code that builds masks asks for their values, which the meta device cannot answer. The fake mode is
not active, so tensors that come from inputs alone are real, and those that meet a parameter are fake.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def fake_parameters(model: nn.Module) -> Iterator[None]:
    """Replaces all parameters and buffers by fake ones on the CPU; tied ones stay tied. Puts the very objects back.

    What the model's code stored on its modules meanwhile (a cached mask, a new buffer) is forgotten: it would be fake.
    """
    before = [_Contents(module) for module in model.modules()]
    fakes: dict[int, torch.Tensor] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        for module in model.modules():
            for slots in (module._parameters, module._buffers):
                for name, tensor in slots.items():
                    if tensor is not None:
                        if id(tensor) not in fakes:
                            fakes[id(tensor)] = _fake(tensor, mode)
                        slots[name] = fakes[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for contents in before:
            contents.restore()


class _Contents:
    """What hangs on one module, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes: dict[str, Any] = dict(module.__dict__)
        self._parameters = dict(module._parameters)
        self._buffers = dict(module._buffers)

    def restore(self) -> None:
        attributes = self._module.__dict__
        attributes.clear()
        attributes.update(self._attributes)
        for slots, originals in ((self._module._parameters, self._parameters), (self._module._buffers, self._buffers)):
            slots.clear()
            slots.update(originals)  # type: ignore[arg-type]


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    # Contiguous whatever the original's strides: an absent parameter is one element, expanded.
    with mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake
