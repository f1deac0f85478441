"""The update of a range on the host, by all threads that share it. Memory is the limit: every byte crosses it once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hightide.ir.chunk import ALIGN_NUMEL
from hightide.optim.c_kernel import CKernel
from hightide.optim.operands import Operands, Part
from hightide.optim.rule import Rule
from hightide.runtime.lanes.update_threads import UpdateThreads

# Torch makes several passes over a tile, which must stay in one core's cache meanwhile, and Python's lock is taken for
# each. The kernel in C makes one pass and takes its tiles without Python.
TORCH_TILE_NUMEL = 256 * 1024
C_TILE_NUMEL = 512 * 1024


class HostUpdate:
    """`kernel` says which way is used: "c" or "torch". They give the same bits where torch has fused multiply-add."""

    def __init__(
        self, rule: Rule, update_threads: UpdateThreads, kernel: str | None = None, tile_numel: int | None = None
    ) -> None:
        """`kernel` None: C where it can be had. `tile_numel` None: what is best for it."""
        assert kernel in (None, "c", "torch") and (tile_numel is None or tile_numel % ALIGN_NUMEL == 0)
        self._rule, self._update_threads = rule, update_threads
        self._compiled = None if kernel == "torch" else rule.kernel()
        if kernel == "c" and self._compiled is None:
            raise RuntimeError(f"the rule {rule.name!r} has no compiled kernel here; use kernel='torch' or None")
        self._tile_numel = tile_numel
        self._scratches: list[Tensor | None] = [None] * update_threads.num_threads

    @property
    def kernel(self) -> str:
        return "torch" if self._compiled is None else "c"

    def has_parts(self, operands: Operands, hyper: Any) -> bool:
        """Whether `update` can do it in parts."""
        return self._by_kernel(operands) is not None and self._rule.has_parts(hyper)

    def _by_kernel(self, operands: Operands) -> CKernel | None:
        param = None if operands.param is None else operands.param.dtype
        kernel = self._compiled
        return kernel if kernel is not None and kernel.supports(operands.grad.dtype, param) else None

    def update(
        self,
        operands: Operands,
        step: int,
        hyper: Any,
        scale: float | Tensor = 1.0,
        part: Part = Part.WHOLE,
    ) -> None:
        scale = float(scale)
        if (kernel := self._by_kernel(operands)) is not None:
            tile_numel = self._tile_numel or C_TILE_NUMEL
            work: Callable[[int], None] = kernel.share(operands, step, hyper, scale, tile_numel, part)
        else:
            assert part is Part.WHOLE
            tile_numel = self._tile_numel or TORCH_TILE_NUMEL
            work = self._by_torch(operands, step, hyper, scale, tile_numel)
        self._update_threads.run(work, -(-len(operands) // tile_numel))

    def _by_torch(
        self, operands: Operands, step: int, hyper: Any, scale: float, tile_numel: int
    ) -> Callable[[int], None]:
        starts = _Counter(len(operands), tile_numel)

        def work(thread: int) -> None:
            scratch = self._scratch(thread, tile_numel * (1 if operands.remainder is None else 2))
            try:
                while (start := starts.take()) is not None:
                    self._rule.update(operands[start : start + tile_numel], step, hyper, scale, scratch)
            except BaseException:
                starts.stop()
                raise

        return work

    def _scratch(self, thread: int, numel: int) -> Tensor:
        """One for all updates of a thread: fresh memory would cost a page fault every 4 KiB."""
        scratch = self._scratches[thread]
        if scratch is None or len(scratch) < numel:
            scratch = self._scratches[thread] = torch.empty(numel, dtype=torch.float32)
        return scratch[:numel]


class _Counter:
    """0, step, 2 * step, ... below `stop`: a thread that is slowed down takes fewer."""

    def __init__(self, stop: int, step: int) -> None:
        self._next, self._stop, self._step = 0, stop, step
        self._lock = threading.Lock()

    def take(self) -> int | None:
        with self._lock:
            start, self._next = self._next, self._next + self._step
        return start if start < self._stop else None

    def stop(self) -> None:
        with self._lock:
            self._next = self._stop
