"""A call of a block cut into micro-batches: the graph of each, outputs side by side, gradients of inputs added up."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hightide.ir.split import BatchDim, Split, micro_batches
from hightide.profiler.model.call_tree import narrow


def divided(
    split: Split | None, tensors: Sequence[Tensor | None], micro_batch: int
) -> tuple[list[tuple[int, int]], Sequence[BatchDim | None], Sequence[BatchDim | None] | None]:
    """(start, number of samples) of each micro-batch, and which dimensions carry the batch. Unknown calls run
    unsplit."""
    unsplit = [(0, 1)], [None] * len(tensors), None
    if split is None or not split.splittable:
        return unsplit
    sizes = {
        tensor.shape[dim.dim] / dim.rows
        for tensor, dim in zip(tensors, split.inputs, strict=True)
        if dim is not None and tensor is not None
    }
    if len(sizes) != 1:
        if sizes:
            warnings.warn(
                f"a block runs unsplit: its inputs disagree on the number of samples ({sorted(sizes)})", stacklevel=2
            )
        return unsplit
    (size,) = sizes
    if size != int(size):
        return unsplit
    return micro_batches(int(size), micro_batch), split.inputs, split.outputs


def dims_of(
    outputs: Sequence[Tensor], dims: Sequence[BatchDim | None] | None, num_samples: int
) -> Sequence[BatchDim | None] | None:
    """Of outputs of so many samples: how many rows each has of a sample may follow from its length (a router's logits
    of all tokens), which was another one when the block was probed."""
    if dims is None or len(dims) != len(outputs):
        return dims
    return [
        dim
        if dim is None or output.shape[dim.dim] % num_samples
        else BatchDim(dim.dim, output.shape[dim.dim] // num_samples)
        for output, dim in zip(outputs, dims, strict=True)
    ]


def sliced_grads(
    grads: Sequence[Tensor | None], dims: Sequence[BatchDim | None] | None, bounds: list[tuple[int, int]], number: int
) -> list[Tensor | None]:
    """The outputs' gradients for one micro-batch. An output without batch dimension takes its own in the first only."""
    if len(bounds) == 1:
        return list(grads)
    return [
        None if grad is None or (dim is None and number > 0) else narrow(grad, dim, *bounds[number])
        for grad, dim in zip(grads, dims or [None] * len(grads), strict=True)
    ]


class Graph:
    """The inner graph of one micro-batch: its leaves, and where its outputs' gradients enter. It does not hold the
    outputs."""

    def __init__(self, inputs: list[Tensor], outputs: list[Tensor], compiled: bool) -> None:
        self._inputs, self.compiled = inputs, compiled
        self._edges = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]

    def forget_inputs(self, which: Sequence[bool]) -> None:
        """The leaves stay as ends of the graph, their values do not: shape without memory."""
        for leaf, forget in zip(self._inputs, which, strict=True):
            if forget:
                leaf.data = _nowhere(leaf.dtype, leaf.device).expand(leaf.shape)

    def roots(self, grads: list[Tensor | None]) -> list[tuple[GradientEdge, Tensor]]:
        pairs = zip(self._edges, grads, strict=True)
        return [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]

    def backward(self, roots: list[tuple[GradientEdge, Tensor]], wanted: Sequence[bool], accumulate: bool) -> None:
        edges, grads = [edge for edge, _ in roots], [grad for _, grad in roots]
        if accumulate:
            torch.autograd.backward(edges, grads)
            return
        leaves = [tensor for tensor, want in zip(self._inputs, wanted, strict=True) if want]
        if leaves:
            for leaf, grad in zip(leaves, torch.autograd.grad(edges, leaves, grads, allow_unused=True), strict=True):
                leaf.grad = grad

    def take_grad(self, index: int) -> Tensor | None:
        grad, self._inputs[index].grad = self._inputs[index].grad, None
        return grad


@cache
def _nowhere(dtype: torch.dtype, device: torch.device) -> Tensor:
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device)


class Gathered:
    """Whole-batch outputs, filled micro-batch by micro-batch. One micro-batch is the whole batch and is not copied."""

    def __init__(
        self, first: list[Tensor], dims: Sequence[BatchDim | None] | None, bounds: list[tuple[int, int]]
    ) -> None:
        self._bounds = bounds
        self._dims = dims or [None] * len(first)
        total = sum(num_samples for _, num_samples in bounds)
        if len(bounds) == 1:
            self.whole = [output.detach() for output in first]
            return
        self.whole = []
        for output, dim in zip(first, self._dims, strict=True):
            shape = list(output.shape)
            if dim is not None:
                shape[dim.dim] = dim.rows * total
            self.whole.append(output.new_empty(shape) if dim is not None else output.detach())

    def put(self, number: int, outputs: list[Tensor]) -> None:
        if len(self._bounds) == 1:
            return
        for whole, output, dim in zip(self.whole, outputs, self._dims, strict=True):
            if dim is not None:
                narrow(whole, dim, *self._bounds[number]).copy_(output.detach())


class InputGradient:
    """The gradient of one input over all micro-batches: side by side if it carries the batch, summed if it does not."""

    def __init__(self, tensor: Tensor, dim: BatchDim | None, num_micro_batches: int) -> None:
        self._like = tensor
        self._dim = dim
        self._single = num_micro_batches == 1
        self.value: Tensor | None = None

    def add(self, grad: Tensor | None, start: int, num_samples: int) -> None:
        if grad is None:
            if self._dim is not None and self.value is not None:
                narrow(self.value, self._dim, start, num_samples).zero_()
        elif self._single:  # where the input was away, its leaf did not say how the gradient is to lie in memory
            same = grad.stride() == self._like.stride() or self._like.is_contiguous()
            self.value = grad if same else torch.empty_like(self._like).copy_(grad)
        elif self._dim is None:
            self.value = grad if self.value is None else self.value.add_(grad)
        else:
            if self.value is None:
                self.value = torch.empty_like(self._like, memory_format=torch.contiguous_format)
                narrow(self.value, self._dim, 0, start).zero_()
            narrow(self.value, self._dim, start, num_samples).copy_(grad)
