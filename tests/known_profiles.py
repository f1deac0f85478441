"""Profiles of models that an earlier test has profiled: that is most of the time of a test that wraps a tiny model.

A profile is a function of what `_facts` collects; of a model that is run on values, of its values and the random state
too. Where that is not certain (a hook, an attribute that only its address
tells apart, a warning that the caller must see), the model is profiled again. conftest.py names the folders whose tests
use this; those of the profiler do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hightide.loading.unloaded import Unloaded, UnloadedParameter
from hightide.profiler.model.block_finder import FoundBlock
from hightide.profiler.model.call_tree import Batch, call_arguments, flatten_call
from hightide.profiler.needs import token_tiles
from hightide.profiler.probe.probe_result import ProbeResult

_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}


class _Unknown(Exception):
    """Something of the model cannot be compared."""


class KnownProfiles:
    """Stands for `hightide.profiler.model.model_profile.profile_calls`, without the recorded calls, which
    `profile_model` leaves."""

    def __init__(self, profile_calls: Callable[..., tuple[Any, ...]]) -> None:
        self._profile_calls = profile_calls
        self._known: dict[Hashable, tuple[Any, ProbeResult, list[warnings.WarningMessage]]] = {}
        self._asking: set[Hashable] = set()  # those that were profiled on values

    def __call__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        batch: Batch,
        chosen: Any = None,
        **options: Any,
    ) -> tuple[Any, ProbeResult, tuple[()]]:
        """`options`: such as where blocks are tried, or whether."""
        # Where values come from: only whether there is such a place; see `_values`.
        told = [(name, value if name != "source" else value is not None) for name, value in sorted(options.items())]
        key = key_of(model, optimizer, batch, (chosen, told))
        asks = key in self._asking
        if asks:
            key = key, _values(model)
        if key not in self._known:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                profile, probed, _ = self._profile_calls(model, optimizer, batch, chosen, **options)
            if key is not None and probed.on_values and not asks:
                self._asking.add(key)
                key = key, _values(model)
            if key is None or (said and not probed.on_values):
                _say(said)
                return profile, probed, ()
            self._known[key] = profile, replace(probed, blocks=_blocks(probed, nn.Module())), said
        profile, probed, said = self._known[key]
        _say(said)
        return profile, replace(probed, blocks=_blocks(probed, model)), ()


def _say(said: list[warnings.WarningMessage]) -> None:
    for warning in said:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _values(model: nn.Module) -> Hashable:
    """What the profile of a model that asks for values follows from besides."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return object()  # equal to nothing: a file or an initialiser has them
    return tuple(map(_contents, tensors)), torch.get_rng_state().numpy().tobytes()


def _blocks(probed: ProbeResult, model: nn.Module) -> tuple[FoundBlock, ...]:
    """The same blocks in another model; none of a model that is to be forgotten."""
    modules = dict(model.named_modules())
    return tuple(FoundBlock(block.name, modules.get(block.name, model)) for block in probed.blocks)


def key_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Batch, chosen: Any) -> Hashable | None:
    """Equal where profiles are; None where that cannot be known."""
    try:
        return tuple(_facts(model, optimizer, batch, chosen))
    except _Unknown:
        return None


def _facts(model: nn.Module, optimizer: Any, batch: Batch, chosen: Any) -> Iterator[Hashable]:
    yield torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
    yield token_tiles.LONG, token_tiles.TILE
    yield _text(chosen)
    first: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        yield name, _kind(module), first.setdefault(id(module), name)
        yield tuple(_attributes(module))
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                kind = _kind(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device
                yield key, kind, first.setdefault(id(tensor), f"{name}.{key}")
    for group in optimizer.param_groups if optimizer is not None else ():
        yield tuple(first.get(id(param)) for param in group["params"])
    leaves, tree = flatten_call(*call_arguments(batch))
    yield str(tree)
    for leaf in leaves:
        yield _contents(leaf) if isinstance(leaf, torch.Tensor) else _text(leaf)


def _kind(value: Any) -> Hashable:
    """Each model whose values are in files has classes of its own, which say no more than where they are."""
    kind = type(value)
    made_here = kind.__name__ == "Parameter" and kind.__bases__ == (UnloadedParameter,)
    return kind.__bases__ if made_here or Unloaded in kind.__bases__ else kind


def _attributes(module: nn.Module) -> Iterator[Hashable]:
    for name, value in module.__dict__.items():
        if name in _INTERNAL:
            if value and name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                raise _Unknown(name)
        elif isinstance(value, torch.Tensor):
            raise _Unknown(name)  # neither parameter nor buffer
        elif not isinstance(value, nn.Module):
            yield name, _text(vars(value) if hasattr(value, "to_json_string") else value)  # a configuration


def _text(value: Any) -> str:
    if isinstance(value, FunctionType) and value.__closure__ is None and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    if " at 0x" in text:
        raise _Unknown(text)
    return text


def _contents(tensor: torch.Tensor) -> Hashable:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, flat.numpy().tobytes()
