"""Needs of one call of a block, metered while it runs on tensors without values: memory, and work.

[Note: two sizes are enough] Every tensor's bytes are affine in the number of samples, so a peak is the largest of
several affine functions: convex. A line through the smallest and the largest micro-batch is therefore never below it
in between, and exact at both ends. Work is affine itself.

[Note: the first run] A block that is recomputed runs forward with a graph whose saved tensors are dropped. So does the
first run here, and not without gradients: with them torch may choose other kernels, which take more. What is alive at
its end was not saved for backward, so no recomputation spares it. Some of it goes with the graph (it lasts: tensors
that an autograd function keeps as attributes of its own, leaves that the block has made), some of it stays until the
block runs again (it is left: in attributes of modules).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from hightide.ir.block import Affine, Selective, Work
from hightide.ir.records import joined
from hightide.ir.split import Split
from hightide.process.interrupts import in_a_line, safe_point
from hightide.profiler.fake.attention import workspace_bytes
from hightide.profiler.fake.values import Values
from hightide.profiler.fake.watching import watched
from hightide.profiler.model.call_tree import flatten, leaves_key, narrow, tensors, unflatten
from hightide.profiler.needs.caching_allocator import holes_of
from hightide.profiler.needs.token_tiles import TokenParts, is_long, staying_whole, tiling
from hightide.profiler.needs.work import Counted, Result, WorkMeter
from hightide.profiler.probe.probe_record import CallRecord
from hightide.profiler.probe.taps import Tap, tapping
from hightide.stores.meter import AllocationMeter, Event

NOTHING = Counted()
NO_BYTES = Affine()
DEAR_SHARE = 16  # results that take down to this part of the operations per byte that the dearest takes are held


@dataclass(frozen=True)
class MeteredCall:
    """Of one run of a block on one micro-batch. Inputs, parameters and their gradients are never counted."""

    outputs: int
    forward_peak: int  # with the outputs, and with what lasts
    forward: Counted
    lasting: int  # see [Note: the first run]
    left: int
    kept: int = 0  # by the graph of the second run, after the outputs are gone: beyond what lasts and is left
    num_kept: int = 0  # tensors, at most
    recompute: Counted = NOTHING
    results: tuple[Result, ...] = ()  # of the recomputation, as they are made
    backward_peak: int = 0  # of forward with graph, then backward: with outputs and the gradients of inputs, and with
    # what lasts
    backward: Counted = NOTHING
    holes: int = 0  # see [Note: holes of one block]


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
    lasting: Affine = NO_BYTES
    left: Affine = NO_BYTES
    tiled: tuple[str, ...] = ()

    def wider(self, other: CallNeeds) -> CallNeeds:
        """Enough for two equal calls of equal blocks that ask for values, and take different bytes."""

        def widest(_: str, pair: Sequence[Any]) -> Any:
            """Of lines through the origin, as those of one size are."""
            return joined(pair, widest) if isinstance(pair[0], Work) else max(pair, key=lambda line: line.per_sample)

        num_kept = max(self.num_kept, other.num_kept)
        same = {"kind": self.kind, "selective": self.selective, "tiled": self.tiled}
        return joined((self, other), widest, num_kept=num_kept, **same)


class CallMeter:
    """Measures calls; equal calls of equal blocks once. With `values` all of them: see [Note: a pass on values]."""

    def __init__(self, values: Values | None = None, parts: TokenParts | None = None) -> None:
        self._measured: dict[Any, CallNeeds] = {}
        self._values, self._parts = values, parts
        if values is not None:
            _use_library(values.device)
        self.failure = ""  # why a call could not be measured: it asks for values, or there is no fake operation

    def measure(
        self,
        module: nn.Module,
        split: Split,
        one: CallRecord,
        two: CallRecord | None,
        num_samples: int,
        taps: Sequence[Tap],
        alike: Hashable,
    ) -> int:
        """`one` and `two` are the same call with num_samples and with one more. `alike`: equal for blocks that do the
        same; those that are built and printed alike may differ by a flag. To be called with fake parameters. Returns
        the kind of the call."""
        key: tuple[Any, ...] = (alike, split, num_samples, leaves_key(one.leaves), two is None)
        key += (tuple(taps), is_long(one, num_samples) and staying_whole(module))
        known = self._measured.get(key)
        if known is not None and self._values is None:
            return known.kind
        safe_point()
        kind = len(self._measured) if known is None else known.kind
        try:
            if self._values is not None:
                needs = self._measure_on_values(self._values, kind, module, one, num_samples, taps)
            else:
                tiled = () if self._parts is None or taps else self._parts.of(module, one, num_samples)
                with tiling(module, tiled):
                    if split.splittable and two is not None:
                        needs = _measure_split(kind, module, split, two, num_samples, taps)
                    else:
                        needs = _measure_whole(kind, module, one, two, num_samples, taps)
                needs = replace(needs, tiled=tiled)
        except Exception as error:
            failure = in_a_line(error)
            self.failure = self.failure or failure
            needs = CallNeeds(kind, NO_BYTES, NO_BYTES, NO_BYTES, Work(), Work(), Work())
        self._measured[key] = needs if known is None else known.wider(needs)
        return kind

    @property
    def needs(self) -> list[CallNeeds]:
        """By kind."""
        return list(self._measured.values())

    def _measure_on_values(
        self, values: Values, kind: int, module: nn.Module, one: CallRecord, num_samples: int, taps: Sequence[Tap]
    ) -> CallNeeds:
        """Nothing is held in part of a call whose operations may be others next time."""
        with values.of(module):
            there = replace(one, leaves=values.there(one.leaves))
            return replace(_measure_whole(kind, module, there, None, num_samples, taps), selective=None)


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
        dearest = max((result.flop_per_byte for result in at_high.results), default=0.0)
        least = max(1, int(dearest / DEAR_SHARE))
        held = [[result for result in at.results if result.flop_per_byte >= least] for at in (at_low, at_high)]
        low_bytes, high_bytes = (sum(result.num_bytes for result in results) for results in held)
        if not held[1] or high_bytes >= at_high.kept:
            return None
        low_work, high_work = (
            _without(at.recompute, results) for at, results in zip((at_low, at_high), held, strict=True)
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
        forward=work(at_low.forward, at_high.forward),
        recompute=work(at_low.recompute, at_high.recompute),
        backward=work(at_low.backward, at_high.backward),
        selective=selective(),
        num_kept=at_high.num_kept,
        holes=Affine.through(low, at_low.holes, high, at_high.holes),
        # To be run again the block finds what it had left the time before, which waits with its graph.
        lasting=Affine.through(low, at_low.lasting + at_low.left, high, at_high.lasting + at_high.left),
        left=Affine.through(low, at_low.left, high, at_high.left),
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


CHANGED = "it was given what an earlier run of it has written to an object"


def meter_call(module: nn.Module, leaves: Sequence[Any], record: CallRecord, taps: Sequence[Tap] = ()) -> MeteredCall:
    """Runs one call forward, then forward and backward, and reads the meters."""
    inputs = [_detached(leaf, record.mutated) for leaf in leaves]

    def run() -> list[torch.Tensor]:
        args, kwargs = unflatten(inputs, record.tree)  # each time: a block may write into a list that it is given
        with tapping(module, taps) as tapped:
            results = tensors(flatten(module.forward(*args, **kwargs))[0])
        return results + tapped.tensors

    device = _device_of(module, leaves)
    with torch.enable_grad(), _casting_anew():
        try:
            metered, events, shapes = _first_run(run, device, drops=True)
        except _Asked:
            metered, events, shapes = _first_run(run, device, drops=False)
            # Dropped tensors are made again on the way: another run, beside what this one has by then.
            metered = replace(metered, forward_peak=2 * metered.forward_peak)
        for param in module.parameters():
            if param.requires_grad and param.grad is None:
                param.grad = torch.empty_like(param)  # gradients are added in place
        return _with_graph(metered, run, shapes, device, events)


@contextmanager
def _casting_anew() -> Iterator[None]:
    """Blocks run without autocast's cache of weights (runtime/blocks/autocast.py): here a second run would find those
    that the first one has cast, and seem to keep none of them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Asked(BaseException):
    """The block takes a gradient in its own forward: it needs what its graph saves. No error that it might mind."""


