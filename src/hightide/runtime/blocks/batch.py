"""The user's batch on its way to the accelerator."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with its tensors changed, inside mappings, lists, tuples and dataclasses too. What holds nothing
    that changes stays the same object, and so does any other object, such as a cache, which the model fills itself."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, MutableMapping):  # before dataclasses: transformers' outputs are both
        return _replaced(value, list(value.items()), change, lambda clone, key, new: clone.__setitem__(key, new))
    if isinstance(value, list):
        return _replaced(value, list(enumerate(value)), change, lambda clone, at, new: clone.__setitem__(at, new))
    if isinstance(value, tuple):
        entries = [map_tensors(entry, change) for entry in value]
        if all(new is old for new, old in zip(entries, value, strict=True)):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return _replaced(value, fields, change, object.__setattr__)  # frozen ones too
    return value


def _replaced(
    value: Any, entries: list[tuple[Any, Any]], change: Callable[[Tensor], Tensor], put: Callable[[Any, Any, Any], None]
) -> Any:
    """A shallow copy with the changed entries, if there are any: it may have more to it than its entries."""
    changed = [(key, new) for key, old in entries if (new := map_tensors(old, change)) is not old]
    if not changed:
        return value
    clone = copy.copy(value)
    for key, new in changed:
        put(clone, key, new)
    return clone


def copy_to(value: Tensor, device: torch.device) -> Tensor:
    """On a GPU the copy is asynchronous: from pinned memory, so that it does not wait for what is enqueued already.
    Torch reuses that memory once the copy is through."""
    if device.type == "cpu":
        return value.clone()
    if value.device.type == "cpu" and not value.requires_grad:
        # The user may fill a buffer that is pinned already again at once, before an asynchronous copy has read it.
        value = torch.empty_like(value, pin_memory=True).copy_(value) if value.is_pinned() else value.pin_memory()
    return value.to(device, non_blocking=True)


class CpuCopies:
    """A batch as it came from the CPU: whoever needs values of it there need not fetch them from the GPU."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}  # by the address of the copy

    def note(self, moved: Tensor, value: Tensor) -> None:
        """`moved`: on the GPU, in memory of its own. Only ids are asked for. Of inference tensors nobody knows who
        writes to them."""
        if moved.numel() and not moved.is_inference() and not moved.is_floating_point():
            # A copy: the user's own tensor may be filled anew before the last embedding is called.
            value = torch.empty_strided(moved.size(), moved.stride(), dtype=moved.dtype).copy_(value)
            self._known[moved.untyped_storage().data_ptr()] = moved, moved._version, value

    def find(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor of the batch, or of a view of one, unless somebody has written to it (not by `.data`,
        of which torch does not know)."""
        moved, version, value = self._known.get(tensor.untyped_storage().data_ptr(), (None, 0, tensor))
        if moved is None or moved._version != version or moved.dtype != tensor.dtype:
            return None
        offset = value.storage_offset() + tensor.storage_offset() - moved.storage_offset()
        return value.detach().as_strided(tensor.size(), tensor.stride(), offset)

    def clear(self) -> None:
        self._known.clear()
