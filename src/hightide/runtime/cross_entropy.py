"""Cross-entropy of rows of logits, and its gradient by hand: in few passes over memory, and in one small scratch.

[Note: softmax in passes] Logits are large and arithmetic costs nothing beside them, so what counts is how often they
cross memory. All sums run in fp32 (fp64 for fp64 logits), a few rows at a time:

    forward   maximum of rows | scratch = logits - maximum | scratch = exp(scratch) | total = sum(scratch)
    backward                    scratch = logits - maximum | scratch = exp(scratch) | gradient = scratch * (g / total)

That is 20 bytes per bf16 logit each. Maximum and total wait for backward (one number per row), so that it needs no
reduction; they stay apart, because logits that are large all together would lose digits in maximum + log(total). The
gradient may be written over the logits. The target's own element follows from the row's numbers and is put in last.
Three kernels per tile of rows in each direction, and none that the host waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


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

    @property
    def weight_sum(self) -> Tensor | int:
        """Over all classes: what smoothing spreads the target over."""
        return self.num_classes if self.class_weight is None else self.class_weight.sum()


@dataclass(frozen=True)
class RowNumbers:
    """What the passes of forward find, as columns of one number per row."""

    maximum: Tensor
    total: Tensor  # sum of exp(logit - maximum)
    target: Tensor  # the target's logit - maximum
    weighted: Tensor | None  # with label smoothing: sum of (logit - maximum) * class weight

    @classmethod
    def empty(cls, num_rows: int, dtype: torch.dtype, device: torch.device, smoothing: float) -> RowNumbers:
        columns = [torch.empty(num_rows, 1, dtype=dtype, device=device) for _ in range(4 if smoothing else 3)]
        return cls(columns[0], columns[1], columns[2], columns[3] if smoothing else None)

    def __getitem__(self, rows: slice) -> RowNumbers:
        weighted = None if self.weighted is None else self.weighted[rows]
        return RowNumbers(self.maximum[rows], self.total[rows], self.target[rows], weighted)

    def losses(self, labels: Labels) -> Tensor:
        log_total = self.total.log()
        losses = log_total - self.target
        if labels.weight is not None:
            losses = losses * labels.weight
        if self.weighted is not None:
            spread = log_total * labels.weight_sum - self.weighted
            losses = losses * (1 - labels.smoothing) + spread * (labels.smoothing / labels.num_classes)
        return torch.where(labels.counts, losses, 0).squeeze(1)


@dataclass(frozen=True)
class RowGradients:
    """What the passes of backward need, as columns: the gradient is exp(logit - maximum) * scale - spread * class
    weight, and `target` at the target."""

    maximum: Tensor
    scale: Tensor
    target: Tensor
    spread: Tensor | None  # with label smoothing
    class_weight: Tensor | None

    @classmethod
    def of(cls, numbers: RowNumbers, labels: Labels, row_grads: Tensor) -> RowGradients:
        """`row_grads`: of the row losses. Ignored rows get exactly zero."""
        grads = torch.where(labels.counts, row_grads.unsqueeze(1).to(numbers.total.dtype), 0)
        at_target = numbers.target - numbers.total.log()
        sure = grads if labels.weight is None else grads * labels.weight
        if numbers.weighted is None:
            return cls(numbers.maximum, sure / numbers.total, sure * at_target.expm1(), None, labels.class_weight)
        sure = sure * (1 - labels.smoothing)
        spread = grads * (labels.smoothing / labels.num_classes)
        both = sure + spread * labels.weight_sum
        own = 1 if labels.weight is None else labels.weight
        target = sure * at_target.expm1() + spread * (at_target.exp() * labels.weight_sum - own)
        return cls(numbers.maximum, both / numbers.total, target, spread, labels.class_weight)

    def __getitem__(self, rows: slice) -> RowGradients:
        spread = None if self.spread is None else self.spread[rows]
        return RowGradients(self.maximum[rows], self.scale[rows], self.target[rows], spread, self.class_weight)


def measure(logits: Tensor, index: Tensor, class_weight: Tensor | None, numbers: RowNumbers, scratch: Tensor) -> None:
    """Fills `numbers`. See [Note: softmax in passes]."""
    numbers.maximum.copy_(logits.amax(1, keepdim=True))
    torch.sub(logits.gather(1, index), numbers.maximum, out=numbers.target)
    for rows in tiles(len(logits), len(scratch)):
        room = scratch[: rows.stop - rows.start]
        torch.sub(logits[rows], numbers.maximum[rows], out=room)
        if numbers.weighted is not None:
            if class_weight is not None:
                room.mul_(class_weight)
            torch.sum(room, 1, keepdim=True, out=numbers.weighted[rows])
            if class_weight is not None:
                torch.sub(logits[rows], numbers.maximum[rows], out=room)
        torch.sum(room.exp_(), 1, keepdim=True, out=numbers.total[rows])


def write_gradient(logits: Tensor, index: Tensor, gradients: RowGradients, scratch: Tensor, out: Tensor) -> None:
    """The gradient of `logits` into `out`, which may be the logits themselves. See [Note: softmax in passes]."""
    for rows in tiles(len(logits), len(scratch)):
        room = scratch[: rows.stop - rows.start]
        torch.sub(logits[rows], gradients.maximum[rows], out=room).exp_()
        if gradients.spread is None:
            torch.mul(room, gradients.scale[rows], out=out[rows])
            continue
        room.mul_(gradients.scale[rows])
        if gradients.class_weight is None:
            room.sub_(gradients.spread[rows])
        else:
            room.addcmul_(gradients.spread[rows], gradients.class_weight, value=-1)
        out[rows].copy_(room)
    out.scatter_(1, index, gradients.target.to(out.dtype))


def tiles(num_rows: int, tile_rows: int) -> Iterator[slice]:
    assert tile_rows > 0
    for start in range(0, num_rows, tile_rows):
        yield slice(start, min(start + tile_rows, num_rows))
