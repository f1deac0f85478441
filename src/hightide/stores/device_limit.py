"""The limit of a GPU tier, made hard: torch's allocator refuses to reserve more.

The allocator knows one number per device. So limits of several wrapped models add up, and what the process had
reserved before the first of them comes on top: it is outside of every limit. A lower fraction that somebody else has
set stays in force.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

LOADING_BYTES = 2 * 20 * 1024**2  # the allocator reserves in pages of 20 MiB, for small and for large tensors


@dataclass(eq=False)
class Limit:
    """Of one wrapped model."""

    limit_bytes: int
    slab_bytes: int = 0  # of it, allocated for as long as the limit counts
    is_loading: bool = True

    @property
    def allowed_bytes(self) -> int:
        return self.limit_bytes + (LOADING_BYTES if self.is_loading else 0)


@dataclass
class _Device:
    fraction_before: float
    outside_bytes: int
    limits: list[Limit] = field(default_factory=list)


_lock = threading.Lock()
_devices: dict[int, _Device] = {}


def add(index: int, limit: Limit, reserved_bytes: int) -> None:
    """Before its slab is allocated. `reserved_bytes`: what the process has on the device by now. It is outside of the
    first limit; later it cannot be told apart from what wrapped models allocate."""
    with _lock:
        if index not in _devices:
            _devices[index] = _Device(_fraction(index), reserved_bytes)
        _devices[index].limits.append(limit)
        _apply(index)


def end_loading(index: int, limit: Limit, reserved_bytes: int) -> None:
    """Its model is loaded, and the limit is hard. If the model was on the device, it is no longer outside."""
    with _lock:
        device = _devices[index]
        limit.is_loading = False
        beside_bytes = reserved_bytes - sum(each.slab_bytes for each in device.limits)
        device.outside_bytes = min(device.outside_bytes, max(0, beside_bytes))
        _apply(index)


def num_limits(index: int) -> int:
    with _lock:
        return len(_devices[index].limits) if index in _devices else 0


def drop(index: int, limit: Limit) -> None:
    """With the last limit goes everything: the device is as it was."""
    with _lock:
        _devices[index].limits.remove(limit)
        _apply(index)
        if not _devices[index].limits:
            del _devices[index]


def _apply(index: int) -> None:
    device = _devices[index]
    fraction = device.fraction_before
    if device.limits:
        allowed_bytes = device.outside_bytes + sum(limit.allowed_bytes for limit in device.limits)
        fraction = min(fraction, allowed_bytes / _total_bytes(index))
    torch.cuda.set_per_process_memory_fraction(fraction, index)


def _fraction(index: int) -> float:
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not in every torch
    return 1.0 if read is None else float(read(index))


def _total_bytes(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).total_memory)
