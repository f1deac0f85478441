"""The limit of a GPU tier, made hard: torch's allocator refuses to reserve more.

The allocator knows one number per device. So limits of several wrapped models add up, and what the process had
reserved before the first of them comes on top: it is outside of every limit. A lower fraction that somebody else has
set stays in force.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch


@dataclass
class _Device:
    fraction_before: float
    outside_bytes: int
    limits_bytes: list[int] = field(default_factory=list)


_lock = threading.Lock()
_devices: dict[int, _Device] = {}


def add(index: int, limit_bytes: int, outside_bytes: int) -> None:
    """`outside_bytes`: what the process holds on the device besides. Taken from the first limit only: afterwards it
    cannot be told apart from what wrapped models allocate."""
    with _lock:
        if index not in _devices:
            _devices[index] = _Device(_fraction(index), outside_bytes)
        _devices[index].limits_bytes.append(limit_bytes)
        _apply(index)


def drop(index: int, limit_bytes: int) -> None:
    """With the last limit goes everything: the device is as it was."""
    with _lock:
        _devices[index].limits_bytes.remove(limit_bytes)
        _apply(index)
        if not _devices[index].limits_bytes:
            del _devices[index]


def _apply(index: int) -> None:
    device = _devices[index]
    fraction = device.fraction_before
    if device.limits_bytes:
        allowed_bytes = device.outside_bytes + sum(device.limits_bytes)
        fraction = min(fraction, allowed_bytes / _total_bytes(index))
    torch.cuda.set_per_process_memory_fraction(fraction, index)


def _fraction(index: int) -> float:
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not in every torch
    return 1.0 if read is None else float(read(index))


def _total_bytes(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).total_memory)
