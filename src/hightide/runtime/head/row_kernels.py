"""The two passes of cross-entropy over logits as Triton kernels: each reads the logits once, in any dtype, and needs no
scratch. Triton comes with torch on CUDA. Without it, or where its results are not those of torch's own operations (this
is tried once), cross_entropy.py goes through the logits with torch's kernels: several times, same results to rounding.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hightide.process.system import own_kernels_allowed
from hightide.runtime.head.kernel_trial import on_device_of, passes

try:
    import triton
    import triton.language as tl
except ImportError:  # torch without CUDA
    triton = None

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 8192


def usable(logits: Tensor) -> bool:
    if triton is None or not logits.is_cuda or logits.dtype not in DTYPES or logits.stride(1) != 1:
        return False
    return own_kernels_allowed() and _agree(logits.device, logits.dtype)


def measure(logits: Tensor, index: Tensor, maximum: Tensor, total: Tensor, target: Tensor) -> None:
    """For each row its maximum, the sum of exp(logit - maximum), and the log-probability of the class at `index`. All
    but the logits are columns."""
    with on_device_of(logits):
        _measure[(len(logits),)](
            logits, index, maximum, total, target, logits.stride(0), logits.shape[1], BLOCK=BLOCK, num_warps=16
        )


def write_gradient(
    logits: Tensor, index: Tensor, maximum: Tensor, total: Tensor, at_target: Tensor, out: Tensor
) -> None:
    """The gradient of the logits, where that of each row's log-probabilities is `at_target` at `index` and zero
    elsewhere. `out` may be the logits."""
    assert out.stride(1) == 1
    grid = (len(logits), triton.cdiv(logits.shape[1], BLOCK))
    strides = logits.stride(0), out.stride(0)
    with on_device_of(logits):
        _gradient[grid](
            logits, index, maximum, total, at_target, out, *strides, logits.shape[1], BLOCK=BLOCK, num_warps=8
        )


if triton is not None:
    # No annotations but constexpr: Triton would look for them on the GPU.
    @triton.jit
    def _measure(logits, index, maximum, total, target, stride, num_classes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        first = logits + row * stride
        columns = tl.arange(0, BLOCK)
        top = -float("inf")
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, num_classes, BLOCK):
            inside = start + columns < num_classes
            x = tl.load(first + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            finite = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf would be NaN
            sums = sums * tl.exp(top - finite) + tl.exp(x - finite)
            top = higher
        sum_of_row = tl.sum(sums, 0)
        at = tl.load(index + row)
        known = (at >= 0) & (at < num_classes)  # torch's own kernels would stop the device; here it shows as NaN
        chosen = tl.where(known, tl.load(first + at, mask=known, other=0.0).to(tl.float32), float("nan"))
        tl.store(maximum + row, top)
        tl.store(total + row, sum_of_row)
        tl.store(target + row, (chosen - top) - tl.log(sum_of_row))

    @triton.jit
    def _gradient(  # type: ignore[no-untyped-def]
        logits, index, maximum, total, at_target, out, stride, out_stride, num_classes, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < num_classes
        x = tl.load(logits + row * stride + columns, mask=inside).to(tl.float32)
        gradient = tl.load(at_target + row)
        probability = tl.exp(x - tl.load(maximum + row)) / tl.load(total + row)
        at = tl.load(index + row)
        known = (at >= 0) & (at < num_classes)
        result = tl.where(columns == at, gradient, 0.0) - probability * tl.where(known, gradient, float("nan"))
        tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@functools.cache
def _agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether both kernels give what torch gives, on a small example. Asked once."""

    def attempt() -> str | None:
        generator = torch.Generator().manual_seed(0)
        logits = (torch.randn(3, BLOCK + 77, generator=generator) * 5).to(device, dtype)
        index = torch.tensor([[0], [BLOCK + 76], [4711]], device=device)
        gradient = torch.tensor([[-1.0], [0.0], [-0.25]], device=device)
        maximum, total, target = (torch.empty(3, 1, device=device) for _ in range(3))
        out = torch.empty_like(logits)
        measure(logits, index, maximum, total, target)
        write_gradient(logits, index, maximum, total, gradient, out)
        expected = torch.log_softmax(logits.double(), 1)
        slope = torch.zeros_like(expected).scatter_(1, index, gradient.double()) - expected.exp() * gradient.double()
        error = max(
            float((target.double() - expected.gather(1, index)).abs().max()) / 10,
            float((out.double() - slope).abs().max() / torch.finfo(dtype).eps) * 1e-6,
        )
        return None if error <= 1e-6 else f"they are off by {error:.1e}"

    return passes(f"of the loss, for {dtype},", device, attempt)
