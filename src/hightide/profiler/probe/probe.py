"""A model run twice without values, with B and B + 1 samples, and its blocks tried on values. See [Note: what the two
runs tell] in compare_runs.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from hightide.process.system import return_freed_memory
from hightide.profiler.fake.fake import Originals, fake_parameters
from hightide.profiler.fake.values import Values
from hightide.profiler.model.block_finder import FoundBlock
from hightide.profiler.model.call_tree import Batch, leaves_key, num_bytes
from hightide.profiler.model.kinds import is_plain_linear, kinds_of
from hightide.profiler.model.samples import Samples, num_samples, resized
from hightide.profiler.probe.compare_runs import agreed, compare, pair_records
from hightide.profiler.probe.probe_record import Forward, ProbeRecord, Recorder
from hightide.profiler.probe.probe_result import ProbeResult
from hightide.profiler.probe.tap_search import Taps
from hightide.profiler.switches.caches import Caches
from hightide.profiler.trial.independence import Finding, examine
from hightide.profiler.trial.repeated_call import TriedCall
from hightide.profiler.trial.state import GlobalRandom

T = TypeVar("T")
CPU = torch.device("cpu")
LARGE = 2**20  # parameters of a block; finding what holds itself takes a moment


def probe(
    model: nn.Module,
    blocks: Sequence[FoundBlock],
    batch: Batch,
    *,
    forward: Forward | None = None,
    taps: Taps | None = None,
    device: torch.device = CPU,
    samples: Samples = Samples.FIRST,
) -> ProbeResult:
    """Runs the model twice without values and tells what its blocks do. Leaves the model as it was, whatever happens.

    `forward` is called in the model's place (a wrapped model passes its plain forward). Blocks are tried on `device`.
    """
    with fake_parameters(model) as originals:
        runs = record_runs(model, blocks, batch, forward, taps, samples)
        return examined(compare(blocks, *runs, samples), runs, originals, device)


def examined(
    probed: ProbeResult, runs: tuple[ProbeRecord, ProbeRecord], originals: Originals, device: torch.device
) -> ProbeResult:
    """With every split tried on values, one of each kind: see [Note: trying a block alone]. To be called with fake
    parameters."""
    kinds = kinds_of(probed.blocks)
    found: dict[Any, Finding] = {}
    calls, keeps, refusals, replays_whole = list(probed.calls), {}, dict(probed.refusals), set()
    originals.forget_attributes()
    for at, (call, (record, larger)) in enumerate(zip(probed.calls, pair_records(*runs), strict=False)):
        block = probed.blocks[call.block]
        if is_plain_linear(block.module) or (not call.split.splittable and _is_of_torch(block.module)):
            continue
        taps = tuple(probed.taps.get(call.block, ()))
        numbers = tuple(leaf for leaf in record.leaves if isinstance(leaf, int | float))
        key = kinds[call.block], call.split, taps, leaves_key(record.leaves), numbers
        if key not in found:
            sized = (record, probed.num_samples) if larger is None else (larger, probed.num_samples + 1)
            found[key] = examine(TriedCall(block.module, *sized, call.split, taps), originals, device)
        finding = found[key]
        if finding.refusal:
            refusals[call.block] = finding.refusal
        if finding.keeps:
            keeps[call.block] = finding.keeps
        if finding.replays_whole:
            replays_whole.add(call.block)
        # Replays begin from what was there, and end with what is there by then.
        kept_bytes = 2 * num_bytes(list(block.module.buffers())) if finding.keeps else 0
        calls[at] = replace(
            call,
            split=replace(call.split, note=finding.note),
            tapped=replace(call.tapped, fixed=call.tapped.fixed + kept_bytes),
        )
    give_back(probed, device)
    return replace(probed, calls=agreed(calls), keeps=keeps, refusals=refusals, replays_whole=frozenset(replays_whole))


def give_back(probed: ProbeResult, device: torch.device) -> None:
    """The memory of the trials: else the model's values come on top of it, and what is left of it in torch's cache is
    room beyond a limit. Small ones are not worth the time."""
    if max((sum(param.numel() for param in block.module.parameters()) for block in probed.blocks), default=0) > LARGE:
        gc.collect()
        return_freed_memory()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def _is_of_torch(module: nn.Module) -> bool:
    """One of torch's own layers, without parts: it keeps nothing that nobody sees."""
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


def record_runs(
    model: nn.Module,
    blocks: Sequence[FoundBlock],
    batch: Batch,
    forward: Forward | None = None,
    taps: Taps | None = None,
    samples: Samples = Samples.FIRST,
    values: Values | None = None,
) -> tuple[ProbeRecord, ProbeRecord]:
    """The two runs. To be called with fake parameters. On `values` there is one: the second has no calls."""
    size = num_samples(batch, samples)

    def record(extra: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProbeRecord:
        return Recorder(model, blocks, size + extra, taps or {}, values).run(forward or model, args, kwargs)

    if values is None:
        first, second = in_sizes((0, 1), model, batch, record, samples)
        return first, second
    (only,) = in_sizes((0,), model, batch, record, samples)
    return only, replace(only, num_samples=size + 1, records=[])


def in_sizes(
    extras: Sequence[int],
    model: nn.Module,
    batch: Batch,
    run: Callable[[int, tuple[Any, ...], dict[str, Any]], T],
    samples: Samples = Samples.FIRST,
) -> list[T]:
    """Calls `run` with each of `extras`, for so many samples more, and the arguments of the model's call."""
    with random_kept() as rewind, Caches(model).in_every_call(model), torch.enable_grad():
        results = []
        for extra in extras:
            rewind()
            args, kwargs = resized(batch, samples, extra)
            results.append(run(extra, args, kwargs))
    return results


@contextmanager
def random_kept() -> Iterator[Callable[[], None]]:
    """Keeps the state of random numbers; yields a function that goes back to it, so that both runs draw the same."""
    before = GlobalRandom()
    try:
        yield before.restore
    finally:
        before.restore()