def _first_run(
    run: Callable[[], list[torch.Tensor]], device: torch.device | None, drops: bool
) -> tuple[MeteredCall, list[Event], list[torch.Tensor]]:
    """With its events, and with gradients of what it returns. See [Note: the first run]."""

    is_under_way = [True]

    def asked(_nothing: None) -> torch.Tensor:
        raise _Asked if is_under_way else RuntimeError(CHANGED)

    meter, work = AllocationMeter(inside=workspace_bytes), WorkMeter()
    with watched(after=(meter.saw, work.saw)):
        allocated = _Allocated(device)
        with saved_tensors_hooks(lambda _: None, asked) if drops else nullcontext():
            try:
                results = run()
            finally:
                is_under_way.clear()
        peak_bytes, events = max(meter.peak_bytes, allocated.peak_bytes), list(meter.events)
    edges = [get_gradient_edge(result) for result in results if result.requires_grad]
    gradients = [torch.zeros_like(result) for result in results]
    storages = {id(storage): storage for storage in map(torch.Tensor.untyped_storage, results)}
    outputs = sum(storage.nbytes() for storage in storages.values() if meter.ledger.knows(storage))
    del results, storages
    with_graph = meter.live_bytes if drops else 0
    del edges
    left = meter.live_bytes
    return MeteredCall(outputs, peak_bytes, work.counted, max(0, with_graph - left), left), events, gradients


