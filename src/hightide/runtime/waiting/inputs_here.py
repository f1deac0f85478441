"""Inputs of a call that wait for its backward on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from hightide.ir.refusal import Refused
from hightide.runtime.waiting.held import MODIFIED


class InputsHere:
    """In the place of autograd, which would not let go of one before its backward."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._versions = [tensor._version for tensor in tensors]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self | None:
        """None: autograd has to save them. Somebody has a say in that, or it refuses them."""
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        return None if has_hooks or any(tensor.is_inference() for tensor in tensors) else cls(tensors)

    def keep_only(self, which: Sequence[bool]) -> None:
        self.tensors = [tensor for tensor, stays in zip(self.tensors, which, strict=True) if stays]
        self._versions = [version for version, stays in zip(self._versions, which, strict=True) if stays]

    def checked(self) -> list[Tensor]:
        for tensor, version in zip(self.tensors, self._versions, strict=True):
            if tensor._version != version:
                raise Refused(MODIFIED.format(shape=tuple(tensor.shape)))
        return self.tensors
