"""Caches of keys and values are off while a model trains: in one way for the probe, the pass and recomputation.

[Note: caches in training] Plain PyTorch trains with the caches of transformers on, which is their default: each layer
stores its keys and values, and nobody reads them. A block runs once per micro-batch and again in backward, and a cache
would grow with each run. So wherever `use_cache` is on, in a config (nested ones too) or as an argument, it is OFF
while the model trains. OFF is another zero than False: a model's own code may switch a cache off as well, and OFF still
says that plain PyTorch would have one here. That makes a difference in one place: transformers looks for packed
sequences in `position_ids` where there is no cache, and only there. Where plain PyTorch has a cache, nobody looks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from hightide.ir.refusal import Refused
from hightide.profiler.switches.checkpointing import was_on
from hightide.profiler.switches.packed_positions import asked_as_in_plain

NAME = "use_cache"
GIVEN = ("past_key_values", "cache_params")  # arguments with a cache that somebody else has made
_CONFIGS = ("PreTrainedConfig", "PretrainedConfig")  # of transformers 5 and 4
_MISSING = object()


def is_pretrained(module: nn.Module) -> bool:
    """Whether it is a model of transformers, which is not imported to know it."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)


class _Off(int):
    """Zero."""


_Off.__name__ = str(False)  # a signature has the names of types, and the texts of flags
OFF = _Off(0)
_kept = object.__getattribute__  # configs answer for their attributes in Python, and blocks ask at every call


class Caches:
    """The caches of one model. Made once: what it looks for in the model's configs and code does not change."""

    def __init__(self, model: nn.Module) -> None:
        self._configs = _configs(model)
        entries = ((module, _entry(module)) for module in model.modules())
        self._entries = {id(module): entry for module, entry in entries if entry is not None}

    def call(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a module of the model, by its `forward`, as it is called in training."""
        entry = self._entries.get(id(module))
        if entry is None:
            if not self._configs:
                return forward(*args, **kwargs)
            args, kwargs = _with_plain_false(args), dict(zip(kwargs, _with_plain_false(kwargs.values()), strict=True))
            with self.off():
                return forward(*args, **kwargs)
        args, kwargs = entry.without_cache(args, kwargs)
        with self.off(), asked_as_in_plain(not entry.has_cache_in_plain(module, args, kwargs)):
            return forward(*args, **kwargs)

    @contextmanager
    def off(self) -> Iterator[None]:
        """In all configs. They are as before afterwards."""
        before: list[tuple[dict[str, Any], Any]] = []
        try:
            for config in self._configs:
                kept = _kept(config, "__dict__")
                value = kept.get(NAME, _MISSING)
                if type(value) is not _Off and (value is True or _is_on(config)):
                    before.append((kept, value))
                    kept[NAME] = OFF  # not by setattr: configs check types, or are frozen
            yield
        finally:
            for kept, value in before:
                if _is_off(kept.get(NAME)):  # else the model's code has changed it for good
                    kept[NAME] = value
                    if value is _MISSING:
                        del kept[NAME]

    @contextmanager
    def as_the_user_has_them(self) -> Iterator[None]:
        """In the middle of a pass too: for whoever writes configs to files."""
        changed = [config for config in self._configs if _is_off(vars(config).get(NAME))]
        for config in changed:
            vars(config)[NAME] = True
        try:
            yield
        finally:
            for config in changed:
                vars(config)[NAME] = OFF

    @contextmanager
    def in_every_call(self, model: nn.Module) -> Iterator[None]:
        """Inside, the plain modules of the model are called as in training: for the probe."""
        concerned = [module for module in model.modules() if id(module) in self._entries]
        before = [(module, vars(module).get("forward", _MISSING)) for module in concerned]
        try:
            for module in concerned:
                vars(module)["forward"] = partial(self.call, module, module.forward)
            with self.off():
                yield
        finally:
            for module, forward in before:
                vars(module).pop("forward", None)
                if forward is not _MISSING:
                    vars(module)["forward"] = forward

    def concern(self, module: nn.Module) -> bool:
        """Whether it takes part by itself, and not only by the configs."""
        return id(module) in self._entries


@dataclass(frozen=True)
class _Entry:
    """What is known of the forward of a model, or of a module with a config that takes `use_cache`."""

    place: int | None  # of `use_cache` among the positional arguments
    is_default: bool  # on, if nothing is passed
    makes_cache: bool

    def without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name in GIVEN:
            if kwargs.get(name) is not None:
                raise Refused(
                    f"{name} was passed in training: a block runs once per micro-batch and again in backward, and each "
                    "run would add to that cache. Leave it out, or call the model under torch.no_grad()"
                )
        if self.place is not None and len(args) > self.place:
            if args[self.place]:
                args = (*args[: self.place], OFF, *args[self.place + 1 :])
        elif kwargs.get(NAME, self.is_default):
            kwargs = {**kwargs, NAME: OFF}
        return args, kwargs

    def has_cache_in_plain(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether plain PyTorch would have a cache where this module's code makes its masks. With the model's own
        gradient checkpointing transformers switches caches off."""
        given = args[self.place] if self.place is not None and len(args) > self.place else kwargs.get(NAME)
        config = getattr(module, "config", None)
        is_on = _is_off(given) or (given is None and (_is_on(config) or _is_off(getattr(config, NAME, None))))
        return self.makes_cache and is_on and not (was_on(module) and module.training)


def _entry(module: nn.Module) -> _Entry | None:
    """Of the class of the user's: one that hightide has made of it takes any arguments."""
    forward = next(
        vars(one)["forward"]
        for one in type(module).__mro__
        if "forward" in vars(one) and not one.__module__.startswith("hightide.")
    )
    if not callable(forward):
        return None
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    names = [entry.name for entry in parameters]
    if not is_pretrained(module) and not (NAME in names and hasattr(module, "config")):
        return None
    if NAME not in names:
        return _Entry(None, is_default=False, makes_cache=False)
    entry = parameters[names.index(NAME)]
    place = names.index(NAME) if entry.kind is not entry.KEYWORD_ONLY else None
    return _Entry(place, entry.default is True, _makes_cache(forward))


def _makes_cache(forward: Callable[..., Any]) -> bool:
    """Whether its code makes a cache in training, or only passes `use_cache` on to a model inside."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    names = code.co_names if code is not None else ()
    only_without_training = "training" in names and "gradient_checkpointing" not in names
    return any(name.endswith("Cache") for name in names) and not only_without_training


def _configs(model: nn.Module) -> list[Any]:
    """All configs that know `use_cache`, each once: those of modules, and those inside of them."""
    todo = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    found: dict[int, Any] = {}
    while todo:
        config = todo.pop()
        if id(config) in found or isinstance(config, type) or not hasattr(config, "__dict__"):
            continue
        found[id(config)] = config
        todo += [value for value in vars(config).values() if _is_config(value)]
    return [config for config in found.values() if hasattr(config, NAME)]


def _is_config(value: object) -> bool:
    return any(one.__name__ in _CONFIGS for one in type(value).__mro__)


def _is_on(config: object) -> bool:
    return bool(getattr(config, NAME, False))


def _is_off(value: object) -> bool:
    """By us."""
    return type(value) is _Off


def _with_plain_false(values: Iterable[Any]) -> tuple[Any, ...]:
    """For a layer, to which it makes no difference, and for torch.compile, which does not know OFF."""
    return tuple([False if type(value) is _Off else value for value in values])
