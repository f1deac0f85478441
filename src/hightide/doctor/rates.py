"""Rates of processor, GPU and their memories by themselves: matrix products and passes over memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hightide.ir.machine import MatmulRates
from hightide.profiler.trial.quiet import float32_precision

MATMUL_SIZES = (256, 512, 1024, 2048, 4096, 8192)
LONG_ENOUGH_S = 0.02  # of one product: a larger one would not be faster
MEASURE_S = 0.2


def best_s(work: Callable[[], object], repeats: int) -> float:
    """The shortest of so many, after one that does not count."""
    work()
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return min(times)


def matmul_rates(device: torch.device) -> MatmulRates:
    def rate(dtype: torch.dtype, precision: str = "highest") -> float:
        with float32_precision(precision):
            return _matmul_rate(device, dtype)

    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return MatmulRates(
        bfloat16=rate(torch.bfloat16),
        float16=rate(torch.float16),
        float32=rate(torch.float32),
        tf32=rate(torch.float32, "high") if has_tf32 else None,
    )


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Of the largest square product that is worth its time, repeated for a while: clocks settle meanwhile. Bursts of
    smaller ones may be faster, but no step is one."""
    for size in MATMUL_SIZES:
        a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
        out = torch.empty(size, size, device=device, dtype=dtype)

        def product(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
            torch.mm(a, b, out=out)

        if size == MATMUL_SIZES[-1] or _sustained_s(product, device, 0.0) >= LONG_ENOUGH_S:
            break
    return 2 * size**3 / _sustained_s(product, device, MEASURE_S)


def gpu_memory_rate(device: torch.device, num_bytes: int) -> float:
    """Read and written bytes per second of a copy inside the accelerator's memory."""
    a, b = (torch.ones(num_bytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * a.nbytes / _sustained_s(lambda: b.copy_(a), device, MEASURE_S)


def _sustained_s(work: Callable[[], object], device: torch.device, least_s: float) -> float:
    """Seconds of one, on average over at least `least_s`."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    synchronize()
    count, elapsed_s = 0, 0.0
    started_s = time.perf_counter()
    while elapsed_s < least_s or count < 2:
        for _ in range(4 if device.type == "cuda" else 1):  # a queue: the GPU does not wait for Python
            work()
            count += 1
        synchronize()
        elapsed_s = time.perf_counter() - started_s
    return elapsed_s / count


def dram_rates(numel: int, num_threads: int, repeats: int) -> dict[str, float]:
    """Bytes per second of host memory as torch reaches it with so many threads, whatever OMP_NUM_THREADS says.

    A copy reads its target's lines too before it writes them, uncounted: it shows less than the memory moves. `scale`
    and `add` write only where they have read, like an update."""
    a, b = (torch.full((numel,), 1.0) for _ in range(2))
    probes: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (8, lambda: b.copy_(a)),
        "read": (4, a.sum),
        "scale": (8, lambda: b.mul_(1.0)),
        "add": (12, lambda: b.add_(a)),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return {name: size * numel / best_s(work, repeats) for name, (size, work) in probes.items()}
    finally:
        torch.set_num_threads(before)
