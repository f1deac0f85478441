"""Memory of the model's own code between blocks: tensors that it makes, and what its graph keeps for backward.

[Note: metering between blocks] The model runs once more without values, forward and backward. A stand-in for each
block returns tensors like those that were recorded, and gradients of its inputs, and keeps of these only what has no
gradient (masks, positions), as if the others waited on the host. So what the meter sees at a block's tick is held by
the code around it or by blocks before: a residual that waits for its sum, what a product saves for its gradient, a
dropout's mask. In between it sees what that code needs at most. Tensors that a plan leaves on the GPU for a block, and
the code around it holds as well, are counted twice.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from hightide.ir.block import Affine, Glue
from hightide.process.interrupts import safe_point
from hightide.profiler.fake.watching import watched
from hightide.profiler.model.call_tree import Batch, flatten, flatten_call, tensors, unflatten
from hightide.profiler.probe.compare_runs import pair_records
from hightide.profiler.probe.probe import in_sizes
from hightide.profiler.probe.probe_record import CallRecord, ProbeRecord
from hightide.profiler.probe.probe_result import ProbeResult
from hightide.profiler.probe.taps import hand_out
from hightide.stores.meter import AllocationMeter


@dataclass(frozen=True)
class GlueNeeds:
    forward: tuple[Glue, ...]  # by call
    backward: tuple[Glue, ...]
    end: Affine


def measure_glue(
    model: nn.Module, batch: Batch, probed: ProbeResult, runs: tuple[ProbeRecord, ProbeRecord], lazy_head: int | None
) -> GlueNeeds:
    """Of the calls in `runs`. To be called with fake parameters; raises whatever the model's code raises without
    values, in its backward too. What is between a lazy head and the end of its backward is the fused loss, which counts
    for itself."""

    def meter(extra: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Metered:
        return _meter(model, probed, runs[extra].records, lazy_head, args, kwargs)

    one, *more = in_sizes((0,) if probed.on_values else (0, 1), model, batch, meter, probed.samples)
    two = more[0] if more else _Metered([], [])
    places = {id(record): place for place, record in enumerate(runs[1].records)}
    fit = partial(_fit, probed.num_samples)

    def glue(first: list[_Level], second: list[_Level]) -> tuple[Glue, ...]:
        pairs = [
            (first[place], second[places[id(other)]] if other is not None else None)
            for place, (_, other) in enumerate(pair_records(*runs))
        ]
        return tuple(
            Glue(fit(a.held, None if b is None else b.held), fit(a.peak, None if b is None else b.peak))
            for a, b in pairs
        )

    end = fit(one.end, two.end if more else None)
    return GlueNeeds(glue(one.forward, two.forward), glue(one.backward, two.backward), end)


def _fit(num_samples: int, first: int, second: int | None) -> Affine:
    if second is None:
        return Affine.through(num_samples, first, num_samples, first)
    return Affine.through(num_samples, first, num_samples + 1, second)


@dataclass(frozen=True)
class _Level:
    """Bytes at one tick; see Glue."""

    held: int = 0
    peak: int = 0


@dataclass
class _Metered:
    """One run, by record."""

    forward: list[_Level]
    backward: list[_Level]
    end: int = 0


def _meter(
    model: nn.Module,
    probed: ProbeResult,
    records: Sequence[CallRecord],
    lazy_head: int | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Metered:
    for param in model.parameters():
        if param.requires_grad and param.grad is None:
            param.grad = torch.empty_like(param)  # those of loose ones are added in place
    watch = _Watch(records, lazy_head)
    with torch.enable_grad(), watched(after=(watch.meter.saw,)):
        with _standing_in(probed, watch):
            result = model(*args, **kwargs)
            roots = [tensor for tensor in tensors(flatten(result)[0]) if tensor.requires_grad]
            roots = [root for root in roots if root.numel() == 1] or roots  # a loss, or what one is made of outside
            if lazy_head is not None:
                del result  # with logits that are never made; else the user may hold it until the step
            if roots:
                grads = [root.new_empty(()).expand_as(root) for root in roots]
                trained = [param for param in model.parameters() if param.requires_grad]
                torch.autograd.backward(roots, grads, inputs=[watch.anchor, *trained])  # not to tensors of the user's
        watch.metered.end = watch.level([]).peak
    return watch.metered


class _Watch:
    """Reads the meter at every tick."""

    def __init__(self, records: Sequence[CallRecord], lazy_head: int | None) -> None:
        self.meter = AllocationMeter(self._changed)
        self.records = records
        self.lazy_head = lazy_head
        self.metered = _Metered([_Level()] * len(records), [_Level()] * len(records))
        self._live_bytes = self._peak_bytes = 0
        self._num_called: dict[int, int] = {}
        self._latest: list[torch.Tensor] = []  # results of the call before
        self._seen: set[weakref.ref[torch.UntypedStorage]] = set()  # of what calls have received or returned
        self.anchor = torch.empty(0, requires_grad=True)

    def called(self, block: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        safe_point()
        place = self._next_call(block)
        record = self.records[place]
        inputs = tensors(flatten_call(args, kwargs)[0])
        own = [one for one in inputs if one.requires_grad or not self._has_seen(one)]
        self.metered.forward[place] = self.level([*own, *self._latest])
        outputs = list(_StandIn.apply(self, place, self.anchor if record.needs_backward else None, *inputs))
        self._latest = [output.detach() for output in outputs]
        self._seen.update(map(_storage_ref, (*inputs, *outputs)))
        leaves = [outputs.pop(0) if isinstance(leaf, torch.Tensor) else leaf for leaf in record.results]
        self.left()
        hand_out(module, record.tap_parts, outputs)
        assert record.result_tree is not None
        return unflatten(leaves, record.result_tree)

    def _has_seen(self, tensor: torch.Tensor) -> bool:
        """Whether it has been counted with an earlier call (a mask, positions), if that is still waiting."""
        return _storage_ref(tensor) in self._seen

    def came_back(self, place: int, grads: Sequence[torch.Tensor | None]) -> None:
        self._latest = []
        if self.records[place].block == self.lazy_head:  # all that was held when the loss began, and the loss
            self.metered.backward[place] = _Level(self.metered.forward[place].held)
        else:
            self.metered.backward[place] = self.level([grad for grad in grads if grad is not None])

    def _next_call(self, block: int) -> int:
        """A call that was not recorded (a checkpoint of the user's runs its forward again) is like the last one."""
        places = [place for place, record in enumerate(self.records) if record.block == block]
        number = self._num_called[block] = self._num_called.get(block, 0) + 1
        return places[min(number, len(places)) - 1]

    def left(self) -> None:
        """A tick. What it has still in its hands is gone before anything is made."""
        self._peak_bytes = 0

    def level(self, own: Sequence[torch.Tensor]) -> _Level:
        """`own` tensors are counted elsewhere, but not what they are a part of."""
        known: dict[int, int] = {}
        for tensor in own:
            storage = tensor.untyped_storage()
            if self.meter.ledger.knows(storage):
                num_bytes = known.get(id(storage), 0) + tensor.numel() * tensor.element_size()
                known[id(storage)] = min(storage.nbytes(), num_bytes)
        live_bytes = self.meter.live_bytes
        return _Level(live_bytes - sum(known.values()), max(live_bytes, self._peak_bytes))

    def _changed(self, delta_bytes: int, _label: str) -> None:
        self._live_bytes += delta_bytes
        if delta_bytes > 0:
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)


