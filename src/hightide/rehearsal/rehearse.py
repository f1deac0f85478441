"""The costs of a model, measured: one block of each kind runs alone on the device."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hightide.ir.activation import Activation
from hightide.ir.block import ModelProfile, Selective, Work
from hightide.ir.costs import CallCost, CallPeaks, Costs, Curve, LossCost, Point, SelectiveCost
from hightide.optim.operands import Operands
from hightide.optim.registry import rule_for
from hightide.planner.loss_tiles import loss_tile_tokens
from hightide.planner.predict.estimate import FUSED_SHARE, GLUE_S
from hightide.process.progress import doing
from hightide.profiler.model.hooks import no_global_hooks
from hightide.profiler.probe.probe_record import CallRecord
from hightide.profiler.probe.probe_result import ProbeResult
from hightide.rehearsal.stage import LossTile, RehearsedCall, Stage
from hightide.rehearsal.stopwatch import Lap, MemoryReading, load_factor, time_laps
from hightide.runtime.blocks.compiled import SELECTIVE_BUDGET
from hightide.runtime.chunks.homes import DTYPES

NONE = Curve(())
COPIED_BYTES = {"cuda": 1 << 28, "cpu": 1 << 24}  # beyond any cache of a GPU
UPDATED_NUMEL = {"cuda": 1 << 25, "cpu": 1 << 18}


def measure_costs(
    profile: ModelProfile,
    probed: ProbeResult,
    records: Sequence[CallRecord],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    compile: bool,
    sizes: Sequence[int],
) -> Costs:
    """The model may be on the meta device, and is not touched. `sizes`: of micro-batches, the largest last."""
    assert not probed.failure, "blocks alone would get other values than those that it asks for"
    cuda = device.type == "cuda"
    with _quietly(device) as device:
        rehearsal = _Rehearsal(profile, sizes, device, compile, memory_rate(device))
        parts = _parts(profile, probed, records)
        found = []
        for number, part in enumerate(parts):
            with doing("timing blocks", f"kind {number + 1} of {len(parts)}"):
                found.append(rehearsal.call(part))
        with doing("timing blocks", "the loss"):
            loss = rehearsal.loss(parts)
        with doing("timing blocks", "under load"):
            factor = rehearsal.load_factor(parts, [cost for cost, _ in found])
    name = torch.cuda.get_device_name(device) if cuda else "the simulated accelerator"
    costs = Costs(
        source=f"measured on {name}{', compiled' if compile else ''}",
        fingerprint=profile.fingerprint,
        calls=tuple(cost for cost, _ in found),
        loss=loss,
        memory_bytes_per_s=rehearsal.memory_bytes_per_s,
        update_bytes_per_s=update_rate(optimizer, profile, device),
        glue_s=GLUE_S if cuda else 0.0,
        peaks=tuple(peaks for _, peaks in found),
        load_factor=factor,
    )
    let_go(device)
    return costs


def measure_selective(
    profile: ModelProfile,
    probed: ProbeResult,
    records: Sequence[CallRecord],
    costs: Costs,
    device: torch.device,
    compile: bool,
    micro_batch: int,
    kinds: Collection[int],
) -> Costs:
    """The costs with what calls of these kinds take under Activation.SELECTIVE, which had been estimated. One size: a
    compilation takes longer than all the rest."""
    calls, peaks = list(costs.calls), list(costs.peaks)
    with _quietly(device) as device:
        rehearsal = _Rehearsal(profile, [micro_batch], device, compile, costs.memory_bytes_per_s)
        parts = _parts(profile, probed, records)
        for kind in sorted(kinds):
            name = f"{parts[kind].spec.kind} (kind {kind})"  # a part of its own: the logger tells how long each took
            with doing(f"{'compiling' if compile else 'timing'} {name} held in part"):
                calls[kind], peaks[kind] = rehearsal.selective(parts[kind], calls[kind], peaks[kind])
    let_go(device)
    return replace(costs, calls=tuple(calls), peaks=tuple(peaks))


@contextmanager
def _quietly(device: torch.device) -> Iterator[torch.device]:
    """The device with its number. Random numbers of the user's, and his hooks, are aside."""
    cuda = device.type == "cuda"
    if cuda and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with torch.random.fork_rng([device] if cuda else []), no_global_hooks():
        yield device


