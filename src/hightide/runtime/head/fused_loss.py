"""Projection and cross-entropy fused over tiles of tokens: the logits of a whole batch never exist at once.

[Note: fused loss] Forward walks over the rows in tiles: it projects a tile in the compute dtype, and goes through its
logits in smaller tiles of rows in fp32 (see [Note: softmax in passes]); only a few numbers per row survive. Backward
projects each tile again, writes the gradient of the logits over the logits, and multiplies it with the rows and the
weights. So a head costs one projection more than plain PyTorch and memory for one tile instead of for all tokens; as
many tiles as the plan says keep their logits, and cost nothing more. The first tiles are kept: their memory is free
again when backward makes the first projection. Which are kept changes no result, since tiles and their order stay.

Or the plan says that the gradients are made in forward, right after the loss of each tile, and wait for backward in
the place of the logits: those of the rows, and those of the weights in fp32. They are made for a gradient of 1 of the
loss, and backward scales them by what it gets: so for one loss of all rows only (not for `reduction="none"`), and not
in fp16, where such small ones vanish; what cannot be done so is done in backward. With many rows that takes the least
memory, and nothing is projected twice. Bits are those of the other way where the gradient of the loss is a power of
two (it is 1 in most loops) and nothing was summed before; else they differ by a rounding.

What the model did to its logits is replayed on the tiles of rows. Exact casts need nothing, because the passes read any
dtype; everything else (scaling, soft-capping) gets an inner graph per tile of rows. A head that is an nn.Linear and
nothing more has its backward by hand (runtime/head/linear.py); any other is projected with an inner graph in backward,
which adds to its parameters' gradients.

Row losses are summed once, at the end: the result does not depend on where tiles are cut, beyond the rounding of the
matrix multiplication itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hightide.ir.refusal import Refused
from hightide.process.interrupts import safe_point
from hightide.runtime.blocks.autocast import Autocast
from hightide.runtime.guards.transforms import once
from hightide.runtime.head.cross_entropy import (
    CrossEntropy,
    Labels,
    RowGradients,
    RowNumbers,
    Scratch,
    measure,
    tiles,
    write_gradient,
)
from hightide.runtime.head.linear import LinearBackward, Sums, add_scaled, gradients_of, zeros_for

if TYPE_CHECKING:
    from hightide.runtime.head.head import HeadCall


@dataclass(frozen=True)
class Recorded:
    """One operation that the model did to its logits. `elementwise` ones act on any tile of rows; the others (views and
    selections of rows) were already done to the hidden rows and are replayed only on whole logits."""

    function: Callable[..., Tensor]
    before: tuple[object, ...] = ()
    after: tuple[object, ...] = ()
    options: dict[str, object] = field(default_factory=dict)
    elementwise: bool = True

    def is_exact_cast(self, before: Tensor, after: Tensor) -> bool:
        """Whether all it did was to make logits wider, where they are."""
        widened = torch.promote_types(before.dtype, after.dtype) == after.dtype
        return self.function is Tensor.to and before.device == after.device and widened

    def __call__(self, logits: Tensor) -> Tensor:
        return self.function(*self.before, logits, *self.after, **self.options)


@dataclass(frozen=True)
class Projection:
    """How rows become what the loss sees: the head, the autocast state of its call, and the recorded operations."""

    head: HeadCall
    autocast: Autocast
    operations: tuple[Recorded, ...]
    version: object  # the head's, when it was called

    def check_version(self) -> None:
        if self.head.version != self.version:
            raise Refused(
                "the head's weights were updated or written to after these logits were made, so they can no longer be "
                "computed; use the logits, or call backward, before optimizer.step()"
            )


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
    has_graph = torch.is_grad_enabled()  # inside of a function nobody can tell
    loss: Tensor = _FusedCrossEntropy.apply(rows, anchor, target, weight, projection, options, has_graph)
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
        has_graph: bool,
    ) -> Tensor:
        head = projection.head
        backwards = head.plain_linear is not None and has_graph and any(ctx.needs_input_grad)
        num_kept = head.claim_kept_tokens() if backwards else 0
        normaliser = options.normaliser(target, weight) if options.reduction == "mean" else None
        may_be_early = backwards and options.reduction != "none" and head.claim_forward()
        early: _Early | None = None
        kept: list[Tensor] = []
        passes: _Passes | None = None
        row_losses = torch.zeros(0, device=rows.device)  # so that no rows at all is a sum of nothing
        with head.forward_hold(), projection.autocast.restored():
            for tile in tiles(len(rows), head.tile_tokens):
                safe_point()
                logits = head.project(rows[tile])
                if passes is None:
                    passes = _Passes.over(logits, projection)
                    labels = Labels.of(target, weight, options, head.num_classes, passes.dtype)
                    numbers = RowNumbers.empty(len(rows), passes.dtype, passes.device, options.label_smoothing)
                    if may_be_early and not passes.is_half:
                        module = cast(nn.Linear, head.plain_linear)
                        rows_grad = _empty_like(rows) if ctx.needs_input_grad[0] else None
                        early = _Early(module, rows_grad, zeros_for(module))
                        linear = LinearBackward(module, logits.dtype, early.sums)
                        one = torch.ones_like(numbers.total[:1, 0])
                        of_one = (one if normaliser is None else one / normaliser).expand(len(rows))
                        gradients = RowGradients.of(labels, of_one, numbers.maximum, numbers.total)  # filled by tiles
                passes.measure(logits, labels.index[tile], labels.class_weight, numbers[tile])
                if early is not None:
                    passes.write_gradient(logits, labels.index[tile], gradients[tile], logits)
                    linear(rows[tile], logits, None if early.rows_grad is None else early.rows_grad[tile])
                elif tile.stop <= num_kept:
                    kept.append(logits)
                del logits  # a tile must be gone before the next one is made
            if passes is not None:
                row_losses = numbers.losses(labels)
        # Through save_for_backward: it refuses a second backward and inputs that were changed in place meanwhile.
        found = (None, None) if passes is None else (numbers.maximum, numbers.total)
        ctx.save_for_backward(rows, target, weight, normaliser, *found)
        ctx.projection, ctx.options, ctx.kept, ctx.has_run_backward = projection, options, kept, False
        ctx.early = early
        if options.reduction == "none":
            return row_losses
        total = row_losses.sum()
        return total if normaliser is None else total / normaliser

    @staticmethod
    @once(lambda ctx: ctx.projection.head.will_accumulate())
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, target, weight, normaliser, maximum, total = ctx.saved_tensors
        if ctx.has_run_backward:
            raise Refused(
                "a second backward through hightide's fused loss is not supported; add the losses, call backward once"
            )
        ctx.has_run_backward = True
        kept, ctx.kept = ctx.kept, []
        early, ctx.early = ctx.early, None
        projection, options = ctx.projection, ctx.options
        projection.check_version()
        needs_rows, needs_anchor = ctx.needs_input_grad[:2]
        accumulate = needs_anchor and projection.head.will_accumulate()
        if not (needs_rows or accumulate):
            return None, None, None, None, None, None, None
        if early is not None:
            # Of no label at all the gradient is zero, whatever the loss is divided by later: zero labels, say.
            factor = torch.where((target != options.ignore_index).any(), grad_output, 0.0)
            with projection.head.backward_hold(accumulate):
                return early.finish(factor, accumulate), None, None, None, None, None, None
        rows_grad = _empty_like(rows) if needs_rows else None
        with projection.head.backward_hold(accumulate), projection.autocast.restored():
            if total is not None:
                row_grads = grad_output if normaliser is None else grad_output / normaliser
                labels = Labels.of(target, weight, options, projection.head.num_classes, total.dtype)
                gradients = RowGradients.of(labels, row_grads.expand(len(rows)), maximum, total)
                walk = _Backward(projection, labels.index, gradients, accumulate)
                del labels, row_grads
                walk.run(rows, rows_grad, kept)
            elif accumulate:
                _add_nothing(projection.head, rows)
        return rows_grad, None, None, None, None, None, None


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _Early:
    """Gradients that were made in forward, for a gradient of 1 of the loss."""

    module: nn.Linear
    rows_grad: Tensor | None
    sums: Sums

    def finish(self, factor: Tensor, accumulate: bool) -> Tensor | None:
        """In backward, once."""
        if accumulate:
            add_scaled(self.module, self.sums, factor)
        return None if self.rows_grad is None else self.rows_grad.mul_(factor)


@dataclass(frozen=True)
class _Backward:
    """The walk of backward over the tiles."""

    projection: Projection
    index: Tensor
    gradients: RowGradients
    accumulate: bool

    def run(self, rows: Tensor, rows_grad: Tensor | None, kept: list[Tensor]) -> None:
        """`kept`: logits of the first tiles; they are let go one by one."""
        head = self.projection.head
        passes: _Passes | None = None
        linear: LinearBackward | None = None
        kept.reverse()
        for tile in tiles(len(rows), head.tile_tokens):
            safe_point()
            part = None if rows_grad is None else rows_grad[tile]
            if head.plain_linear is None:
                passes = self._graph_tile(rows[tile], part, tile, passes)
                continue
            logits = kept.pop() if kept else head.project(rows[tile])
            if passes is None or linear is None:
                passes = _Passes.over(logits, self.projection)
                sums = gradients_of(head.plain_linear) if self.accumulate else (None, None)
                linear = LinearBackward(head.plain_linear, logits.dtype, sums)
            passes.write_gradient(logits, self.index[tile], self.gradients[tile], logits)
            linear(rows[tile], logits, part)
            del logits

    def _graph_tile(self, rows: Tensor, rows_grad: Tensor | None, tile: slice, passes: _Passes | None) -> _Passes:
        """One tile of a head that autograd has to go through."""
        leaf = rows.detach().requires_grad_(rows_grad is not None)
        with torch.enable_grad(), _saved_storages() as saved:
            logits = self.projection.head.project(leaf)
        passes = _Passes.over(logits, self.projection) if passes is None else passes
        free = logits.is_contiguous() and logits.untyped_storage().data_ptr() not in saved
        grad = logits.detach() if free else _empty_like(logits)
        passes.write_gradient(logits.detach(), self.index[tile], self.gradients[tile], grad)
        if self.accumulate:
            torch.autograd.backward(logits, grad)
        else:
            (leaf.grad,) = torch.autograd.grad(logits, leaf, grad)
        if rows_grad is not None:
            assert leaf.grad is not None
            rows_grad.copy_(leaf.grad)
        return passes


def _add_nothing(head: HeadCall, rows: Tensor) -> None:
    """Of a loss over no rows the weights' gradient is zero, which is not the same as none."""
    with torch.enable_grad():
        logits = head.project(rows.detach())
    torch.autograd.backward(logits, torch.zeros_like(logits))


