"""Two runs of a model, with B and B + 1 samples, held against each other: which dimensions carry the batch.

[Note: what the two runs tell] A dimension of size rows * B in the first run and rows * (B + 1) in the second carries
the batch; one that stays does not. The samples are the user's own, so that paths which depend on data (a mask for
padded batches only) are the real ones; the extra sample repeats the last one. Tensors are followed by storage, which
tells inputs that an earlier call made or got from those that the model's code made in between. A dispatch mode
watches for parameters used while no block that holds them is running: these must be loose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hightide.ir.block import Affine
from hightide.ir.split import BatchDim, Split
from hightide.profiler.model.block_finder import FoundBlock
from hightide.profiler.model.call_tree import num_bytes, tensors
from hightide.profiler.model.samples import Samples, refuse_nested
from hightide.profiler.probe.probe_record import CallRecord, ProbeRecord, storage_of
from hightide.profiler.probe.probe_result import FAILED, ProbedCall, ProbeResult
from hightide.profiler.probe.tap_search import merged

MUTATES_INPUT = "it changes an input in place"
NO_SAMPLES = "the tensors of the batch share no dimension that could be its samples"
HOOKED = "a hook inside of it changes what it computes"


def compare(
    blocks: Sequence[FoundBlock],
    first: ProbeRecord,
    second: ProbeRecord,
    samples: Samples = Samples.FIRST,
    asks: str = "",
) -> ProbeResult:
    """What the two runs tell; see [Note: what the two runs tell]. `asks`: why there was one only, on values."""
    failure = first.failure or second.failure
    unsplit = failure or asks
    sizes = _sizes(first) | _sizes(second)
    calls = []
    for one, two in pair_records(first, second):
        split = _learn_split(one, two, first.num_samples)
        if unsplit and (split.splittable or two is None):
            split = replace(split, note=FAILED.format(unsplit))
        if one.block in first.rehooked and split.splittable:
            split = replace(split, note=HOOKED)
        if samples is Samples.NOWHERE:
            split = replace(split, note=NO_SAMPLES)
        larger = sizes[id(two)] if two else {}
        call = ProbedCall(
            block=one.block,
            split=split,
            needs_backward=one.needs_backward,
            input_shapes=_shapes(one.inputs),
            output_shapes=_shapes(one.outputs),
            **{name: _fit(first.num_samples, size, larger.get(name)) for name, size in sizes[id(one)].items()},
            num_saved=sum(tensor.requires_grad for tensor in one.inputs),
            without_grad=one.without_grad,
        )
        calls.append(call)
    loose = first.loose | second.loose
    captured = first.captured | second.captured
    return ProbeResult(
        first.num_samples,
        tuple(blocks),
        agreed(calls),
        first.uses,
        loose,
        failure,
        captured=captured,
        taps=first.taps,
        more_taps=merged(first.more_taps, second.more_taps),
        written=first.written | second.written,
        refusals={record.block: record.problem for run in (first, second) for record in run.records if record.problem},
        returned={record.block: record.returned for record in first.records if record.returned is not None},
        samples=samples,
    )


def pair_records(first: ProbeRecord, second: ProbeRecord) -> Iterator[tuple[CallRecord, CallRecord | None]]:
    """Each call of the first run with the same call of the second: the n-th of a block in one way of calling it."""
    partners = dict(zip(_occurrences(second.records), second.records, strict=True))
    for occurrence, record in zip(_occurrences(first.records), first.records, strict=True):
        yield record, partners.get(occurrence)


def _occurrences(records: list[CallRecord]) -> Iterator[tuple[int, str, int]]:
    count: Counter[tuple[int, str]] = Counter()
    for record in records:
        count[record.block, record.way] += 1
        yield record.block, record.way, count[record.block, record.way]


def _learn_split(one: CallRecord, two: CallRecord | None, num_samples: int) -> Split:
    if two is None:
        return Split(one.signature, (), (), note="the calls of the block depend on the batch size")
    try:
        inputs = tuple(_batch_dims("input", one.inputs, two.inputs, num_samples))
        outputs = tuple(_batch_dims("output", one.outputs, two.outputs, num_samples))
        _check_numbers("argument", one.leaves, two.leaves)
        _check_numbers("result", one.results, two.results)
    except _NotSplittable as reason:
        return Split(one.signature, (), (), note=str(reason))
    return Split(one.signature, inputs, outputs, note=_obstacle(two, inputs, outputs))


class _NotSplittable(Exception):
    pass


def _batch_dims(
    what: str, one: list[torch.Tensor], two: list[torch.Tensor], num_samples: int
) -> Iterator[BatchDim | None]:
    if len(one) != len(two):
        raise _NotSplittable(f"the number of {what} tensors depends on the batch size ({len(one)} and {len(two)})")
    refuse_nested((*one, *two), f"an {what} of a block")
    for index, (a, b) in enumerate(zip(one, two, strict=True)):
        changed = [dim for dim in range(a.ndim) if a.shape[dim] != b.shape[dim]]
        if not changed:
            yield None
            continue
        rows, rest = divmod(a.shape[changed[0]], num_samples)
        if len(changed) > 1 or rest or b.shape[changed[0]] != rows * (num_samples + 1):
            raise _NotSplittable(
                f"{what} {index} has shape {tuple(a.shape)} for {num_samples} samples and {tuple(b.shape)} for "
                f"{num_samples + 1}: not one dimension in proportion"
            )
        yield BatchDim(changed[0], rows)


def _check_numbers(what: str, one: list[Any], two: list[Any]) -> None:
    """A micro-batch gets, and returns, the same numbers as the whole batch."""
    for a, b in zip(one, two, strict=True):
        if not isinstance(a, torch.Tensor) and not _is_same(a, b):
            raise _NotSplittable(f"an {what} that is no tensor depends on the batch ({a!r:.40} and {b!r:.40})")


def _is_same(one: Any, two: Any) -> bool:
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if hasattr(one, "shape"):  # an array
        return bool(one.shape == two.shape)
    return not isinstance(one, int | float | str | range) or bool(one == two)


def _obstacle(record: CallRecord, inputs: tuple[BatchDim | None, ...], outputs: tuple[BatchDim | None, ...]) -> str:
    """Why a call must see the whole batch at once; "" if it need not."""
    if record.inputs and not any(tensor.is_floating_point() for tensor in record.inputs):
        return "only integer inputs: split, it would write a dense gradient for each micro-batch"
    if not any(inputs):
        return "no input carries the batch"
    if not any(outputs):
        return "no output carries the batch"
    if record.mutated:
        return MUTATES_INPUT
    sources = [tensor for tensor, dim in zip(record.inputs, inputs, strict=True) if dim]
    for index, (tensor, dim) in enumerate(zip(record.outputs, outputs, strict=True)):
        if dim is None and _depends_on(tensor, sources):
            return f"output {index} has no batch dimension but is computed from the batch (an auxiliary loss?)"
    return ""


def _depends_on(result: torch.Tensor, sources: list[torch.Tensor]) -> bool:
    """Whether autograd leads from a result to one of the sources. Tensors that need no gradient cannot be told."""
    goals = {tensor.grad_fn for tensor in sources if tensor.grad_fn is not None}
    leaves = {id(tensor) for tensor in sources if tensor.requires_grad and tensor.grad_fn is None}
    todo, seen = [result.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node in goals or id(getattr(node, "variable", None)) in leaves:
            return True
        seen.add(node)
        todo.extend(parent for parent, _ in node.next_functions)
    return False


def agreed(calls: list[ProbedCall]) -> tuple[ProbedCall, ...]:
    """Calls of one block with one signature must divide in one way: at run time nothing else tells them apart."""
    splits: dict[tuple[int, str], set[Split]] = {}
    for call in calls:
        splits.setdefault((call.block, call.split.signature), set()).add(call.split)
    agreed = []
    for call in calls:
        if len(splits[call.block, call.split.signature]) > 1:
            note = call.split.note or "calls with the same signature differ in which tensors carry the batch"
            call = replace(call, split=Split(call.split.signature, (), (), note=note))
        agreed.append(call)
    return tuple(agreed)


def _fit(num_samples: int, first: int, second: int | None) -> Affine:
    """Bytes as a function of the number of samples, from those of the two runs. None: the second lacks the call."""
    per_sample = -1 if second is None else second - first
    if per_sample < 0 or per_sample * num_samples > first:
        return Affine(0, -(-first // num_samples))
    return Affine(first - per_sample * num_samples, per_sample)


def _sizes(run: ProbeRecord) -> dict[int, dict[str, int]]:
    """Bytes of each call, as ProbedCall names them."""
    return {
        id(record): {
            "new_inputs": new_inputs,
            "saved_inputs": _grad_bytes(record.inputs),
            "outputs": num_bytes(tensors(record.results)),
            "tapped": num_bytes(record.tapped) + _grad_bytes(record.tapped),  # about what a loss of it saves
        }
        for record, new_inputs in zip(run.records, _new_input_bytes(run), strict=True)
    }


def _new_input_bytes(run: ProbeRecord) -> Iterator[int]:
    """Per call: bytes of input storages that are not the batch's, nor a parameter's, nor known from an earlier call."""
    seen = {storage_of(tensor) for tensor in run.known}
    for record in run.records:
        total = 0
        for tensor in record.inputs:
            if storage_of(tensor) not in seen:
                seen.add(storage_of(tensor))
                total += tensor.untyped_storage().nbytes()
        seen.update(storage_of(tensor) for tensor in record.outputs)
        yield total


def _grad_bytes(inputs: list[torch.Tensor]) -> int:
    """Of a tensor that is passed twice, twice: it is stashed twice, and has two gradients."""
    return sum(tensor.numel() * tensor.element_size() for tensor in inputs if tensor.requires_grad)


def _shapes(values: list[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(value.shape) for value in values)
