"""A model as it was before it was wrapped, for `unwrap`, and for a `wrap` that does not come to its end: it is
interrupted, or fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hightide.process.interrupts import safe_point
from hightide.profiler.trial.state import GlobalRandom
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.gradients.gradient_placeholder import GradientPlaceholder


class Before:
    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        """Remembers everything but values: they are in the model, or in chunks."""
        self._model, self._parameters = model, parameters
        self._device = next((param.device for param in model.parameters() if not param.is_meta), torch.device("cpu"))
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

    def copies(self, chunks: Chunks) -> dict[str, Tensor]:
        """Of all values, where the model was."""
        copies: dict[str, Tensor] = {}
        for key in chunks.places:
            safe_point()
            copies[key] = chunks.whole_value(key).to(self._device)
        return copies

    def give_back(self, chunks: Chunks, values: Mapping[str, Tensor], read: Callable[[str], Tensor | None]) -> None:
        """The parameters get these values, and plain gradients: those that a placeholder stands for are `read`."""
        gradients = {key: self._taken(key, param, read) for key, param in self._parameters.items()}
        for key, value in values.items():
            chunks.binding.show(key)
            self._parameters[key].data = value
            self._parameters[key].grad = gradients[key]
        move_buffers(self._model, self._device)

    def _taken(self, key: str, param: nn.Parameter, read: Callable[[str], Tensor | None]) -> Tensor | None:
        """The gradient as a plain tensor, off its parameter: it must be where that is."""
        gradient, param.grad = param.grad, None
        if param.dtype != torch.float32:  # see Gradients: sums were in fp32
            param.grad_dtype = param.dtype
        if isinstance(gradient, GradientPlaceholder):
            gradient = read(key)
        return None if gradient is None else gradient.to(self._device, param.dtype)


class _Former:
    """One parameter."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param
        self._device = param.device
        self._attributes: dict[str, Any] = dict(param.__dict__)
        self._grad_dtype = param.grad_dtype

    def take_back(self, key: str, chunks: Chunks) -> None:
        """Its values, which exist twice for no longer than this takes. One on the meta device had none."""
        chunks.binding.show(key)
        param = self._param
        if self._device.type == "meta":
            empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
            torch.utils.swap_tensors(param, nn.Parameter(empty, requires_grad=param.requires_grad))
            param.__dict__.update(self._attributes)
            return
        if not chunks.has_whole_home(chunks.places[key][0]):  # the others may not know that this one has failed
            chunks.binding.make_absent(key)
            return
        home = chunks.value(key)
        param.data = home.get(self._device)
        home.store.give_back(home.region, home.offset_bytes, home.nbytes)

    def restore_options(self) -> None:
        if self._param.grad_dtype != self._grad_dtype:
            self._param.grad_dtype = self._grad_dtype


def move_buffers(model: nn.Module, device: torch.device) -> list[Tensor]:
    """Returns them. One that several modules share stays one."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]
    return list(moved.values())