def _with_graph(
    metered: MeteredCall,
    run: Callable[[], list[torch.Tensor]],
    gradients: list[torch.Tensor],
    device: torch.device | None,
    forward_events: Sequence[Event],
) -> MeteredCall:
    """The same, and what the graph of a second run keeps, and its backward takes."""
    events: Sequence[Event] = ()
    meter, work = AllocationMeter(inside=workspace_bytes), WorkMeter()
    with torch.enable_grad(), watched(after=(meter.saw, work.saw)):
        allocated = _Allocated(device)
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
        made = tuple(work.results[:num_results])
        kept = max(0, kept - metered.lasting - metered.left)
        metered = replace(metered, kept=kept, num_kept=len(saved) - 1, recompute=recompute, results=made)
        if edges:
            before = work.counted
            torch.autograd.backward([edge for edge, _ in edges], [gradient for _, gradient in edges])
            del held, stand_in
            meter.ledger.catch_up()
            peak_bytes = max(meter.peak_bytes, allocated.peak_bytes)
            metered, events = replace(metered, backward_peak=peak_bytes, backward=work.counted - before), meter.events
        return replace(metered, holes=holes_of(forward_events, events, metered.outputs))


class _Allocated:
    """What torch's allocator has handed out on a GPU since: kernels' own memory too, which no meter sees."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        if device is not None:
            torch.cuda.reset_peak_memory_stats(device)
            self._before_bytes = torch.cuda.memory_allocated(device)

    @property
    def peak_bytes(self) -> int:
        if self._device is None:
            return 0
        return int(torch.cuda.max_memory_allocated(self._device)) - self._before_bytes


def _device_of(module: nn.Module, leaves: Sequence[Any]) -> torch.device | None:
    """The GPU that a call runs on, if it has values and is there."""
    return next((one.device for one in (*module.parameters(), *tensors(leaves)) if one.is_cuda), None)


def _use_library(device: torch.device) -> None:
    """Its matrix library takes a workspace for each thread that multiplies, for good: no call takes it."""
    if device.type == "cuda":
        square = torch.ones(64, 64, device=device, requires_grad=True)
        (square @ square).sum().backward()


def _detached(leaf: Any, mutated: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    alone = leaf.detach().requires_grad_(leaf.requires_grad)
    with torch.enable_grad():
        return alone.clone() if mutated else alone  # autograd forbids to change a leaf in place, not its clone
