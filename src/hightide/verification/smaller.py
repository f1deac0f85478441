"""The model and batch of both runs, and less of them where there is not enough memory: fewer samples, shorter ones,
fewer layers.

What is verified is then a smaller model of the same kind: its blocks are the same code. The bytes are those of plain
PyTorch, which are more than hightide takes: everything lies in one place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hightide.integrations.pretrained import build_without_values
from hightide.ir.block import DTYPE_BYTES, ModelProfile
from hightide.ir.chunk import ALIGN_NUMEL
from hightide.ir.units import format_bytes
from hightide.loading.initial import lacks_values
from hightide.loading.unloaded import Unloaded
from hightide.optim.registry import rule_for
from hightide.profiler.model.block_finder import BlockChoice
from hightide.profiler.model.call_tree import Arguments, flatten_call, tensors
from hightide.profiler.model.model_profile import profile_model
from hightide.profiler.model.samples import samples_along_first
from hightide.profiler.model.survey import DoesNotRun
from hightide.profiler.switches.caches import is_pretrained
from hightide.verification.copies import copied_optimizer, twins_of
from hightide.verification.observed_training import changed_batch

LEAST_SAMPLES = 3  # for as many micro-batches
LEAST_LENGTH = 16  # tokens
LEAST_LAYERS = 2
WIDE_BYTES = 4  # fp32: see [Note: what copies change]
OF_LOGITS = 3  # copies of them, and of their gradient, in a loss
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)


class TooLarge(ValueError):
    """For this machine; about the model itself it says nothing."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that may be taken. Without a GPU the device is the host."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class SmallerTask:
    """What will be trained."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Arguments
    profile: ModelProfile
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Need:
    weights_bytes: int  # parameters, gradients, states
    activations_bytes: int
    kept_bytes: int  # of the plain run, for the comparison

    def exceeds(self, room: MemoryBudget, device: torch.device) -> bool:
        on_device = self.weights_bytes + self.activations_bytes
        if device.type != "cuda":
            return on_device + self.kept_bytes > room.host_bytes
        return on_device > room.device_bytes or self.weights_bytes + self.kept_bytes > room.host_bytes

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.weights_bytes)} for parameters, gradients and states, "
            f"{format_bytes(self.activations_bytes)} for activations, {format_bytes(self.kept_bytes)} to compare with"
        )


def fitted(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Arguments,
    blocks: BlockChoice | None,
    steps: int,
    room: MemoryBudget,
    device: torch.device,
) -> SmallerTask:
    """The same, or as much of it as there is memory for. TooLarge where even that is too much."""
    task = SmallerTask(model, optimizer, batch, _profile(model, optimizer, batch, blocks))
    first = need = need_of(task, steps)
    while need.exceeds(room, device):
        weights_alone = replace(need, activations_bytes=0, kept_bytes=0).exceeds(room, device)
        smaller = next(_smaller(task, blocks, only_layers=weights_alone), None)
        if smaller is None:
            raise TooLarge(_too_large(first, need, task, room, device))
        task, need = smaller, need_of(smaller, steps)
    if task.model is not model and not lacks_values(model):
        _take_values(task.model, model)
        task = replace(task, optimizer=_over(optimizer, twins_of(model, task.model)))
    return task


def need_of(task: SmallerTask, steps: int) -> Need:
    """Copies are in fp32, and whatever a 16-bit model computes is then twice as large."""
    profile, states = task.profile, rule_for(task.optimizer).states
    size = profile.num_samples
    sizes = [(spec, spec.numel * max(WIDE_BYTES, DTYPE_BYTES[spec.dtype])) for spec in profile.params]
    all_bytes = sum(num_bytes for _, num_bytes in sizes)
    trained_bytes = sum(num_bytes for spec, num_bytes in sizes if spec.trainable)
    states_bytes = trained_bytes * sum(state.num_bytes(ALIGN_NUMEL) for state in states) // (WIDE_BYTES * ALIGN_NUMEL)
    growth = max(1, *(WIDE_BYTES // DTYPE_BYTES[spec.dtype] for spec in profile.params))
    outputs_bytes = growth * sum(call.outputs.at(size) for call in profile.calls)
    inside_bytes = growth * sum(call.kept.at(size) + call.new_inputs.at(size) for call in profile.calls)
    logits_bytes = WIDE_BYTES * profile.vocabulary * profile.tokens_per_sample * size
    return Need(
        weights_bytes=all_bytes + trained_bytes + states_bytes,
        activations_bytes=outputs_bytes + inside_bytes + OF_LOGITS * logits_bytes + profile.buffer_bytes,
        kept_bytes=2 * all_bytes + steps * trained_bytes + states_bytes + (steps + 1) * outputs_bytes,
    )


def _profile(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Arguments, blocks: BlockChoice | None
) -> ModelProfile:
    try:
        return profile_model(model, optimizer, batch, blocks)[0]
    except DoesNotRun:  # plain training will tell why
        return profile_model(model, optimizer, batch, blocks, source=None)[0]


def _too_large(first: Need, need: Need, task: SmallerTask, room: MemoryBudget, device: torch.device) -> str:
    there = format_bytes(room.host_bytes) + " may be taken"
    if device.type == "cuda":
        there = f"{format_bytes(room.device_bytes)} of the GPU and {there} of the host"
    least = "" if not task.changed else f" ({'; '.join(task.changed)}: still {need})"
    return (
        f"this model cannot be verified here: plain PyTorch would need {first}{least}, and {there}. Verify a smaller "
        "model of the same classes, with fewer layers and a smaller batch: what its blocks do is the same"
    )


def _smaller(task: SmallerTask, blocks: BlockChoice | None, only_layers: bool) -> Iterator[SmallerTask]:
    """Ways to make it smaller, the mildest first."""
    num_samples = samples_along_first(task.batch)
    if not only_layers:
        if num_samples > LEAST_SAMPLES:
            fewer = max(LEAST_SAMPLES, num_samples // 2)
            batch = _first_samples(task.batch, fewer)
            profile = _profile(task.model, task.optimizer, batch, blocks)
            changed = _said(task.changed, f"samples: {fewer} of {{}}", num_samples)
            yield replace(task, batch=batch, profile=profile, changed=changed)
        length = _length(task.batch)
        if length is not None and length // 2 >= LEAST_LENGTH:
            shorter = _shortened(task.batch, length, length // 2)
            profile, probed = profile_model(task.model, task.optimizer, shorter, blocks, source=None)
            if not probed.failure:  # some models take one length only
                text = f"tokens per sample: {length // 2} of {{}}"
                yield replace(task, batch=shorter, profile=profile, changed=_said(task.changed, text, length))
    rebuilt = _with_fewer_layers(task)
    if rebuilt is not None:
        yield replace(rebuilt, profile=_profile(rebuilt.model, rebuilt.optimizer, rebuilt.batch, blocks))


def _said(changed: tuple[str, ...], text: str, before: int) -> tuple[str, ...]:
    """Halved twice, it is still one change: from what there was at first."""
    title = text.partition(":")[0]
    earlier = next((entry for entry in changed if entry.startswith(f"{title}:")), None)
    first = earlier.rpartition(" of ")[2] if earlier is not None else str(before)
    return (*(entry for entry in changed if entry is not earlier), text.format(first))


def _first_samples(batch: Arguments, num_samples: int) -> Arguments:
    before = samples_along_first(batch)
    return changed_batch(
        batch, lambda tensor: tensor[:num_samples] if tensor.ndim and tensor.shape[0] == before else tensor
    )


def _length(batch: Arguments) -> int | None:
    """Tokens of a sample: the second dimension of tensors of integers."""
    leaves = tensors(flatten_call(batch.args, batch.kwargs)[0])
    lengths = {leaf.shape[1] for leaf in leaves if leaf.ndim == 2 and leaf.dtype in (torch.int64, torch.int32)}
    return lengths.pop() if len(lengths) == 1 else None


def _shortened(batch: Arguments, before: int, length: int) -> Arguments:
    def cut(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.ndim):
            if tensor.shape[dim] == before:
                tensor = tensor.narrow(dim, 0, length)
        return tensor

    return changed_batch(batch, cut)


# -- fewer layers --------------------------------------------------------------------------------------------------


def _with_fewer_layers(task: SmallerTask) -> SmallerTask | None:
    """The same class with a smaller configuration, still without values. None: it has no configuration that says how
    many layers there are, or only a few of them."""
    model = task.model
    kind = type(model).__bases__[-1] if isinstance(model, Unloaded) else type(model)
    config: Any = getattr(model, "config", None)
    if not is_pretrained(model) or not hasattr(config, "to_dict"):
        return None
    config = copy.deepcopy(config)
    counts = list(_halved(config))
    if not counts:
        return None
    config.dtype = next(model.parameters()).dtype
    made = build_without_values(kind, config).train(model.training)
    known = dict(model.named_parameters())
    for name, param in made.named_parameters():
        if name not in known or known[name].shape != param.shape:
            return None
        param.requires_grad_(known[name].requires_grad)
    optimizer = _over(task.optimizer, twins_of(model, made))
    changed = task.changed
    for name, before, after in counts:
        changed = _said(changed, f"{name}: {after} of {{}}", before)
    return replace(task, model=made, optimizer=optimizer, changed=changed)


def _take_values(made: nn.Module, model: nn.Module) -> None:
    """Those of the layers that are left."""
    known = dict(model.named_parameters(remove_duplicate=False))
    copies: dict[int, nn.Parameter] = {}  # of one that has several names there is one
    for path, module in made.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                original = known[f"{path}.{name}".removeprefix(".")]
                if id(original) not in copies:
                    copies[id(original)] = nn.Parameter(original.detach().clone(), original.requires_grad)
                module._parameters[name] = copies[id(original)]


def _over(optimizer: torch.optim.Optimizer, twins: dict[int, nn.Parameter]) -> torch.optim.Optimizer:
    """Its copy, without the parameters that are gone."""
    left = copied_optimizer(optimizer, twins)
    kept = {id(twin) for twin in twins.values()}
    for group in left.param_groups:
        group["params"] = [param for param in group["params"] if id(param) in kept]
    return left


def _halved(config: Any) -> Iterator[tuple[str, int, int]]:
    """Halves what the configuration, and those inside it, say of numbers of layers; names, numbers before and after."""
    for name in LAYERS:
        before = vars(config).get(name)
        if not isinstance(before, int) or before // 2 < LEAST_LAYERS:
            continue
        for key, value in list(vars(config).items()):
            if isinstance(value, list | tuple) and len(value) == before:  # one entry for each layer
                setattr(config, key, value[: before // 2])
        setattr(config, name, before // 2)
        yield name, before, before // 2
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _halved(value)
