"""Everything that planning must know about a model and its batch: parameters, blocks, calls and their bytes."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod

import torch
from torch import nn

from hightide.ir.block import DTYPE_BYTES, Affine, BlockSpec, CallSpec, ModelProfile, ParamSpec
from hightide.profiler.fake.fake import fake_parameters
from hightide.profiler.fake.values import Source, made_up
from hightide.profiler.model.block_finder import BlockChoice, FoundBlock, FoundBlocks, first_names
from hightide.profiler.model.call_tree import Batch, call_arguments, flatten_call, num_bytes, tensors
from hightide.profiler.model.kinds import is_plain_embedding, is_plain_linear
from hightide.profiler.model.samples import shapes
from hightide.profiler.model.survey import Survey, Surveying
from hightide.profiler.needs.needs import CallNeeds
from hightide.profiler.probe.probe import CPU, random_kept
from hightide.profiler.probe.probe_record import CallRecord
from hightide.profiler.probe.probe_result import ProbedCall, ProbeResult
from hightide.profiler.switches.caches import Caches


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
        surveying = Surveying(model, batch, originals, device)
        survey = surveying.without_values(chosen)
        if survey.failure and source is not None:
            survey = surveying.on_values(survey, source)
    if survey.failure:
        survey = replace(survey, probed=replace(survey.probed, failure=survey.failure))
    probed = replace(survey.probed, shapes=shapes(batch, survey.probed.samples))
    if probed.on_values:
        warnings.warn(
            f"the model could not be probed without values ({probed.failure}): its blocks run all "
            f"{probed.num_samples} samples at once, which takes more memory. How much was measured in one pass on "
            "values. Results are the same",
            stacklevel=2,
        )
    return _told(model, params, batch, replace(survey, probed=probed)), probed, tuple(survey.runs[0].records)


def profile_again(
    model: nn.Module, known: ModelProfile, probed: ProbeResult, batch: Batch, runs_on: torch.device
) -> ModelProfile | None:
    """Of another batch, with blocks and samples as in the profile that is known. They are not tried again, and a model
    that asks for values is not run on them: None, where nothing can be known without."""
    loose = tuple(name for block in known.blocks if block.loose for name in block.params)
    modules = dict(model.named_modules(remove_duplicate=False))
    found = tuple(FoundBlock(block.name, modules[block.name]) for block in known.blocks if not block.loose)
    fakes = fake_parameters(model, runs_on)
    with random_kept(), in_training(model), fakes as originals, Caches(model).off():
        survey = Surveying(model, batch, originals, None).again(FoundBlocks(found, loose), probed.samples)
    return None if survey.failure or survey.probed.captured else _told(model, known.params, batch, survey)


def _told(model: nn.Module, params: tuple[ParamSpec, ...], batch: Batch, survey: Survey) -> ModelProfile:
    found, probed, head, glue = survey.found, survey.probed, survey.head, survey.glue
    num_samples = probed.num_samples
    blocks = _block_specs(model, found, probed, head)
    calls = tuple(_call_spec(call, needs) for call, needs in zip(probed.calls, survey.needs, strict=True))
    if glue is not None:
        around = zip(calls, glue.forward, glue.backward, strict=True)
        calls = tuple(replace(call, glue=forward, glue_backward=backward) for call, forward, backward in around)
    head_call = next((call for call in probed.calls if call.block == head), None)
    return ModelProfile(
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
            "optimizer from model.parameters() of the very model that is passed, after any copy or conversion of it. "
            "What is no part of the model (a loss with parameters of its own) needs another optimizer, which is not "
            "wrapped, or to be a submodule of it"
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


WITHOUT_GRAD = "it is called without gradients"


def _call_spec(call: ProbedCall, needs: CallNeeds) -> CallSpec:
    return CallSpec(
        block=call.block,
        needs_backward=call.needs_backward,
        splittable=call.split.splittable and not call.without_grad,
        note=WITHOUT_GRAD if call.without_grad else call.split.note,
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
