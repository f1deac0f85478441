"""How much of each tier a run may use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hightide.ir.foreign import quoted, user_path
from hightide.ir.units import parse_bytes

_SEVERAL = re.compile(r":\s*\d[^:,/]*,")  # a size, and more after it


@dataclass(frozen=True)
class DiskLimit:
    path: str
    num_bytes: int


@dataclass(frozen=True)
class Limits:
    """Upper bounds per tier. `None` means: whatever the machine has. `gpu` is each rank's; `host` and `disk` are a
    node's, of which each of its ranks has an equal share.

    >>> Limits(gpu="24GiB", host="96GiB", disk="/scratch:200GiB").gpu
    25769803776
    """

    gpu: int | str | None = None
    host: int | str | None = None
    disk: str | Sequence[str | DiskLimit] | None = None

    def __post_init__(self) -> None:
        if self.gpu is not None:
            object.__setattr__(self, "gpu", parse_bytes(self.gpu, "Limits(gpu)"))
        if self.host is not None:
            object.__setattr__(self, "host", parse_bytes(self.host, "Limits(host)"))
        object.__setattr__(self, "disk", parse_disks(self.disk, "Limits(disk)"))

    @property
    def gpu_bytes(self) -> int | None:
        assert self.gpu is None or isinstance(self.gpu, int)
        return self.gpu

    @property
    def host_bytes(self) -> int | None:
        assert self.host is None or isinstance(self.host, int)
        return self.host

    @property
    def disks(self) -> tuple[DiskLimit, ...]:
        return tuple(disk for disk in self.disk or () if isinstance(disk, DiskLimit))

    @property
    def disk_bytes(self) -> int:
        return sum(disk.num_bytes for disk in self.disks)


def parse_disks(value: str | Sequence[str | DiskLimit] | None, name: str) -> tuple[DiskLimit, ...]:
    """Turns "/scratch:200GiB" into a limit. `name` is what an error calls the value."""
    if value is None:
        return ()
    entries = list(value) if isinstance(value, list | tuple) else [value]
    disks: list[DiskLimit] = []
    for entry in entries:
        if isinstance(entry, DiskLimit):
            disks.append(entry)
            continue
        path, colon, size = entry.rpartition(":") if isinstance(entry, str) else ("", "", "")
        if not colon or not path:
            raise ValueError(f"{name}={quoted(entry)} is not a folder and a size; write '/path:200GiB'")
        if _SEVERAL.search(path):
            raise ValueError(
                f"{name}={quoted(entry)} is more than one folder; give each by itself, in a list or one option each"
            )
        disks.append(DiskLimit(str(user_path(path, name)), parse_bytes(size, f"{name} of {quoted(path)}")))
    paths = [disk.path for disk in disks]
    if len(set(paths)) != len(paths):
        raise ValueError(f"{name} names a folder twice: {quoted(paths)}; give each folder once, with its whole size")
    return tuple(disks)
