"""Needs of one call of a block, metered while it runs on tensors without values: memory, and work.

[Note: two sizes are enough] Every tensor's bytes are affine in the number of samples, so a peak is the largest of
several affine functions: convex. A line through the smallest and the largest micro-batch is therefore never below it
in between, and exact at both ends. Work is affine itself.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from hightide.ir.block import Affine, Selective, Work
from hightide.ir.split import Split
from hightide.process.interrupts import safe_point
from hightide.profiler.model.attention import workspace_bytes
from hightide.profiler.model.caching_allocator import holes_of
from hightide.profiler.model.call_tree import flatten, leaves_key, narrow, tensors, unflatten
from hightide.profiler.model.probe_record import CallRecord
from hightide.profiler.model.taps import Tap, tapping
from hightide.profiler.model.work import Counted, CountedCall, Result, WorkMeter
from hightide.stores.meter import AllocationMeter, Event

NOTHING = Counted()
NO_BYTES = Affine()
DEAR_SHARE = 16  # results that take down to this part of the operations per byte that the dearest takes are held


@dataclass(frozen=True)
class MeteredCall:
    """Of one run of a block on one micro-batch. Inputs, parameters and their gradients are never counted."""

    outputs: int
    forward_peak: int  # without graph, with the outputs
    kept: int  # by the graph, after the outputs are gone
    backward_peak: int  # of forward with graph, then backward: with outputs and the gradients of inputs
    work: CountedCall
    num_kept: int  # tensors
    holes: int  # see [Note: holes of one block]


@dataclass(frozen=True)
class CallNeeds:
    """Of one call, as in ir.block.CallSpec."""

    kind: int
    forward_peak: Affine
    kept: Affine
    backward_peak: Affine
    forward: Work
    recompute: Work
    backward: Work
    selective: Selective | None = None
    num_kept: int = 16
    holes: Affine = NO_BYTES

    @classmethod
    def assumed(cls, kind: int, graph: Affine) -> CallNeeds:
        """Of a call that was not measured."""
        return cls(kind, graph, graph, graph, Work(), Work(), Work())


class CallMeter:
    """Measures calls; equal calls of equal blocks once."""

    def __init__(self) -> None:
        self._measured: dict[Any, CallNeeds] = {}

    def measure(
        self,
        module: nn.Module,
        split: Split,
        one: CallRecord,
        two: CallRecord | None,
        num_samples: int,
        taps: Sequence[Tap] = (),
    ) -> CallNeeds:
        """`one` and `two` are the same call with num_samples and with one more. To be called with fake parameters."""
        key = (_identity(module), split, num_samples, leaves_key(one.leaves), two is None, tuple(taps))
        if key not in self._measured:
            safe_point()
            kind = len(self._measured)
            try:
                if split.splittable and two is not None:
                    self._measured[key] = _measure_split(kind, module, split, two, num_samples, taps)
                else:
                    self._measured[key] = _measure_whole(kind, module, one, two, num_samples, taps)
            except Exception as error:  # code that asks for values, or an operation that has no fake version
                self._measured[key] = CallNeeds.assumed(kind, Affine())
                warnings.warn(
                    f"the memory of {type(module).__name__} could not be measured ({type(error).__name__}: {error}); "
                    "the plan takes its activations for 0 bytes: leave room for them in the limits",
                    stacklevel=2,
                )
        return self._measured[key]


def _measure_split(
    kind: int, module: nn.Module, split: Split, record: CallRecord, num_samples: int, taps: Sequence[Tap]
) -> CallNeeds:
    large = max(num_samples, 2)
    low, high = (meter_call(module, _micro_batch(record, split, size), record, taps) for size in (1, large))
    return _between(kind, 1, low, large, high)


def _measure_whole(
    kind: int, module: nn.Module, one: CallRecord, two: CallRecord | None, num_samples: int, taps: Sequence[Tap]
) -> CallNeeds:
    low = meter_call(module, one.leaves, one, taps)
    if two is None:
        high, size = low, num_samples
    else:
        high, size = meter_call(module, two.leaves, two, taps), num_samples + 1
    return _between(kind, num_samples, low, size, high)


def _between(kind: int, low: int, at_low: MeteredCall, high: int, at_high: MeteredCall) -> CallNeeds:
    def work(at_low: Counted, at_high: Counted) -> Work:
        return Work(
            Affine.through(low, at_low.flop, high, at_high.flop),
            Affine.through(low, at_low.touched_bytes, high, at_high.touched_bytes),
        )

    def selective() -> Selective | None:
        """None: holding all takes no more."""
        dearest = max((result.flop_per_byte for result in at_high.work.results), default=0.0)
        least = max(1, int(dearest / DEAR_SHARE))
        held = [[result for result in at.work.results if result.flop_per_byte >= least] for at in (at_low, at_high)]
        low_bytes, high_bytes = (sum(result.num_bytes for result in results) for results in held)
        if not held[1] or high_bytes >= at_high.kept:
            return None
        low_work, high_work = (
            _without(at.work.recompute, results) for at, results in zip((at_low, at_high), held, strict=True)
        )
        kept = Affine.through(low, low_bytes, high, high_bytes)
        return Selective(kept, work(low_work, high_work), least, len(held[1]))

    return CallNeeds(
        kind=kind,
        forward_peak=Affine.through(
            low, at_low.forward_peak - at_low.outputs, high, at_high.forward_peak - at_high.outputs
        ),
        kept=Affine.through(low, at_low.kept, high, at_high.kept),
        backward_peak=Affine.through(low, at_low.backward_peak, high, at_high.backward_peak),
        forward=work(at_low.work.forward, at_high.work.forward),
        recompute=work(at_low.work.recompute, at_high.work.recompute),
        backward=work(at_low.work.backward, at_high.work.backward),
        selective=selective(),
        num_kept=at_high.num_kept,
        holes=Affine.through(low, at_low.holes, high, at_high.holes),
    )


def _without(recompute: Counted, held: Sequence[Result]) -> Counted:
    for result in held:
        recompute -= result.counted
    return recompute


def _micro_batch(record: CallRecord, split: Split, num_samples: int) -> list[Any]:
    dims = iter(split.inputs)
    return [
        narrow(leaf, next(dims), 0, num_samples) if isinstance(leaf, torch.Tensor) else leaf for leaf in record.leaves
    ]


def meter_call(module: nn.Module, leaves: Sequence[Any], record: CallRecord, taps: Sequence[Tap] = ()) -> MeteredCall:
    """Runs one call forward without graph, then forward with graph and backward, and reads the meters."""
    args, kwargs = unflatten([_detached(leaf, record.mutated) for leaf in leaves], record.tree)

    def run() -> list[torch.Tensor]:
        with tapping(module, taps) as tapped:
            results = tensors(flatten(module.forward(*args, **kwargs))[0])
        return results + tapped.tensors

    with torch.no_grad(), AllocationMeter(inside=workspace_bytes) as meter, WorkMeter() as work:
        results = run()
        outputs, forward_peak, forward = meter.live_bytes, meter.peak_bytes, work.counted
        events = list(meter.events)
    shapes = [torch.empty_like(result) for result in results]
    del results
    for param in module.parameters():
        if param.requires_grad and param.grad is None:
            param.grad = torch.empty_like(param)  # gradients are added in place
    graph = _meter_graph(run, shapes)
    counted = CountedCall(forward, graph.recompute, graph.backward, graph.results)
    holes = holes_of(events, graph.events, outputs)
    return MeteredCall(outputs, forward_peak, graph.kept, graph.backward_peak, counted, graph.num_kept, holes)


@dataclass(frozen=True)
class _MeteredGraph:
    kept: int  # bytes
    num_kept: int  # tensors, at most
    recompute: Counted
    results: tuple[Result, ...]  # of the recomputation
    backward_peak: int = 0
    backward: Counted = NOTHING
    events: tuple[Event, ...] = ()


def _meter_graph(run: Callable[[], list[torch.Tensor]], gradients: list[torch.Tensor]) -> _MeteredGraph:
    with torch.enable_grad(), AllocationMeter(inside=workspace_bytes) as meter, WorkMeter() as work:
        with work.until_saved() as saved:
            results = run()
        edges = [(get_gradient_edge(r), g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
        with_results = meter.live_bytes
        storages = [weakref.ref(result.untyped_storage()) for result in results]
        del results
        kept = meter.live_bytes
        # In backward the results are there again: those that the graph keeps are held, something stands for the others.
        held = [storage() for storage in storages]
        stand_in = gradients[0].new_empty(with_results - kept, dtype=torch.uint8) if gradients else None
        recompute, num_results = saved[-1]
        graph = _MeteredGraph(kept, len(saved) - 1, recompute, tuple(work.results[:num_results]))
        if not edges:
            return graph
        before = work.counted
        torch.autograd.backward([edge for edge, _ in edges], [gradient for _, gradient in edges])
        del held, stand_in
        meter.ledger.settle()
        found = replace(graph, backward_peak=meter.peak_bytes, backward=work.counted - before)
        return replace(found, events=tuple(meter.events))


def _detached(leaf: Any, mutated: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    alone = leaf.detach().requires_grad_(leaf.requires_grad)
    with torch.enable_grad():
        return alone.clone() if mutated else alone  # autograd forbids to change a leaf in place, not its clone


def _identity(module: nn.Module) -> tuple[Any, ...]:
    params = tuple((name, param.shape, param.dtype, param.requires_grad) for name, param in module.named_parameters())
    return type(module), module.training, repr(module), params
