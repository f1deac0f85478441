"""A model as it was before it was wrapped, for a `wrap` that does not come to its end: it is interrupted, or fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hightide.profiler.trial.state import GlobalRandom
from hightide.runtime.chunks.chunks import Chunks


class Before:
    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        """Remembers everything but values: they are in the model, or in chunks."""
        self._classes = [(module, type(module)) for module in model.modules()]
        self._buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        self._params = {key: _Former(param) for key, param in parameters.items()}
        self._random = GlobalRandom(device)  # initialisers draw

    def restore(self, chunks: Chunks | None) -> None:
        """`chunks`: where values are by now, in memory that is not pinned. They must not be under way."""
        if chunks is not None:
            for key in reversed(chunks.taken):
                self._params[key].take_back(key, chunks)
        for former in self._params.values():
            former.restore_options()
        for module, kind in self._classes:
            if type(module) is not kind:
                module.__class__ = kind
        for slots, buffers in self._buffers:
            slots.clear()
            slots.update(buffers)
        self._random.restore()


class _Former:
    """One parameter."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param
        self._device = param.device
        self._attributes: dict[str, Any] = dict(param.__dict__)
        self._grad_dtype = param.grad_dtype

    def take_back(self, key: str, chunks: Chunks) -> None:
        """Its values, which exist twice for no longer than this takes. One on the meta device had none."""
        chunks.show(key)
        param = self._param
        if self._device.type == "meta":
            empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
            torch.utils.swap_tensors(param, nn.Parameter(empty, requires_grad=param.requires_grad))
            param.__dict__.update(self._attributes)
            return
        home = chunks.value(key)
        param.data = home.get(self._device)
        home.store.give_back(home.region, home.offset_bytes, home.nbytes)

    def restore_options(self) -> None:
        if self._param.grad_dtype != self._grad_dtype:
            self._param.grad_dtype = self._grad_dtype
