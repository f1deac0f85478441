"""Everything that planning must know about a model and its batch: parameters, blocks, calls and their bytes."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from hightide.ir.block import DTYPE_BYTES, Affine, BlockSpec, CallSpec, ModelProfile, ParamSpec
from hightide.ir.split import BatchDim, Split
from hightide.process.interrupts import in_a_line
from hightide.process.progress import tell
from hightide.profiler.model.block_finder import BlockChoice, FoundBlocks, find_blocks, first_names
from hightide.profiler.model.call_tree import Batch, call_arguments, flatten_call, num_bytes, tensors
from hightide.profiler.model.fake import Originals, fake_parameters
from hightide.profiler.model.glue import GlueNeeds, measure_glue
from hightide.profiler.model.kinds import is_plain_embedding, is_plain_linear
from hightide.profiler.model.needs import CallMeter, CallNeeds
from hightide.profiler.model.probe import (
    CPU,
    ProbedCall,
    ProbeResult,
    compare,
    examined,
    give_back,
    pair_records,
    random_kept,
    record_runs,
)
from hightide.profiler.model.probe_record import CallRecord, ProbeRecord
from hightide.profiler.model.samples import Samples, possible_samples, shapes
from hightide.profiler.model.tap_search import Taps
from hightide.profiler.model.values import Source, Values, made_up
from hightide.profiler.switches.caches import Caches
from hightide.profiler.trial.independence import TriedCall, examine

Runs = tuple[ProbeRecord, ProbeRecord]  # with B and with B + 1 samples
MAX_PROBES = 4  # each one more finds parameters to be loose, which may free others of their block


class DoesNotRun(ValueError):
    """The model fails on its example batch, on values too."""


def profile_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Batch,
    chosen: BlockChoice | None = None,
    device: torch.device | None = CPU,
    runs_on: torch.device | None = None,
    source: Source | None = made_up,
) -> tuple[ModelProfile, ProbeResult]:
    """The profile, and what the runtime needs of the probe. Blocks have the same indices in both: by first call.
    `device`: where blocks are tried, to know how they may be split; None: shapes are believed. `runs_on`: whose kernels
    are counted, if it is another. `source`: the values of parameters on the meta device, if the model asks for them;
    None: such a model is known in part only, and `failure` says so."""
    profile, probed, _ = profile_calls(model, optimizer, batch, chosen, device=device, runs_on=runs_on, source=source)
    return profile, probed


def profile_calls(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Batch,
    chosen: BlockChoice | None = None,
    device: torch.device | None = CPU,
    runs_on: torch.device | None = None,
    source: Source | None = made_up,
) -> tuple[ModelProfile, ProbeResult, tuple[CallRecord, ...]]:
    """`profile_model`, and of each call that was probed its arguments: fake, where they depend on parameters."""
    params = param_specs(model, optimizer)
    fakes = fake_parameters(model, runs_on or device or CPU)
    with random_kept(), in_training(model), fakes as originals, Caches(model).off():
        survey = _surveyed(model, batch, *_probed(model, batch, chosen, originals, device), originals, device)
        if survey.failure and source is not None:
            survey = _on_values(model, batch, survey, originals, device or CPU, source)
    if survey.failure:
        survey = replace(survey, probed=replace(survey.probed, failure=survey.failure))
    found, probed, head, glue = survey.found, survey.probed, survey.head, survey.glue
    num_samples = probed.num_samples
    probed = replace(probed, shapes=shapes(batch, probed.samples))
    if probed.on_values:
        warnings.warn(
            f"the model could not be probed without values ({probed.failure}): its blocks run all {num_samples} "
            "samples at once, which takes more memory. How much was measured in one pass on values. Results are the "
            "same",
            stacklevel=2,
        )
    blocks = _block_specs(model, found, probed, head)
    calls = tuple(_call_spec(call, needs) for call, needs in zip(probed.calls, survey.needs, strict=True))
    if glue is not None:
        around = zip(calls, glue.forward, glue.backward, strict=True)
        calls = tuple(replace(call, glue=forward, glue_backward=backward) for call, forward, backward in around)
    head_call = next((call for call in probed.calls if call.block == head), None)
    profile = ModelProfile(
        fingerprint=fingerprint(params, blocks),
        num_samples=num_samples,
        tokens_per_sample=prod(head_call.input_shapes[0][:-1]) // num_samples if head_call else 1,
        batch_bytes=num_bytes(tensors(flatten_call(*call_arguments(batch))[0])),
        buffer_bytes=num_bytes(list(model.buffers())),
        params=params,
        blocks=blocks,
        calls=calls,
        vocabulary=head_call.output_shapes[0][-1] if head_call else 0,
        glue_end=glue.end if glue is not None else Affine(),
        on_values=probed.on_values,
    )
    return profile, probed, tuple(survey.runs[0].records)


@dataclass(frozen=True)
class _Survey:
    """What one way to run a model has told."""

    found: FoundBlocks
    probed: ProbeResult
    runs: Runs
    needs: list[CallNeeds]  # by call
    head: int | None
    glue: GlueNeeds | None
    failure: str  # why a part of it is not known


def _surveyed(
    model: nn.Module,
    batch: Batch,
    found: FoundBlocks,
    probed: ProbeResult,
    runs: Runs,
    originals: Originals,
    device: torch.device | None,
    values: Values | None = None,
) -> _Survey:
    meter = CallMeter(values)
    kinds = [
        meter.measure(
            probed.blocks[call.block].module, call.split, one, two, probed.num_samples, probed.taps.get(call.block, ())
        )
        for call, (one, two) in zip(probed.calls, pair_records(*runs), strict=True)
    ]
    needs = meter.needs
    head = _find_lazy_head(model, probed)
    if head is not None and device is not None and not _is_by_row(probed, runs, head, originals, device):
        head = None
    failure = meter.failure or (probed.failure if not probed.on_values else "")
    glue = None
    if not failure and not probed.captured:  # else it is refused
        with nullcontext() if values is None else values.between(model, found.loose):
            try:
                glue = measure_glue(model, batch, probed, runs, head)
            except Exception as error:
                failure = in_a_line(error)
    return _Survey(found, probed, runs, [needs[kind] for kind in kinds], head, glue, failure)


def _on_values(
    model: nn.Module, batch: Batch, survey: _Survey, originals: Originals, device: torch.device, source: Source
) -> _Survey:
    """See [Note: a pass on values]. Where a block has no room on a GPU without being split, on the CPU."""
    tell("running the model on values", "a block at a time")
    failure = ""
    for place in dict.fromkeys((device, CPU)):
        values = Values(originals, place, source)
        with originals.as_trained():
            found, probed, runs = _probe_until_settled(
                model, batch, survey.found, survey.probed.samples, values, survey.failure
            )
        failure = probed.failure
        if not failure:
            probed = replace(probed, failure=survey.failure, on_values=True)
            probed = examined(probed, runs, originals, device)
            with originals.as_trained():
                on_values = _surveyed(model, batch, found, probed, runs, originals, device, values)
            give_back(probed, place)
            failure = on_values.failure
            if not failure:
                return on_values
        originals.forget_attributes()
        if "OutOfMemoryError" not in failure:
            break
    raise DoesNotRun(
        f"the model runs neither without values ({survey.failure}) nor, a block at a time, on the example batch "
        f"({failure}): what it needs cannot be known. Pass a batch on which it trains; its code between blocks is run "
        "on the CPU for this"
    )


def param_specs(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[ParamSpec, ...]:
    names: dict[int, list[str]] = {}
    objects: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        objects[id(param)] = param
    if not objects:
        raise ValueError("the model has 0 parameters; there is nothing to train")
    groups = _groups(optimizer, objects)
    specs = []
    for key, param in objects.items():
        dtype = str(param.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ValueError(
                f"parameter {names[key][0]!r} has the unsupported dtype {dtype}; convert it to one of "
                f"{', '.join(DTYPE_BYTES)} with model.to(...), or make it a buffer"
            )
        group = groups.get(key) if param.requires_grad else None
        specs.append(ParamSpec(tuple(names[key]), tuple(param.shape), dtype, param.requires_grad, group))
    return tuple(specs)


def fingerprint(params: tuple[ParamSpec, ...], blocks: tuple[BlockSpec, ...]) -> str:
    facts = [[spec.names, spec.shape, spec.dtype, spec.trainable, spec.group] for spec in params]
    text = json.dumps([facts, [block.name for block in blocks]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _groups(optimizer: torch.optim.Optimizer | None, objects: dict[int, nn.Parameter]) -> dict[int, int]:
    if optimizer is None:
        return {}
    groups = {id(param): index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    foreign = sum(key not in objects for key in groups)
    if foreign:
        raise ValueError(
            f"{foreign} of the optimizer's {len(groups)} parameters are not among the model's {len(objects)}; make the "
            "optimizer from model.parameters() of the very model that is passed, after any copy or conversion of it"
        )
    return groups


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Whoever wraps a model in evaluation mode, as `from_pretrained` gives it, will train it, as a rule: the plan is
    for that. (What is called in another mode is probed when it happens.) Some modules in evaluation stay so."""
    modules = [] if any(module.training for module in model.modules()) else list(model.modules())
    try:
        for module in modules:
            module.training = True
        yield
    finally:
        for module in modules:
            module.training = False