@contextmanager
def _saved_storages() -> Iterator[set[int]]:
    """The storages that autograd saves meanwhile: what must not be overwritten."""
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor.detach()  # an output that its own node holds would never die

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


@dataclass(frozen=True)
class _Passes:
    """The passes over the logits of a tile, behind the operations that the model recorded."""

    operations: tuple[Recorded, ...]  # none, if all that was recorded are exact casts
    dtype: torch.dtype  # of all sums
    device: torch.device
    scratch: Scratch  # its length is the number of rows that are gone through at once
    is_half: bool  # logits, or what the model made of them, are fp16: gradients need the scale that a loss is given

    @classmethod
    def over(cls, logits: Tensor, projection: Projection) -> _Passes:
        recorded = tuple(operation for operation in projection.operations if operation.elementwise)
        result, exact, widest = logits.detach()[:0], True, 0
        is_half = logits.dtype is torch.float16
        for operation in recorded:
            before, result = result, operation(result)
            is_half = is_half or result.dtype is torch.float16
            exact = exact and operation.is_exact_cast(before, result)
            widest = max(widest, result.element_size())
        dtype = torch.promote_types(result.dtype, torch.float32)
        operations = () if exact else recorded
        # Of each operation up to two results in the graph; two gradients on their way, the result's, and the scratch.
        copies = 2 * len(operations) + 5 if operations else 2
        row_bytes = max(widest, dtype.itemsize) * logits.shape[1] * copies
        num_rows = min(len(logits), max(1, projection.head.scratch_bytes // row_bytes))
        scratch = Scratch(num_rows, logits.shape[1], dtype, result.device)
        return cls(operations, dtype, result.device, scratch, is_half)

    def measure(self, logits: Tensor, index: Tensor, class_weight: Tensor | None, numbers: RowNumbers) -> None:
        if not self.operations:
            measure(logits, index, class_weight, numbers, self.scratch)
            return
        for rows in tiles(len(logits), len(self.scratch)):
            seen = replay(logits[rows], self.operations)
            measure(seen, index[rows], class_weight, numbers[rows], self.scratch)
            del seen

    def write_gradient(self, logits: Tensor, index: Tensor, gradients: RowGradients, out: Tensor) -> None:
        if not self.operations:
            write_gradient(logits, index, gradients, self.scratch, out)
            return
        for rows in tiles(len(logits), len(self.scratch)):
            leaf = logits[rows].detach().requires_grad_()
            with torch.enable_grad():
                seen = replay(leaf, self.operations)
            grad = torch.empty_like(seen, requires_grad=False)
            write_gradient(seen.detach(), index[rows], gradients[rows], self.scratch, grad)
            (grad,) = torch.autograd.grad(seen, leaf, grad)
            out[rows].copy_(grad)
            del seen, grad, leaf
