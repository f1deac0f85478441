"""AdamW on contiguous ranges: by torch's own fused kernel, or on the host by a C kernel that gives the same bits.

The kernels work element by element. Torch's has vectors with a scalar tail, and the two may round differently. Ranges
are therefore cut only at multiples of ALIGN_NUMEL elements, a multiple of every vector length: then no cut makes a
tail, and results are the same bits however a chunk is cut into tiles, lanes or ranks.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hightide.ir.chunk import ALIGN_NUMEL, UPDATE_TILE_NUMEL
from hightide.optim import compiled
from hightide.optim.operands import Operands

TILE_NUMEL = UPDATE_TILE_NUMEL  # without a given scratch, an fp32 copy of so many gradients exists at a time
assert TILE_NUMEL % ALIGN_NUMEL == 0

_REFUSED = {
    "amsgrad": "it needs a third moment",
    "differentiable": "updates run outside of autograd",
    "capturable": "updates run on the host, or by hightide's own schedule, not inside a CUDA graph",
}


@dataclass(frozen=True)
class AdamWHyper:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


@dataclass(frozen=True)
class AdamWRule:
    name: str = "adamw"
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    moment_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    @property
    def num_moments(self) -> int:
        return len(self.moment_names)

    def check(self, group: Mapping[str, Any]) -> None:
        for option, reason in _REFUSED.items():
            if group.get(option):
                raise ValueError(
                    f"AdamW({option}=True) is not supported ({reason}); make the optimizer with {option}=False"
                )

    def read(self, group: Mapping[str, Any]) -> AdamWHyper:
        beta1, beta2 = group["betas"]
        return AdamWHyper(
            lr=float(group["lr"]),  # float() also of a tensor
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )

    def update(
        self,
        operands: Operands,
        step: int,
        hyper: AdamWHyper,
        scale: float | Tensor = 1.0,
        scratch: Tensor | None = None,
    ) -> None:
        steps = torch.full((), float(step), device=operands.master.device)
        if operands.grad.dtype == torch.float32 and isinstance(scale, float) and scale == 1.0:
            _fused(operands, operands.grad, steps, hyper)
            return
        if scratch is None:
            scratch = torch.empty(min(len(operands), TILE_NUMEL), dtype=torch.float32, device=operands.master.device)
        for start in range(0, len(operands), len(scratch)):
            tile = operands[start : start + len(scratch)]
            _fused(tile, _scaled(tile.grad, scale, scratch[: len(tile)]), steps, hyper)

    def kernel(self) -> AdamWKernel | None:
        library = compiled.load("adamw")
        return None if library is None else AdamWKernel(library)


def _scaled(grad: Tensor, scale: float | Tensor, scratch: Tensor) -> Tensor:
    """Not by torch's grad_scale: that divides, and writes the scaled gradient back. The product is taken in fp32."""
    if isinstance(scale, float) and scale == 0.0:
        return scratch.zero_()  # not a product: zero times infinity is NaN
    if grad.dtype == torch.float32:
        return torch.mul(grad, scale, out=scratch)
    scratch.copy_(grad)
    return scratch if isinstance(scale, float) and scale == 1.0 else scratch.mul_(scale)


def _fused(operands: Operands, grad: Tensor, steps: Tensor, hyper: AdamWHyper) -> None:
    first, second = operands.moments
    with torch.no_grad():
        torch._fused_adamw_(
            [operands.master],
            [grad],
            [first],
            [second],
            [],
            [steps],
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=hyper.maximize,
        )
        if operands.param is not None:
            operands.param.copy_(operands.master)


class _Hyper(ctypes.Structure):
    """As in kernels/adamw.c. Computed in double precision and rounded once, as torch does."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in ("decay", "lerp", "from_grad", "beta2", "square", "correction", "eps", "step_size", "scale")
    )


_NONE = 0
_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class AdamWKernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._update = library.hightide_adamw
        self._update.argtypes = [pointer, number, number, *[pointer] * 5, ctypes.c_int, ctypes.c_int, pointer]
        self._update.restype = None

    def supports(self, grad: torch.dtype, param: torch.dtype | None) -> bool:
        """A gradient in fp32 or in the parameter's own dtype."""
        if param is None:
            return grad == torch.float32
        return param in (torch.bfloat16, torch.float16) and grad in (torch.float32, param)

    def share(
        self, operands: Operands, step: int, hyper: AdamWHyper, scale: float, tile_numel: int
    ) -> Callable[[int], None]:
        first, second = operands.moments
        param = operands.param
        assert self.supports(operands.grad.dtype, None if param is None else param.dtype)
        assert all(tensor.device.type == "cpu" for tensor in (operands.master, operands.grad))
        numbers = _numbers(step, hyper, scale)
        next_tile = ctypes.c_int64(0)
        arguments = (
            ctypes.addressof(next_tile),
            tile_numel,
            len(operands),
            operands.master.data_ptr(),
            operands.grad.data_ptr(),
            first.data_ptr(),
            second.data_ptr(),
            None if param is None else param.data_ptr(),
            _NONE if scale == 0.0 else _TYPES[operands.grad.dtype],  # zero times infinity would be NaN
            _NONE if param is None else _TYPES[param.dtype],
            ctypes.addressof(numbers),
        )
        alive = (operands, numbers, next_tile)  # what the addresses point to

        def work(_: int) -> None:
            assert alive
            self._update(*arguments)  # without Python's lock

        return work


def _numbers(step: int, hyper: AdamWHyper, scale: float) -> _Hyper:
    weight = ctypes.c_float(1 - hyper.beta1).value
    is_small = weight < 0.5  # torch's lerp starts from the nearer end
    return _Hyper(
        decay=1 - hyper.lr * hyper.weight_decay,
        lerp=weight if is_small else weight - 1,
        from_grad=0.0 if is_small else 1.0,
        beta2=hyper.beta2,
        square=1 - hyper.beta2,
        correction=math.sqrt(1 - hyper.beta2**step),
        eps=hyper.eps,
        step_size=-(hyper.lr / (1 - hyper.beta1**step)),
        scale=-scale if hyper.maximize else scale,
    )