def let_go(device: torch.device) -> None:
    """What was held must not be in the way of the model. Finding what holds itself takes a quarter of a second."""
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):  # else it makes a context on another one
            torch.cuda.empty_cache()


def _parts(profile: ModelProfile, probed: ProbeResult, records: Sequence[CallRecord]) -> list[RehearsedCall]:
    """One of each kind, by kind."""
    classes = Counter(type(block.module).forward for block in probed.blocks)
    found: dict[int, RehearsedCall] = {}
    for call, probed_call, record in zip(profile.calls, probed.calls, records, strict=True):
        module = probed.blocks[call.block].module
        found.setdefault(
            call.kind,
            RehearsedCall(
                spec=profile.blocks[call.block],
                call=call,
                probed=probed_call,
                record=record,
                module=module,
                num_equal=classes[type(module).forward],
                taps=tuple(probed.taps.get(call.block, ())),
            ),
        )
    return [found[kind] for kind in range(len(found))]


@dataclass
class _Found:
    """Of one part run in one way, by size."""

    forward_s: dict[int, float] = field(default_factory=dict)
    backward_s: dict[int, float] = field(default_factory=dict)
    forward_bytes: dict[int, float] = field(default_factory=dict)
    kept_bytes: dict[int, float] = field(default_factory=dict)
    backward_bytes: dict[int, float] = field(default_factory=dict)
    issue_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Rehearsal:
    profile: ModelProfile
    sizes: Sequence[int]
    device: torch.device
    compile: bool
    memory_bytes_per_s: float

    def call(self, part: RehearsedCall) -> tuple[CallCost, CallPeaks]:
        if part.spec.lazy_head:  # costs go by tiles, and bytes by arithmetic: see planner/loss_tiles.py
            return CallCost(NONE, NONE, NONE, NONE), CallPeaks(NONE, NONE, NONE)
        again = kept = self._run(part, Activation.RECOMPUTE)
        if part.call.recompute != Work():
            kept = self._run(part, Activation.KEEP)
        recompute_s = {size: max(0.0, again.backward_s[size] - seconds) for size, seconds in kept.backward_s.items()}
        backward_bytes = {
            size: max(again.backward_bytes[size], kept.kept_bytes[size] + num_bytes)
            for size, num_bytes in kept.backward_bytes.items()
        }
        cost = CallCost(
            forward_s=_curve(again.forward_s),
            forward_kept_s=_curve(kept.forward_s),
            recompute_s=_curve(recompute_s) if kept is not again else NONE,
            backward_s=_curve(kept.backward_s),
            issue_s=min(again.issue_s),
        )
        peaks = CallPeaks(_curve(again.forward_bytes), _curve(kept.kept_bytes), _curve(backward_bytes))
        if part.call.selective is None or kept is again:
            return cost, peaks
        return self._estimated(part.call.selective, cost, peaks) if self.compile else self.selective(part, cost, peaks)

    def _estimated(self, rule: Selective, cost: CallCost, peaks: CallPeaks) -> tuple[CallCost, CallPeaks]:
        """What is repeated is passes over memory, which compiled blocks make fewer of."""
        touched = rule.recompute.touched_bytes
        passes_s = {size: FUSED_SHARE * touched.at(size) / self.memory_bytes_per_s for size in self.sizes}
        recompute_s = {size: min(seconds, cost.recompute_s.at(size)) for size, seconds in passes_s.items()}
        held = {size: SELECTIVE_BUDGET * peaks.kept_bytes.at(size) for size in self.sizes}
        selective = SelectiveCost(cost.forward_kept_s, _curve(recompute_s))
        return replace(cost, selective=selective), replace(peaks, selective_bytes=_curve(held))

    def selective(self, part: RehearsedCall, cost: CallCost, peaks: CallPeaks) -> tuple[CallCost, CallPeaks]:
        found = self._run(part, Activation.SELECTIVE)
        recompute_s = {size: max(0.0, seconds - cost.backward_s.at(size)) for size, seconds in found.backward_s.items()}
        higher = max(
            (found.kept_bytes[size] + num_bytes) / max(1.0, peaks.backward_bytes.at(size))
            for size, num_bytes in found.backward_bytes.items()
        )
        backward = [Point(point.num_samples, point.value * max(1.0, higher)) for point in peaks.backward_bytes.points]
        told = cost.selective or SelectiveCost(NONE, NONE)
        selective = SelectiveCost(
            _in_proportion(told.forward_s, found.forward_s),
            _in_proportion(told.recompute_s, recompute_s),
            is_measured=True,
        )
        held = _in_proportion(peaks.selective_bytes, found.kept_bytes)
        return replace(cost, selective=selective), replace(
            peaks, selective_bytes=held, backward_bytes=Curve(tuple(backward))
        )

    def _run(self, part: RehearsedCall, activation: Activation) -> _Found:
        sizes = self.sizes if part.call.splittable else [self.profile.num_samples]
        found = _Found()
        with self._on_stage(part, max(sizes), activation) as stage:
            for size in sizes:
                self._run_size(stage, size, found)
        return found

    def _run_size(self, stage: Stage, size: int, found: _Found) -> None:
        call, gradients = stage.arguments(size), list[Tensor]()
        laps = time_laps(self._pass(stage, call, gradients), self.device)
        found.forward_s[size] = laps.seconds[0]
        found.issue_s.append(laps.issue_s)
        if gradients:
            found.backward_s[size] = self._without_clear(laps.seconds[1], stage)
        self._read_memory(stage, size, call, gradients, found)

    def _pass(self, stage: Stage, call: Any, gradients: list[Tensor]) -> Callable[[Lap], None]:
        """Forward and backward. `gradients` of its results are drawn by the first one."""

        def once(lap: Lap) -> None:
            results = stage.forward(*call)
            if not gradients:
                gradients.extend(torch.randn_like(result) for result in results)
            lap()
            if results:
                torch.autograd.backward(results, gradients)
            lap()
            stage.end_step(*call)

        return once

    def load_factor(self, parts: Sequence[RehearsedCall], costs: Sequence[CallCost]) -> float:
        """Of the kind that takes most of a step."""
        if self.device.type != "cuda":
            return 1.0
        calls = Counter(call.kind for call in self.profile.calls)
        size = self.sizes[-1]
        part = max(parts, key=lambda part: calls[part.call.kind] * costs[part.call.kind].backward_s.at(size))
        num_samples = size if part.call.splittable else self.profile.num_samples
        with self._on_stage(part, num_samples, Activation.RECOMPUTE) as stage:
            return load_factor(self._pass(stage, stage.arguments(num_samples), []), self.device)

    def _read_memory(self, stage: Stage, size: int, call: Any, gradients: list[Tensor], found: _Found) -> None:
        memory = MemoryReading(stage.run)
        before = memory.restart()
        results = stage.forward(*call)
        outputs = sum(result.nbytes for result in results)
        found.forward_bytes[size] = max(0, memory.peak_bytes - before - outputs)
        found.kept_bytes[size] = max(0, memory.now_bytes - before - outputs)
        if results:
            before = memory.restart()
            torch.autograd.backward(results, gradients)
            found.backward_bytes[size] = memory.peak_bytes - before
        stage.end_step(*call)

    def loss(self, parts: Sequence[RehearsedCall]) -> LossCost | None:
        part = next((part for part in parts if part.spec.lazy_head), None)
        if part is None:
            return None
        tile = loss_tile_tokens(self.profile)
        forward_s, again_s = self._tile_seconds(part, LossTile(tile, 0))
        kept_s = again_s
        if part.spec.plain_linear:  # others keep nothing
            _, kept_s = self._tile_seconds(part, LossTile(tile, tile))
        return LossCost(tile, forward_s, kept_s, max(0.0, again_s - kept_s))

    def _tile_seconds(self, part: RehearsedCall, tile: LossTile) -> tuple[float, float]:
        """Forward and backward."""
        hidden = part.record.inputs[0]
        with self._on_stage(part, tile.num_tokens, Activation.RECOMPUTE, tile) as stage:
            rows = torch.randn(tile.num_tokens, hidden.shape[-1], dtype=hidden.dtype, device=self.device)
            rows.requires_grad_(hidden.requires_grad)
            target = torch.randint(self.profile.vocabulary, (tile.num_tokens,), device=self.device)
            stage.run.adopt([rows, target], "activations")

            def once(lap: Lap) -> None:
                loss = stage.root(rows, target)
                lap()
                if loss.requires_grad:
                    loss.backward()
                lap()
                stage.end_step((rows,), {})

            forward_s, backward_s = time_laps(once, self.device).seconds
            return forward_s, self._without_clear(backward_s, stage)

    def _without_clear(self, backward_s: float, stage: Stage) -> float:
        """Clearing its gradients is an action of its own."""
        return max(0.0, backward_s - stage.grad_bytes / self.memory_bytes_per_s)

    @contextmanager
    def _on_stage(
        self, part: RehearsedCall, num_samples: int, activation: Activation, tile: LossTile | None = None
    ) -> Iterator[Stage]:
        stage = Stage(part, self.profile, num_samples, activation, self.device, self.compile, tile)
        try:
            yield stage
        finally:
            stage.close()
            if self.device.type == "cuda":
                with torch.cuda.device(self.device):
                    torch.cuda.empty_cache()  # what one part held must not be in the way of the next


