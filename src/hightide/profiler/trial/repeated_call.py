"""One call of a block that is made again and again: whole, in part, or with other values for one sample."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from hightide.ir.split import Split
from hightide.process.interrupts import safe_point
from hightide.profiler.model.call_tree import flatten, narrow, unflatten
from hightide.profiler.probe.probe_record import CallRecord
from hightide.profiler.probe.taps import Tap, tapping
from hightide.profiler.trial.quiet import Quiet
from hightide.profiler.trial.state import GlobalRandom, ModuleState

ROUNDING = 1e-5  # of the largest gradient of a block: one that is zero but for rounding is judged by it


@dataclass(frozen=True)
class TriedCall:
    module: nn.Module
    record: CallRecord  # of `num_samples` samples
    num_samples: int
    split: Split
    taps: Sequence[Tap] = ()


@dataclass(frozen=True)
class GradientSketch:
    """Of a parameter: its products with two random vectors, which an error anywhere in it changes. Kept whole, the
    gradients of a few runs would take several times the block's memory."""

    along: tuple[float, float]
    size: float  # what an error as large as the gradient changes these by, about

    @classmethod
    def of(cls, grad: Tensor, param: Tensor) -> GradientSketch:
        values = (param - 1.0 if param.ndim < 2 else param).flatten()  # random, and of no other meaning if it is moved
        flat, numel = grad.flatten(), values.numel()
        shifts = [min(shift, max(0, numel - 1)) for shift in (1, 7)]  # views: a copy of a large matrix takes memory
        along = [float(torch.dot(flat[shift:], values[: numel - shift].to(flat.dtype))) for shift in shifts]
        return cls((along[0], along[1]), float(flat.norm()) * float(values.norm()) / max(1, numel) ** 0.5)

    def differs(self, others: Sequence[GradientSketch | None], tolerance: float, largest: float) -> bool:
        """From the sum of others. `largest`: size of the largest gradient of the block; one that is zero but for
        rounding is judged by it."""
        allowed = tolerance * self.size + ROUNDING * largest
        sums = [sum(other.along[at] for other in others if other is not None) for at in (0, 1)]
        return not all(abs(mine - total) <= allowed for mine, total in zip(self.along, sums, strict=True))


NO_GRADIENT = GradientSketch((0.0, 0.0), 0.0)


@dataclass
class TrialOutcome:
    """Of one run."""

    outputs: list[Tensor]
    others: list[Any]  # leaves of the result that are no tensors
    input_grads: list[Tensor | None]
    param_grads: list[GradientSketch | None]  # none where nobody asked for them
    draws: list[int] = field(default_factory=list)


def largest_of(gradients: Sequence[GradientSketch | None]) -> float:
    return max((gradient.size for gradient in gradients if gradient is not None), default=0.0)