def _probed(
    model: nn.Module, batch: Batch, chosen: BlockChoice | None, originals: Originals, device: torch.device | None
) -> tuple[FoundBlocks, ProbeResult, Runs]:
    """See [Note: time first]."""
    results = []
    for samples in possible_samples(batch):
        found, probed, runs = _probe_until_settled(model, batch, find_blocks(model, chosen), samples)
        if device is not None:
            tell("trying blocks alone")
            probed = examined(probed, runs, originals, device)
        results.append((found, probed, runs))
        mixes = any(call.split.inputs and not call.split.splittable for call in probed.calls)
        if not mixes or any(call.split.splittable for call in probed.calls):
            break
    of_use = (result for result in results if any(call.split.splittable for call in result[1].calls))
    return next(of_use, results[0])


def _probe_until_settled(
    model: nn.Module,
    batch: Batch,
    found: FoundBlocks,
    samples: Samples,
    values: Values | None = None,
    asks: str = "",
) -> tuple[FoundBlocks, ProbeResult, Runs]:
    """Parameters seen outside of their blocks become loose, which may change what the blocks are: then probes again.
    `asks`: why it is done on values."""
    taps: Taps = {}

    def once() -> tuple[ProbeResult, Runs]:
        with nullcontext() if values is None else values.between(model, found.loose):
            runs = record_runs(model, found.blocks, batch, taps=taps, samples=samples, values=values)
        return compare(found.blocks, *runs, samples, asks), runs

    for _ in range(MAX_PROBES):
        probed, runs = once()
        more = probed.loose - set(found.loose)
        if not more and not probed.more_taps:
            break
        kept = found.without(model, more)
        taps = {
            kept.blocks.index(found.blocks[old]): entry
            for old, entry in probed.all_taps.items()
            if found.blocks[old] in kept.blocks
        }
        found = kept
    else:
        probed, runs = once()
    # Called ones in the order of their first call, then the others.
    order = list(dict.fromkeys([*(call.block for call in probed.calls), *range(len(probed.blocks))]))
    found = FoundBlocks(tuple(found.blocks[old] for old in order), found.loose)
    for record in (*runs[0].records, *runs[1].records):
        record.block = order.index(record.block)
    return found, _reordered(probed, order), runs


