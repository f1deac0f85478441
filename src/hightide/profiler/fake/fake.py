"""A model without its values: parameters and buffers become fake tensors for a while, so that it runs without memory.

Inputs stay real: code that builds masks asks for their values, which the meta device cannot answer. The fake mode is
not active, so tensors that come from inputs alone are real, and those that meet a parameter are fake.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hightide.profiler.fake.attention import DeviceKernels
from hightide.profiler.fake.exchange import exchange
from hightide.profiler.fake.known_results import fake_of, result_of
from hightide.profiler.fake.recurrent import WORKSPACE, onednn_workspace_bytes
from hightide.profiler.fake.watching import Operations
from hightide.profiler.trial.state import ModuleState

CPU = torch.device("cpu")
EXPERTS = "_experts_implementation_internal"  # in a transformers config


class Originals:
    """What the fake tensors stand for."""

    def __init__(self, model: nn.Module, attributes: ModuleState) -> None:
        self._attributes = attributes
        self._children = [(name, child) for name, child in model.named_modules(remove_duplicate=False) if name]
        self._model = model
        self._buffers: dict[int, torch.Tensor] = {}
        self._fakes: list[weakref.ref[torch.Tensor]] = []
        self._configs: list[Any] = []  # whose experts are computed in groups meanwhile
        self._modes: Sequence[AbstractContextManager[Any]] = ()  # that run operations without values; entered in turn

    def add(self, fake: torch.Tensor, original: torch.Tensor) -> None:
        self._buffers[id(fake)] = original
        # Of a tensor that is referred to weakly torch does not swap the insides: a forward that converts its module
        # (`self.to(dtype)`) fails, and the model is run on values. Else it would seem to write to its parameters.
        self._fakes.append(weakref.ref(fake))

    def of(self, fake: torch.Tensor) -> torch.Tensor:
        """One that the model's code made meanwhile stands for itself."""
        return self._buffers.get(id(fake), fake)

    def forget_attributes(self) -> None:
        """Whatever the model's code has stored on its modules since: it is fake, as a rule."""
        self._attributes.restore()

    def replaced_module(self) -> str | None:
        """The first module of the model in whose place its code has put another since, by name."""
        now = dict(self._model.named_modules(remove_duplicate=False))
        return next((name for name, child in self._children if now.get(name) is not child), None)

    @contextmanager
    def as_trained(self) -> Iterator[None]:
        """With values there is no need for another way to compute experts, nor for modes that every operation passes.
        To be called where no mode was entered after them."""
        _set_experts(self._configs, "eager")
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        try:
            yield
        finally:
            for mode in self._modes:
                mode.__enter__()
            _set_experts(self._configs, "grouped_mm")


@contextmanager
def fake_parameters(model: nn.Module, runs_on: torch.device = CPU) -> Iterator[Originals]:
    """Replaces all parameters and buffers by fake ones on the CPU; tied ones stay tied. Puts the very objects back.
    `runs_on`: whose kernels attention is counted by; see [Note: which kernel attends].

    What the model's code stored on its modules meanwhile (a cached mask, a new buffer or module, a hook, a count) is
    forgotten: it would be fake, or come a second time. Random generators of the model's own are where they were, too.
    """
    attributes = ModuleState(model, buffers=False, hooks=True)
    modules = list(model.modules())
    before = [_Contents(module) for module in modules]
    originals = Originals(model, attributes)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # see [Note: known results]: what is not found there is not found in torch's either

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made = _fake(tensor, mode)
        originals.add(made, tensor)
        return made

    try:
        operations = _Unreal()
        with operations:
            exchange(modules, fake)
        kernels = DeviceKernels(runs_on, operations.unreal)
        originals._modes = (operations, kernels)
        with _quiet_log(), operations, kernels, _experts_in_groups(model) as originals._configs:
            yield originals
    finally:
        for contents in before:
            contents.restore()
        attributes.restore()


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Torch logs each operation that cannot be done without values; whoever probes says it in a sentence."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class _Contents:
    """What hangs on one module, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes: dict[str, Any] = dict(module.__dict__)
        self._parameters = dict(module._parameters)
        self._buffers = dict(module._buffers)
        self._children = dict(module._modules)
        self._hooks = {name: slot.copy() for name, slot in module.__dict__.items() if _holds_hooks(name, slot)}

    def restore(self) -> None:
        attributes = self._module.__dict__
        attributes.clear()
        attributes.update(self._attributes)
        for name, hooks in self._hooks.items():
            attributes[name].clear()
            attributes[name].update(hooks)
        for slots, originals in (
            (self._module._parameters, self._parameters),
            (self._module._buffers, self._buffers),
            (self._module._modules, self._children),
        ):
            slots.clear()
            slots.update(originals)  # type: ignore[arg-type]


@contextmanager
def _experts_in_groups(model: nn.Module) -> Iterator[list[Any]]:
    """transformers' loop over the experts that were hit asks for values; one grouped product has the same shapes."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    changed = [config for config in configs.values() if getattr(config, EXPERTS, None) == "eager"]
    try:
        _set_experts(changed, "grouped_mm")
        yield changed
    finally:
        _set_experts(changed, "eager")