class RepeatedCall:
    """On values. What it changes of the block, and of global generators, is put back before each run."""

    def __init__(
        self, call: TriedCall, device: torch.device, dtype: torch.dtype | None, params: list[nn.Parameter]
    ) -> None:
        self._module, self._record, self._split, self._taps = call.module, call.record, call.split, call.taps
        self._params = params
        record, split, num_samples = call.record, call.split, call.num_samples
        self._generator = torch.Generator(device).manual_seed(0)
        self._input_dims = split.inputs if num_samples > 1 or split.splittable else (None,) * len(record.inputs)
        self._output_dims = split.outputs if split.splittable else (None,) * len(record.outputs)
        dims = iter(self._input_dims)
        self.leaves = [
            self._real(narrow(leaf.detach(), next(dims), 0, num_samples), dtype, device)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in record.leaves
        ]
        self._wants_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in record.leaves]
        self._seeds: list[Tensor] | None = None  # gradients that come back
        self._before = ModuleState(call.module, shared_random=True)
        self._random = GlobalRandom(device)

    @property
    def changes(self) -> tuple[str, ...]:
        """What the last run has changed of what the block keeps."""
        return tuple(sorted(self._before.changes()))

    @property
    def draws(self) -> bool:
        """Whether the last run drew random numbers on the device."""
        return bool(self._random.drawn() & {"torch", "CUDA"})

    def reset(self) -> None:
        self._before.restore()
        self._random.restore_torch()

    def run(
        self,
        leaves: Sequence[Any],
        part: tuple[int, int] | None = None,
        quiet: Quiet | None = None,
        varied: int | None = None,
        fresh: bool = True,
        recompute: bool = False,
        seed: int | None = None,
        with_params: bool = True,
    ) -> TrialOutcome:
        safe_point()
        if fresh:
            self.reset()
        if seed is not None:
            self._random.seed(seed)
        inputs = [
            leaf.detach().clone().requires_grad_(wants) if isinstance(leaf, Tensor) else leaf
            for leaf, wants in zip(leaves, self._wants_grad, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(self._generator.device.type, enabled=False), quiet or nullcontext():
            if recompute:
                outputs, others = checkpoint(self._forward, inputs, use_reentrant=False, preserve_rng_state=False)
                self.reset()  # as a replay begins
            else:
                outputs, others = self._forward(inputs)
            tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
            grads = self._backward(tensors, outputs, part, varied, with_params)
        outcome = TrialOutcome([output.detach() for output in outputs], others, *grads)
        outcome.draws = quiet.draws if quiet is not None else []
        return outcome

    def _forward(self, leaves: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
        args, kwargs = unflatten(leaves, self._record.tree)
        with tapping(self._module, self._taps) as tapped:
            result = self._module.forward(*args, **kwargs)
        leaves, _ = flatten(result)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + tapped.tensors
        return outputs, [leaf for leaf in leaves if not isinstance(leaf, Tensor)]

    def _backward(
        self,
        inputs: list[Tensor],
        outputs: list[Tensor],
        part: tuple[int, int] | None,
        varied: int | None,
        with_params: bool,
    ) -> tuple[list[Tensor | None], list[GradientSketch | None]]:
        if self._seeds is None:
            self._seeds = [self._noise(output.detach()) for output in outputs]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        trained = [param for param in self._params if param.requires_grad and with_params]
        roots, seeds = [], []
        for output, seed, dim in zip(outputs, self._seeds, self._output_dims, strict=False):
            if not output.requires_grad or (part is not None and dim is None and part[0] > 0):
                continue  # an output without batch dimension takes its gradient once
            if part is not None:
                seed = narrow(seed, dim, *part)
            if varied is not None and dim is not None:
                seed = seed.clone()
                place = narrow(seed, dim, varied, 1)
                place.copy_(self._noise(place))
            roots.append(output)
            seeds.append(seed)
        gradients: dict[int, GradientSketch] = {}

        def used_up(param: Tensor) -> None:
            """One after the other: all at once they would take as much as the parameters."""
            assert param.grad is not None
            with torch.no_grad():
                gradients[id(param)] = GradientSketch.of(param.grad, param)
            param.grad = None

        with ExitStack() as hooks:
            for param in trained:
                hooks.enter_context(param.register_post_accumulate_grad_hook(used_up))
            if roots and (wanted or trained):
                torch.autograd.backward(roots, seeds, inputs=[*wanted, *trained])
        return [tensor.grad for tensor in inputs], [gradients.get(id(param)) for param in trained]

    def part(self, start: int, count: int) -> list[Any]:
        dims = iter(self._split.inputs)
        return [narrow(leaf, next(dims), start, count) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def _real(self, tensor: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """Values for an argument: its own, unless it has none, or all are the same, which would hide much."""
        has_values = not isinstance(tensor, FakeTensor) and not tensor.is_meta
        if not tensor.is_floating_point():
            return tensor.to(device) if has_values else torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        if has_values and tensor.numel() and bool((tensor != tensor.flatten()[0]).any()):
            return tensor.to(device, dtype or tensor.dtype)
        noise = torch.randn(tensor.shape, generator=self._generator, device=device)
        return noise.to(dtype or tensor.dtype)

    def _noise(self, like: Tensor) -> Tensor:
        noise = torch.randn(like.shape, generator=self._generator, device=like.device)
        return noise.to(like.dtype) if like.is_floating_point() else noise

    def varied(self, sample: int, factor: float) -> list[Any]:
        """The arguments with other values for one sample: its own in another order, and noise on those that are
        real."""
        leaves = []
        dims = iter(self._split.inputs)
        for leaf in self.leaves:
            if not isinstance(leaf, Tensor) or (dim := next(dims)) is None:
                leaves.append(leaf)
                continue
            leaf = leaf.clone()
            place = narrow(leaf, dim, sample, 1)
            order = torch.randperm(place.numel(), generator=self._generator, device=leaf.device)
            values = place.flatten()[order].view(place.shape)
            place.copy_((values + self._noise(values)) * factor if leaf.is_floating_point() else values)
            leaves.append(leaf)
        return leaves