def _in_proportion(told: Curve, found: dict[int, float]) -> Curve:
    """What was found; at other sizes what had been told of them, by how far that was off at the largest one."""
    largest = max(found, default=0)
    factor = found[largest] / told.at(largest) if told.at(largest) else 0.0
    scaled = {point.num_samples: point.value * factor for point in told.points if factor}
    return _curve({**scaled, **found})


def _curve(values: dict[int, float]) -> Curve:
    return Curve(tuple(Point(size, value) for size, value in sorted(values.items())))


# -- rates of the device ------------------------------------------------------------------------------------------


def memory_rate(device: torch.device) -> float:
    """Bytes read and written per second by a copy."""
    source = torch.ones(COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)

    def once(lap: Lap) -> None:
        target.copy_(source)
        lap()

    return 2 * source.nbytes / time_laps(once, device).seconds[0]


def update_rate(optimizer: torch.optim.Optimizer, profile: ModelProfile, device: torch.device) -> float:
    """Bytes touched per second, as an UPDATE counts them: each array once."""
    rule = rule_for(optimizer)
    hyper = rule.read(optimizer.param_groups[0])
    numel = UPDATED_NUMEL[device.type]
    dtype = getattr(torch, max(profile.params, key=lambda spec: spec.numel).dtype)
    in_parts = dtype == torch.bfloat16

    def array(kind: torch.dtype, per_numel: int = 1) -> Tensor:
        return torch.zeros(-(-numel // per_numel), dtype=kind, device=device)

    operands = Operands(
        None if in_parts else array(torch.float32),
        array(torch.float32),
        tuple(array(DTYPES[state.dtype], state.per_numel) for state in rule.states),
        None if dtype == torch.float32 else array(dtype),
        array(torch.int16) if in_parts else None,
        tuple(state.per_numel for state in rule.states),
    )

    def once(lap: Lap) -> None:
        rule.update(operands, 1, hyper)
        lap()

    return operands.touched_bytes / time_laps(once, device).seconds[0]
