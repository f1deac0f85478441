"""The backward of an nn.Linear by hand, into gradients that exist.

Autograd would make a weight's gradient in the compute dtype and then add it to the fp32 sum: for the head of a language
model that is more memory traffic than one tile's matrix multiplication can hide. Here the multiplication adds to the
sum itself, where torch can do that.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from hightide.planner.loss_tiles import LOSS_SLICE_BYTES
from hightide.runtime.head.cross_entropy import tiles

Sums = tuple[Tensor | None, Tensor | None]  # of weight and bias


class LinearBackward:
    """For one backward, tile by tile. The weights must stay bound as long as it lives."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, sums: Sums) -> None:
        """`dtype`: of the output. Under autocast it differs from that of the parameters."""
        self._weight = linear.weight.detach().to(dtype)
        self._sums = sums

    def __call__(self, rows: Tensor, grad: Tensor, rows_grad: Tensor | None) -> None:
        """Adds to the parameters' gradients; writes the gradient of the rows into `rows_grad`."""
        weight_sum, bias_sum = self._sums
        if rows_grad is not None:
            if rows_grad.dtype == grad.dtype:
                torch.mm(grad, self._weight, out=rows_grad)
            else:
                rows_grad.copy_(torch.mm(grad, self._weight))
        if weight_sum is not None:
            add_product(weight_sum, grad.t(), rows.detach().to(grad.dtype))
        if bias_sum is not None:
            bias_sum.add_(grad.sum(0, dtype=torch.promote_types(grad.dtype, bias_sum.dtype)))


def gradients_of(linear: nn.Linear) -> Sums:
    """While they are bound."""
    return _gradient(linear.weight), _gradient(linear.bias)


def zeros_for(linear: nn.Linear) -> Sums:
    """To sum in before gradients are bound."""
    weight, bias = (
        None if param is None or not param.requires_grad else torch.zeros_like(param, dtype=torch.float32)
        for param in (linear.weight, linear.bias)
    )
    return weight, bias


def add_scaled(linear: nn.Linear, sums: Sums, factor: Tensor) -> None:
    """`sums`, which are used up, to the bound gradients."""
    for total, found in zip(gradients_of(linear), sums, strict=True):
        if total is not None and found is not None:
            total.add_(found.mul_(factor))


def _gradient(param: Tensor | None) -> Tensor | None:
    if param is None or not param.requires_grad:
        return None
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def add_product(total: Tensor, left: Tensor, right: Tensor, slice_bytes: int = LOSS_SLICE_BYTES) -> None:
    """`total += left @ right`, in place: a gradient whose version has not changed counts as not received."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.dtype == torch.float32 and sums_in_fp32(left.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        slice_rows = max(1, slice_bytes // (total.shape[1] * left.element_size()))
        for rows in tiles(len(total), slice_rows):
            total[rows].add_(torch.mm(left[rows], right))


@cache
def sums_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Can torch add a product of 16-bit matrices to an fp32 one? On CUDA only, and early versions with `out_dtype` want
    the sum in 16 bits too: so it is tried."""
    if device.type != "cuda":
        return False
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    factor = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return True
