"""An fp32 master as a bf16 parameter and what it lacks.

[Note: masters in two parts] bf16 is the upper half of fp32, rounded to the nearest. So a master is its parameter's
bits, followed by 16 zeros, plus a signed 16-bit remainder: two bytes instead of four, and nothing is
rounded, but for one case. Halfway between two parameters the nearest even one is taken, and if that is the lower one
the remainder is +32768, one more than 16 bits hold. It becomes 32767: one master in 2^17 is one fp32 ulp too small, as
if its update had been rounded otherwise. The parameter is the nearest even one in any case. Whoever reads a master
gets it whole from `Homes.own_master`; a checkpoint keeps both parts (checkpoint/places.py).
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

LARGEST = 2**15 - 1
BLOCK = 1024


def join(param: Tensor, remainder: Tensor, out: Tensor | None = None) -> Tensor:
    """The master. `out`: fp32, as many elements."""
    master = torch.empty_like(param, dtype=torch.float32) if out is None else out
    if _has_kernels(param):
        with on_device_of(param):
            _join[_grid(param)](
                param.view(torch.int16), remainder, master.view(torch.int32), param.numel(), BLOCK=BLOCK
            )
    else:
        _join_by_torch(param, remainder, master)
    return master


def split(master: Tensor, param: Tensor, remainder: Tensor, scratch: Tensor | None = None) -> None:
    """Writes both parts. Torch's operations need as much memory as the master has: `scratch`, fp32, or new."""
    if _has_kernels(param):
        with on_device_of(param):
            _split[_grid(param)](master, param, remainder, param.numel(), BLOCK=BLOCK)
    else:
        _split_by_torch(master, param, remainder, scratch)


def _join_by_torch(param: Tensor, remainder: Tensor, master: Tensor) -> None:
    bits = master.view(torch.int32)
    bits.copy_(param.view(torch.int16)).bitwise_left_shift_(16).add_(remainder)


def _split_by_torch(master: Tensor, param: Tensor, remainder: Tensor, scratch: Tensor | None = None) -> None:
    param.copy_(master)
    bits = torch.empty_like(master, dtype=torch.int32) if scratch is None else scratch.view(torch.int32)
    bits.copy_(param.view(torch.int16)).bitwise_left_shift_(16)
    torch.sub(master.view(torch.int32), bits, out=bits)
    remainder.copy_(bits.clamp_(-LARGEST - 1, LARGEST))  # beyond that lie only NaNs, which stay NaNs


def _grid(param: Tensor) -> tuple[int]:
    return (triton.cdiv(param.numel(), BLOCK),)


def _has_kernels(tensor: Tensor) -> bool:
    usable = triton is not None and tensor.is_cuda and tensor.is_contiguous() and own_kernels_allowed()
    return usable and _agree(tensor.device)


if triton is not None:
    # No annotations but constexpr: Triton would look for them on the GPU.
    @triton.jit
    def _join(param, remainder, master, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        high = tl.load(param + at, mask=inside).to(tl.int32) << 16
        tl.store(master + at, high + tl.load(remainder + at, mask=inside).to(tl.int32), mask=inside)

    @triton.jit
    def _split(master, param, remainder, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        whole = tl.load(master + at, mask=inside)
        rounded = whole.to(tl.bfloat16)
        high = rounded.to(tl.int16, bitcast=True).to(tl.int32) << 16
        rest = whole.to(tl.int32, bitcast=True) - high
        rest = tl.minimum(tl.maximum(rest, -32768), 32767)  # as LARGEST
        tl.store(param + at, rounded, mask=inside)
        tl.store(remainder + at, rest.to(tl.int16), mask=inside)


@functools.cache
def _agree(device: torch.device) -> bool:
    """Whether the kernels give the bits that torch's operations give."""

    def attempt() -> str | None:
        bits = torch.randint(-(2**31), 2**31, (3, 5000), generator=torch.Generator().manual_seed(0))
        bits[1] = bits[1] & ~0xFFFF | 0x8000  # halfway
        master = bits.to(torch.int32).to(device).view(torch.float32)
        master = torch.where(master.isnan(), 0.0, master).flatten()
        ours, theirs = (
            (torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16))
            for _ in range(2)
        )
        joined, expected = torch.empty_like(master), torch.empty_like(master)
        _split_by_torch(master, *theirs)
        with on_device_of(master):
            _split[_grid(master)](master, *ours, master.numel(), BLOCK=BLOCK)
            high = ours[0].view(torch.int16)
            _join[_grid(master)](high, ours[1], joined.view(torch.int32), master.numel(), BLOCK=BLOCK)
        _join_by_torch(*theirs, expected)
        parts = zip((*ours, joined), (*theirs, expected), strict=True)
        wrong = sum(int((one.view(torch.uint8) != other.view(torch.uint8)).sum()) for one, other in parts)
        return f"{wrong} bytes differ" if wrong else None

    return passes("of master copies", device, attempt)
