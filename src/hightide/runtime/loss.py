"""Projection and cross-entropy fused over tiles of tokens: the logits of a whole batch never exist at once.

[Note: fused loss] Forward walks over the rows tile by tile: project, replay what the model did to its logits, one
loss per row; only the row losses (one number per token) survive. Backward walks again, this time with an inner graph
per tile, writes the gradient of the tile's rows into one hidden gradient, and lets the inner autograd add the head's
parameter gradients in place. So a head costs one projection more than plain PyTorch and memory for one tile instead
of for all tokens. Row losses are summed once, at the end: the result does not depend on where tiles are cut, beyond
the rounding of the matrix multiplication itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hightide.runtime.autocast import Autocast


class Head(Protocol):
    """The block that turns hidden rows into logits: what the runtime gives to lazy logits and to the fused loss."""

    @property
    def tile_tokens(self) -> int:
        """Rows per tile."""

    @property
    def num_classes(self) -> int:
        """Size of the last dimension of the logits."""

    @property
    def version(self) -> int:
        """Changes whenever the weights do: logits are computed late, and must be those of the weights at call time."""

    @property
    def anchor(self) -> Tensor | None:
        """An empty tensor that requires grad; None where the head has no trainable parameters."""

    def project(self, rows: Tensor) -> Tensor:
        """The module's own forward. Called only while held; rows are (tokens, hidden)."""

    def forward_hold(self) -> AbstractContextManager[object]:
        """Weights are bound inside it."""

    def backward_hold(self, accumulate: bool) -> AbstractContextManager[object]:
        """Weights are bound inside it, as leaves whose `.grad` inner autograd adds to. Without `accumulate` only
        gradients of rows are asked for."""

    def will_accumulate(self) -> bool:
        """Asked inside backward: will this backward reach the anchor? (Not under `torch.autograd.grad` of inputs.)"""

    def materialise(self, hidden: Tensor) -> Tensor:
        """All logits at once, by the ordinary execution of a block, with autograd."""


@dataclass(frozen=True)
class Recorded:
    """One operation that the model did to its logits. `elementwise` ones act on any tile of rows; the others (views and
    selections of rows) were already done to the hidden rows and are replayed only on whole logits."""

    function: Callable[..., Tensor]
    before: tuple[object, ...] = ()
    after: tuple[object, ...] = ()
    options: dict[str, object] = field(default_factory=dict)
    elementwise: bool = True

    def __call__(self, logits: Tensor) -> Tensor:
        return self.function(*self.before, logits, *self.after, **self.options)


@dataclass(frozen=True)
class Projection:
    """How rows become what the loss sees: the head, the autocast state of its call, and the recorded operations."""

    head: Head
    autocast: Autocast
    operations: tuple[Recorded, ...]
    version: int  # the head's, when it was called

    def logits(self, rows: Tensor) -> Tensor:
        return replay(self.head.project(rows), [op for op in self.operations if op.elementwise])

    def check_version(self) -> None:
        if self.head.version != self.version:
            raise RuntimeError(
                "the head's weights were updated after these logits were made, so they can no longer be computed; use "
                "the logits, or call backward, before optimizer.step()"
            )


@dataclass(frozen=True)
class CrossEntropy:
    """The options of `F.cross_entropy`, less its tensors."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def row_losses(self, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """In fp32 at least, whatever the logits are: the loss is where bf16 hurts most, and a tile costs little."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        weight = None if weight is None else weight.to(logits.dtype)
        return F.cross_entropy(
            logits,
            target,
            weight,
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )

    def normaliser(self, target: Tensor, weight: Tensor | None) -> Tensor:
        """What "mean" divides by: the number of rows that count, or the sum of their weights."""
        counts = target != self.ignore_index
        if weight is None:
            return counts.sum()
        weights = weight[torch.where(counts, target, 0)]
        return torch.where(counts, weights, 0).to(torch.promote_types(weight.dtype, torch.float32)).sum()


def replay(logits: Tensor, operations: Sequence[Recorded]) -> Tensor:
    for operation in operations:
        logits = operation(logits)
    return logits


def fused_cross_entropy(
    projection: Projection, rows: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropy
) -> Tensor:
    """`F.cross_entropy` of the logits of `rows`, with the gradient for rows and head, one tile at a time."""
    projection.check_version()
    anchor = projection.head.anchor
    loss: Tensor = _FusedCrossEntropy.apply(rows, anchor, target, weight, projection, options)
    return loss


class _FusedCrossEntropy(torch.autograd.Function):
    """See [Note: fused loss]."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        anchor: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        projection: Projection,
        options: CrossEntropy,
    ) -> Tensor:
        losses: list[Tensor] = []
        with projection.head.forward_hold(), projection.autocast.restored():
            for tile in _tiles(len(rows), projection.head.tile_tokens):
                # No name for the logits: a tile must be gone before the next one is made.
                losses.append(options.row_losses(projection.logits(rows[tile]), target[tile], weight))
        losses.append(target.new_zeros(0, dtype=torch.float32))  # so that no rows at all is a sum of nothing
        row_losses = torch.cat(losses)
        normaliser = options.normaliser(target, weight) if options.reduction == "mean" else None
        # Through save_for_backward: it refuses a second backward and inputs that were changed in place meanwhile.
        ctx.save_for_backward(rows, target, weight, normaliser)
        ctx.projection, ctx.options, ctx.has_run_backward = projection, options, False
        if options.reduction == "none":
            return row_losses
        total = row_losses.sum()
        return total if normaliser is None else total / normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, target, weight, normaliser = ctx.saved_tensors
        if ctx.has_run_backward:
            raise RuntimeError(
                "a second backward through hightide's fused loss is not supported; add the losses, call backward once"
            )
        ctx.has_run_backward = True
        projection, options = ctx.projection, ctx.options
        projection.check_version()
        needs_rows, needs_anchor = ctx.needs_input_grad[:2]
        accumulate = needs_anchor and projection.head.will_accumulate()
        if not (needs_rows or accumulate):
            return None, None, None, None, None, None
        row_grads = grad_output if normaliser is None else grad_output / normaliser
        row_grads = row_grads.expand(len(rows))
        rows_grad = torch.empty_like(rows) if needs_rows else None
        with projection.head.backward_hold(accumulate), projection.autocast.restored():
            for tile in _tiles(len(rows), projection.head.tile_tokens):
                leaf = rows[tile].detach().requires_grad_(needs_rows)
                _tile_backward(projection, options, leaf, target[tile], weight, row_grads[tile], accumulate)
                if rows_grad is not None:
                    rows_grad[tile] = leaf.grad
        return rows_grad, None, None, None, None, None


def _tile_backward(
    projection: Projection,
    options: CrossEntropy,
    leaf: Tensor,
    target: Tensor,
    weight: Tensor | None,
    row_grads: Tensor,
    accumulate: bool,
) -> None:
    """Recomputes one tile with a graph and runs it backward; the gradient of the rows ends up in `leaf.grad`."""
    with torch.enable_grad():
        losses = options.row_losses(projection.logits(leaf), target, weight)
    row_grads = row_grads.to(losses.dtype)
    if accumulate:
        torch.autograd.backward(losses, row_grads)
    else:
        (leaf.grad,) = torch.autograd.grad(losses, leaf, row_grads)


def _tiles(num_rows: int, tile_tokens: int) -> Iterator[slice]:
    assert tile_tokens > 0
    for start in range(0, num_rows, tile_tokens):
        yield slice(start, min(start + tile_tokens, num_rows))
