"""Cross-entropy of rows of logits, and its gradient by hand: in few passes over memory, and in one small scratch.

[Note: softmax in passes] Logits are large and arithmetic costs nothing beside them, so what counts is how often they
cross memory. Torch's own kernels for log-softmax read 16-bit logits and write fp32, and their backward writes 16 bits,
so nothing is ever converted for itself. A few rows at a time, in fp32 (fp64 for fp64 logits):

    forward   first = log_softmax(logits) | the target's element of each row
    backward  first = log_softmax(logits) | second = gradient of `first`: at the target | gradient of the logits

That is 6 bytes per bf16 logit in forward and 16 in backward, and the arithmetic of F.cross_entropy itself. The
gradient may be written over the logits. Two kernels per tile of rows in forward, four in backward, and none that the
host waits for. Where torch's kernels do not convert (on the CPU; bf16 in many versions), a copy does.

On CUDA two kernels of our own do better (row_kernels.py): 2 bytes per bf16 logit in forward, 4 in backward, one kernel
each for a whole tile. They need each row's maximum and sum of exponentials, which wait for backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hightide.runtime.head import row_kernels

aten = torch.ops.aten


@dataclass(frozen=True)
class CrossEntropy:
    """The options of `F.cross_entropy`, less its tensors."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def normaliser(self, target: Tensor, weight: Tensor | None) -> Tensor:
        """What "mean" divides by: the number of rows that count, or the sum of their weights."""
        counts = target != self.ignore_index
        if weight is None:
            return counts.sum()
        weights = weight[torch.where(counts, target, 0)]
        return torch.where(counts, weights, 0).to(torch.promote_types(weight.dtype, torch.float32)).sum()


@dataclass(frozen=True)
class Labels:
    """Targets as columns, one row per row of logits."""

    index: Tensor  # int64; 0 where ignored
    counts: Tensor  # bool
    weight: Tensor | None  # of the row's class
    class_weight: Tensor | None  # of all classes
    num_classes: int
    smoothing: float

    @classmethod
    def of(
        cls, target: Tensor, weight: Tensor | None, options: CrossEntropy, num_classes: int, dtype: torch.dtype
    ) -> Labels:
        target = target.unsqueeze(1)
        counts = target != options.ignore_index
        index = torch.where(counts, target, 0)
        class_weight = None if weight is None else weight.to(dtype)
        row_weight = None if class_weight is None else class_weight[index]
        return cls(index, counts, row_weight, class_weight, num_classes, options.label_smoothing)


@dataclass(frozen=True)
class RowNumbers:
    """What forward finds, as columns of one number per row."""

    target: Tensor  # log-probability of the target
    maximum: Tensor  # with our own kernels only
    total: Tensor  # likewise: sum of exp(logit - maximum)
    weighted: Tensor | None  # with label smoothing: sum of log-probability * class weight over all classes

    @classmethod
    def empty(cls, num_rows: int, dtype: torch.dtype, device: torch.device, smoothing: float) -> RowNumbers:
        columns = [torch.empty(num_rows, 1, dtype=dtype, device=device) for _ in range(4 if smoothing else 3)]
        return cls(columns[0], columns[1], columns[2], columns[3] if smoothing else None)

    def __getitem__(self, rows: slice) -> RowNumbers:
        weighted = None if self.weighted is None else self.weighted[rows]
        return RowNumbers(self.target[rows], self.maximum[rows], self.total[rows], weighted)

    def losses(self, labels: Labels) -> Tensor:
        losses = -self.target if labels.weight is None else -self.target * labels.weight
        if self.weighted is not None:
            losses = losses * (1 - labels.smoothing) - self.weighted * (labels.smoothing / labels.num_classes)
        return torch.where(labels.counts, losses, 0).squeeze(1)


@dataclass(frozen=True)
class RowGradients:
    """The gradient of each row's log-probabilities, as columns: `target` at the target, and with label smoothing
    `spread` * class weight everywhere."""

    target: Tensor
    spread: Tensor | None
    class_weight: Tensor | None
    maximum: Tensor  # as forward has found it
    total: Tensor

    @classmethod
    def of(cls, labels: Labels, row_grads: Tensor, maximum: Tensor, total: Tensor) -> RowGradients:
        """`row_grads`: of the row losses. Ignored rows get exactly zero."""
        grads = -torch.where(labels.counts, row_grads.unsqueeze(1).to(total.dtype), 0)
        target = grads if labels.weight is None else grads * labels.weight
        if not labels.smoothing:
            return cls(target, None, labels.class_weight, maximum, total)
        target, spread = target * (1 - labels.smoothing), grads * (labels.smoothing / labels.num_classes)
        return cls(target, spread, labels.class_weight, maximum, total)

    def __getitem__(self, rows: slice) -> RowGradients:
        spread = None if self.spread is None else self.spread[rows]
        columns = self.maximum[rows], self.total[rows]
        return RowGradients(self.target[rows], spread, self.class_weight, *columns)


