"""A rule's arithmetic in C: addresses, types and the numbers that it works with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from hightide.optim import build
from hightide.optim.operands import Operands, Part
from hightide.runtime.lanes.kernel_threads import WorkInC

_NONE = 0
_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
Numbers = Callable[[int, Any, float], ctypes.Structure]  # of step, hyper-parameters and scale


def numbers_type(*names: str) -> type[ctypes.Structure]:
    """The struct `Hyper` of a kernel, all floats."""
    return type("Hyper", (ctypes.Structure,), {"_fields_": tuple((name, ctypes.c_float) for name in names)})


class _Update(ctypes.Structure):
    """As in kernels/ranges.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next", "tile_numel", "numel")),
        *((name, ctypes.c_void_p) for name in ("master", "grad", "first", "second", "param", "remainder", "hyper")),
        *((name, ctypes.c_int) for name in ("grad_type", "param_type", "part")),
    )


def load(name: str, numbers: Numbers) -> CKernel | None:
    """The function hightide_<name> of kernels/<name>.c, if it can be had here."""
    library = build.load(name)
    return None if library is None else CKernel(library, f"hightide_{name}", numbers)


class CKernel:
    """Rules with up to two fp32 states; a missing one is a null pointer."""

    def __init__(self, library: ctypes.CDLL, function: str, numbers: Numbers) -> None:
        self._library, self._numbers = library, numbers
        self._update = getattr(library, function)
        self._update.argtypes, self._update.restype = [ctypes.c_void_p], None

    def supports(self, grad: torch.dtype, param: torch.dtype | None) -> bool:
        """Whether it knows these dtypes: a gradient in fp32 or in the parameter's own. `param` None: the fp32 master is
        the parameter."""
        if param is None:
            return grad == torch.float32
        return param in (torch.bfloat16, torch.float16) and grad in (torch.float32, param)

    def share(
        self,
        operands: Operands,
        step: int,
        hyper: Any,
        scale: float,
        tile_numel: int,
        part: Part = Part.WHOLE,
    ) -> WorkInC:
        """One update as work for any number of threads at once: each takes tiles until none are left."""
        first, second = (*operands.states, None, None)[:2]
        param = operands.param
        assert self.supports(operands.grad.dtype, None if param is None else param.dtype)
        assert operands.grad.device.type == "cpu"
        arrays = (operands.master, operands.grad, first, second, param, operands.remainder)
        numbers = self._numbers(step, hyper, scale)
        arguments = _Update(
            0,
            tile_numel,
            len(operands),
            *(None if tensor is None else tensor.data_ptr() for tensor in arrays),
            ctypes.addressof(numbers),
            _NONE if scale == 0.0 else _TYPES[operands.grad.dtype],  # zero times infinity would be NaN
            _NONE if param is None else _TYPES[param.dtype],
            part,
        )
        return WorkInC(self._library, self._update, arguments, alive=(operands, numbers))
