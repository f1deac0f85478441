"""Two runs of a model without values, with B and B + 1 samples: the calls of its blocks, and how each divides.

[Note: what the two runs tell] A dimension of size rows * B in the first run and rows * (B + 1) in the second carries
the batch; one that stays does not. The samples are the user's own, so that paths which depend on data (a mask for
padded batches only) are the real ones; the extra sample repeats the last one. Tensors are followed by storage, which
tells inputs that an earlier call made or got from those that the model's code made in between. A dispatch mode
watches for parameters used while no block that holds them is running: these must be loose.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from hightide.ir.block import Affine
from hightide.ir.split import BatchDim, Split
from hightide.process.system import return_freed_memory
from hightide.profiler.model.block_finder import FoundBlock
from hightide.profiler.model.call_tree import Batch, leaves_key, num_bytes, tensors
from hightide.profiler.model.fake import Originals, fake_parameters
from hightide.profiler.model.kinds import are_alike, is_plain_linear, kinds_of
from hightide.profiler.model.probe_record import CallRecord, Forward, ProbeRecord, Recorder, storage_of
from hightide.profiler.model.samples import Samples, num_samples, resized
from hightide.profiler.model.tap_search import Taps, merged
from hightide.profiler.model.values import Values
from hightide.profiler.switches.caches import Caches
from hightide.profiler.trial.independence import Finding, examine
from hightide.profiler.trial.repeated_call import TriedCall
from hightide.profiler.trial.state import GlobalRandom

MUTATES_INPUT = "it changes an input in place"
NOT_PROBED = "this way of calling the block was not probed"
NO_SAMPLES = "the tensors of the batch share no dimension that could be its samples"
HOOKED = "a hook inside of it changes what it computes"
FAILED = "the probe of the model failed ({})"
T = TypeVar("T")
CPU = torch.device("cpu")
LARGE = 2**20  # parameters of a block; finding what holds itself takes a moment


@dataclass(frozen=True)
class ProbedCall:
    """One call of a block in one forward. Bytes are those of the whole batch; shapes are those of the example batch."""

    block: int  # index into ProbeResult.blocks
    split: Split
    needs_backward: bool
    input_shapes: tuple[tuple[int, ...], ...]  # per tensor leaf, as in `split`
    output_shapes: tuple[tuple[int, ...], ...]
    new_inputs: Affine
    saved_inputs: Affine
    outputs: Affine  # of its result
    tapped: Affine  # what its taps take out, which lives until backward
    num_saved: int = 1


@dataclass(frozen=True)
class ProbeResult:
    num_samples: int
    blocks: tuple[FoundBlock, ...]
    calls: tuple[ProbedCall, ...]  # in execution order; only the part before the failure, if there was one
    uses: Mapping[int, tuple[str, ...]]  # per block: keys of the parameters that its calls used, in order of first use
    loose: frozenset[str]  # keys of parameters used outside of the calls of their blocks
    failure: str  # why the model could not be probed to its end; "" if it could
    on_values: bool = False  # then it was run on values, and all is known: see [Note: a pass on values]
    captured: frozenset[str] = frozenset()  # blocks out of whose middle the model took a tensor in a way that is no tap
    taps: Taps = field(default_factory=dict)  # per block, in this probe
    more_taps: Taps = field(default_factory=dict)  # that it found: probe again with them
    written: frozenset[str] = frozenset()  # keys of parameters that a forward has given other values
    keeps: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # per block: what of it a forward changes
    refusals: Mapping[int, str] = field(default_factory=dict)  # per block: why it cannot be trained like this
    returned: Mapping[int, int | str] = field(default_factory=dict)  # per block: the argument that it fills and returns
    samples: Samples = Samples.FIRST  # where they are in the batch
    shapes: frozenset[tuple[int, ...]] = frozenset()  # of the batch's tensors, whatever the number of samples
    replays_whole: frozenset[int] = frozenset()  # blocks that are recomputed to their end: see Finding

    @property
    def all_taps(self) -> Taps:
        return merged(self.taps, self.more_taps)

    def split(self, block: int, signature: str) -> Split:
        """How a call divides. A block that was not called this way learns from one that is built the same."""
        found = [call for call in self.calls if call.split.signature == signature]
        for call in sorted(found, key=lambda call: call.block != block):
            if call.block == block or are_alike(self.blocks[call.block], self.blocks[block]):
                return call.split
        return Split(signature, (), (), note=FAILED.format(self.failure) if self.failure else NOT_PROBED)

    def after(self, earlier: ProbeResult) -> ProbeResult:
        """With what an earlier probe has found of the blocks, in other ways of calling them."""
        return replace(
            self,
            keeps={**earlier.keeps, **self.keeps},
            returned={**earlier.returned, **self.returned},
            replays_whole=earlier.replays_whole | self.replays_whole,
            shapes=earlier.shapes,  # of the batch that the profile is of
        )


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
    return replace(probed, calls=_agreed(calls), keeps=keeps, refusals=refusals, replays_whole=frozenset(replays_whole))


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
        )
        calls.append(call)
    loose = first.loose | second.loose
    captured = first.captured | second.captured
    return ProbeResult(
        first.num_samples,
        tuple(blocks),
        _agreed(calls),
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


def _agreed(calls: list[ProbedCall]) -> tuple[ProbedCall, ...]:
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


@contextmanager
def random_kept() -> Iterator[Callable[[], None]]:
    """Keeps the state of random numbers; yields a function that goes back to it, so that both runs draw the same."""
    before = GlobalRandom()
    try:
        yield before.restore
    finally:
        before.restore()