def _storage_ref(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
    return weakref.ref(tensor.untyped_storage())


class _StandIn(torch.autograd.Function):
    """In the place of a block. See [Note: metering between blocks]."""

    @staticmethod
    def forward(
        ctx: Any, watch: _Watch, place: int, anchor: torch.Tensor | None, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        record = watch.records[place]
        ctx.watch, ctx.place = watch, place
        ctx.set_materialize_grads(False)
        is_lazy = record.block == watch.lazy_head
        outputs = [_like(output, is_lazy) for output in record.outputs]
        recorded = zip(record.outputs, outputs, strict=True)
        ctx.save_for_backward(*(tensor for tensor in inputs if not tensor.requires_grad))  # nobody else may have them
        ctx.mark_non_differentiable(*(output for like, output in recorded if not like.requires_grad))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.watch.came_back(ctx.place, grads)
        inputs = ctx.watch.records[ctx.place].inputs
        made = [
            torch.zeros_like(tensor, memory_format=torch.contiguous_format) if wanted else None
            for tensor, wanted in zip(inputs, ctx.needs_input_grad[3:], strict=True)
        ]
        ctx.watch.left()
        return None, None, None, *made


def _like(output: torch.Tensor, is_lazy: bool) -> torch.Tensor:
    """With its values, if it has any: the code around may ask for them."""
    if isinstance(output, FakeTensor):
        return output.new_empty(()).expand(output.shape) if is_lazy else torch.empty_like(output)
    return output.detach() if is_lazy else output.detach().clone()


@contextmanager
def _standing_in(probed: ProbeResult, watch: _Watch) -> Iterator[None]:
    """What hangs on the modules is put back by `fake_parameters`, too."""
    with ExitStack() as stack:
        for index, block in enumerate(probed.blocks):
            own = block.module.__dict__
            before = own.get("forward")
            own["forward"] = partial(watch.called, index, block.module)
            stack.callback(own.pop, "forward") if before is None else stack.callback(own.update, forward=before)
        stack.enter_context(patch.object(torch.Tensor, "register_hook", _never_called))
        yield


def _never_called(_tensor: torch.Tensor, _hook: Any) -> RemovableHandle:
    """Hooks that the model's code puts on its tensors are the user's, and would see gradients without values."""
    return RemovableHandle(OrderedDict())