@dataclass(frozen=True)
class Scratch:
    """Room for two arrays of a few rows, made when they are needed."""

    num_rows: int
    num_classes: int
    dtype: torch.dtype
    device: torch.device

    @functools.cached_property
    def arrays(self) -> Tensor:
        return torch.empty(2, self.num_rows, self.num_classes, dtype=self.dtype, device=self.device)

    def __len__(self) -> int:
        return self.num_rows

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """In the first one. The second may be used on the way."""
        first = self.arrays[0, : len(logits)]
        if logits.dtype == first.dtype:
            aten._log_softmax.out(logits, 1, False, out=first)
        elif converts(logits.device, logits.dtype):
            aten._log_softmax.out(logits, 1, True, out=first)
        else:
            second = self.arrays[1, : len(logits)]
            aten._log_softmax.out(second.copy_(logits), 1, False, out=first)
        return first


def measure(logits: Tensor, index: Tensor, class_weight: Tensor | None, numbers: RowNumbers, scratch: Scratch) -> None:
    """Fills `numbers`. See [Note: softmax in passes]."""
    if numbers.weighted is None and row_kernels.usable(logits):
        row_kernels.measure(logits, index, numbers.maximum, numbers.total, numbers.target)
        return
    for rows in tiles(len(logits), len(scratch)):
        log_probabilities = scratch.log_probabilities(logits[rows])
        torch.gather(log_probabilities, 1, index[rows], out=numbers.target[rows])
        if numbers.weighted is not None:
            if class_weight is not None:
                log_probabilities.mul_(class_weight)
            torch.sum(log_probabilities, 1, keepdim=True, out=numbers.weighted[rows])


def write_gradient(logits: Tensor, index: Tensor, gradients: RowGradients, scratch: Scratch, out: Tensor) -> None:
    """The gradient of `logits` into `out`, which may be the logits themselves. See [Note: softmax in passes]."""
    if gradients.spread is None and row_kernels.usable(logits):
        row_kernels.write_gradient(logits, index, gradients.maximum, gradients.total, gradients.target, out)
        return
    is_read = logits.dtype == scratch.dtype or converts(logits.device, logits.dtype)  # without the second array
    clean = gradients.spread is None and is_read
    if clean:
        scratch.arrays[1].zero_()
    for rows in tiles(len(logits), len(scratch)):
        part = gradients[rows]
        log_probabilities = scratch.log_probabilities(logits[rows])
        second = scratch.arrays[1, : rows.stop - rows.start]
        if part.spread is not None:
            second.copy_(part.spread.expand_as(second))
            if part.class_weight is not None:
                second.mul_(part.class_weight)
        elif not clean:
            second.zero_()
        second.scatter_add_(1, index[rows], part.target)
        if out.dtype == second.dtype or (out.dtype == logits.dtype and is_read):
            aten._log_softmax_backward_data.out(second, log_probabilities, 1, out.dtype, out=out[rows])
        else:
            # In place: each element is read before it is written, by the same thread.
            aten._log_softmax_backward_data.out(second, log_probabilities, 1, second.dtype, out=log_probabilities)
            out[rows].copy_(log_probabilities)
        if clean:
            second.scatter_(1, index[rows], 0.0)


@functools.cache
def converts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's kernels read this dtype and write fp32, and back. Not on the CPU."""
    if device.type == "cpu" or dtype not in (torch.float16, torch.bfloat16):
        return False
    logits = torch.zeros(1, 2, dtype=dtype, device=device)
    wide = torch.zeros(1, 2, device=device)
    try:
        aten._log_softmax.out(logits, 1, True, out=wide)
        aten._log_softmax_backward_data.out(wide, wide.clone(), 1, dtype, out=logits)
    except RuntimeError:
        return False
    return True


def tiles(num_rows: int, tile_rows: int) -> Iterator[slice]:
    assert tile_rows > 0
    for start in range(0, num_rows, tile_rows):
        yield slice(start, min(start + tile_rows, num_rows))