def _set_experts(configs: list[Any], implementation: str) -> None:
    for config in configs:
        setattr(config, EXPERTS, implementation)


def _holds_hooks(name: str, slot: Any) -> bool:
    return isinstance(slot, OrderedDict) and name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))


class _Unreal(Operations):
    """The matrix product of mixtures of experts works in every dtype; its version without values knows bf16 only. And
    their router's loss counts tokens per expert, of which there is no version without values.

    All other operations on fake tensors go straight to their fake mode, instead of through the tensor's class, which
    would look for the mode and enter and leave it each time. That is a fifth of the time that a profile takes."""

    def __init__(self) -> None:
        super().__init__()
        self._makes: FakeTensorMode | None = None

    @contextmanager
    def unreal(self, mode: FakeTensorMode) -> Iterator[None]:
        """Inside, what is made from no tensor has no values either."""
        before, self._makes = self._makes, mode
        try:
            yield
        finally:
            self._makes = before

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.bincount.default and isinstance(args[0], FakeTensor):
            least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            return args[0].new_empty(least, dtype=torch.int64)
        if func is torch.ops.aten.mkldnn_rnn_layer.default and isinstance(args[1], FakeTensor):
            results: Any = args[1].fake_mode.__torch_dispatch__(func, types, args, kwargs)
            needed = onednn_workspace_bytes(args)  # without values it would be empty
            return *results[:WORKSPACE], results[WORKSPACE].new_empty(needed, dtype=torch.uint8)
        if func is not torch.ops.aten._grouped_mm.default or not isinstance(args[0], FakeTensor):
            mode = _mode_of(args) or self._makes
            if mode is None or any(kind is not FakeTensor for kind in types):
                return func(*args, **kwargs)
            return result_of(mode, func, types, args, kwargs)
        first, second = args[0], args[1]
        groups = args[2] if len(args) > 2 else kwargs.get("offs")
        return first.new_empty(_grouped_shape(first, second, groups))


def _mode_of(args: Sequence[Any]) -> FakeTensorMode | None:
    for arg in args:
        if isinstance(arg, FakeTensor):
            return arg.fake_mode
        if isinstance(arg, list | tuple) and (mode := _mode_of(arg)) is not None:
            return mode
    return None


def _grouped_shape(first: torch.Tensor, second: torch.Tensor, groups: torch.Tensor | None) -> list[int]:
    """A group is a slice of the rows, of the columns, or of what is summed over."""
    if first.ndim == second.ndim == 2:
        assert groups is not None
        return [len(groups), first.shape[0], second.shape[1]]
    leading = [first.shape[0]] if first.ndim == second.ndim == 3 else []
    return [*leading, first.shape[-2], second.shape[-1]]


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    # Contiguous whatever the original's strides: an absent parameter is one element, expanded.
    fake = fake_of(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), mode, CPU)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake
