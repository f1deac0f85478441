"""A store that is no memory: a plain file, by plain reads and writes. Whatever works on it uses no views."""

from __future__ import annotations

import os
import tempfile

import torch

from hightide.ir.tier import Tier
from hightide.stores.store import Region, Store
from hightide.stores.ticket import Ticket


class FileStore(Store):
    starts_zeroed = True

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(Tier.DISK, capacity_bytes)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (close() closes it)
        self._file.truncate(capacity_bytes)

    def read(self, region: Region, into: torch.Tensor, offset_bytes: int = 0) -> Ticket:
        with self._lock:
            self._check_bounds(region, into.dtype, offset_bytes, into.numel())

        def copy() -> None:
            data = self._transfer(os.pread, into.nbytes, region.offset + offset_bytes)
            values = torch.frombuffer(bytearray(data), dtype=into.dtype) if data else torch.empty(0, dtype=into.dtype)
            with torch.no_grad():
                into.copy_(values.view(into.shape))

        return self._in_ticket(f"read {region.label}", copy)

    def write(self, region: Region, source: torch.Tensor, offset_bytes: int = 0) -> Ticket:
        with self._lock:
            self._check_bounds(region, source.dtype, offset_bytes, source.numel())

        def copy() -> None:
            data = source.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            self._transfer(os.pwrite, data, region.offset + offset_bytes)

        return self._in_ticket(f"write {region.label}", copy)

    def _transfer(self, call, what, offset: int):  # type: ignore[no-untyped-def]
        """`os.pread` or `os.pwrite`, whole: these files are far smaller than what one call can move."""
        return call(self._file.fileno(), what, offset)

    def close(self) -> None:
        super().close()
        self._file.close()
