"""The autocast state of a call, to be restored where autograd has none: inside backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch


class Autocast(NamedTuple):
    enabled: bool
    dtype: torch.dtype
    device_type: str = "cpu"

    @classmethod
    def capture(cls, device_type: str = "cpu") -> Autocast:
        return cls(torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type), device_type)

    def restored(self) -> AbstractContextManager[object]:
        """Without autocast's cast cache: keyed by parameter, it would return the weights that the slot held before."""
        if not self.enabled and not torch.is_autocast_enabled(self.device_type):
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)