def _reordered(probed: ProbeResult, order: list[int]) -> ProbeResult:
    return replace(
        probed,
        blocks=tuple(probed.blocks[old] for old in order),
        calls=tuple(replace(call, block=order.index(call.block)) for call in probed.calls),
        uses={new: probed.uses.get(old, ()) for new, old in enumerate(order)},
        taps={new: probed.taps[old] for new, old in enumerate(order) if old in probed.taps},
        refusals={new: probed.refusals[old] for new, old in enumerate(order) if old in probed.refusals},
        returned={new: probed.returned[old] for new, old in enumerate(order) if old in probed.returned},
    )


def _call_spec(call: ProbedCall, needs: CallNeeds) -> CallSpec:
    return CallSpec(
        block=call.block,
        needs_backward=call.needs_backward,
        splittable=call.split.splittable,
        note=call.split.note,
        new_inputs=call.new_inputs,
        saved_inputs=call.saved_inputs,
        outputs=call.outputs,
        input_grads=call.saved_inputs,
        tapped=call.tapped,
        num_saved=call.num_saved,
        **vars(needs),
    )


def _block_specs(model: nn.Module, found: FoundBlocks, probed: ProbeResult, head: int | None) -> tuple[BlockSpec, ...]:
    names = first_names(model)
    specs = []
    for index, block in enumerate(found.blocks):
        held = dict.fromkeys(names[id(param)] for param in block.module.parameters())
        used_first = dict.fromkeys([*probed.uses.get(index, ()), *held])
        params = tuple(name for name in used_first if name not in found.loose)
        kind = type(block.module).__name__
        plain = is_plain_linear(block.module)
        table = is_plain_embedding(block.module) and index not in probed.taps and len(params) == 1
        specs.append(BlockSpec(index, block.name, kind, params, False, index == head, plain, table))
    if found.loose:
        specs.append(BlockSpec(len(specs), "", "loose", found.loose, loose=True))
    return tuple(specs)


def _find_lazy_head(model: nn.Module, probed: ProbeResult) -> int | None:
    """The output embedding of a language model, if it is a block that is called once. In a wrapper that holds copies
    of it (PEFT's modules_to_save), the copy that is called."""
    get = getattr(model, "get_output_embeddings", None)
    outer = get() if callable(get) else None
    if not isinstance(outer, nn.Module):
        return None
    inside = set(outer.modules())
    called = [call.block for call in probed.calls if probed.blocks[call.block].module in inside]
    if len(called) != 1:
        return None
    module = probed.blocks[called[0]].module
    if not isinstance(module, nn.Linear):
        return None
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    (call,) = [call for call in probed.calls if call.block == called[0]]
    if not call.input_shapes:  # the probe did not get there
        return None
    return called[0] if getattr(text_config, "vocab_size", None) == module.out_features else None


def _is_by_row(probed: ProbeResult, runs: Runs, head: int, originals: Originals, device: torch.device) -> bool:
    """Whether a head that is more than a linear layer may be computed token by token, as the fused loss does."""
    module = probed.blocks[head].module
    if is_plain_linear(module):
        return True
    record = next(record for record in (*runs[1].records, *runs[0].records) if record.block == head)
    if len(record.inputs) != 1 or len(record.leaves) != 1:
        return True  # it is not called as the fused loss would call it
    rows = record.inputs[0].flatten(0, -2)
    by_row = replace(record, leaves=[rows.detach().requires_grad_(record.inputs[0].requires_grad)])
    split = Split(record.signature, (BatchDim(0),), (BatchDim(0),))
    finding = examine(TriedCall(module, by_row, len(rows), split), originals, device)
    return not finding.note and not finding.keeps
