"""Whether a block is still the one that was looked at, asked at each of its calls.

[Note: what changes later] What a first look has compared (see first_look.py) holds for what the block was then. A loop
may switch a flag, exchange a module, write to a buffer, patch a method. So each state of a block has a number, its
epoch, and a look at one epoch says nothing about another. What modules keep is compared at each call (`BlockChanges`),
code and what it reads of globals once per pass, for all blocks together (`CodeChanges`). A block in which something
changes at every step is looked at in its first epochs, and then each time their number has doubled.

A block that is run again in backward finds there what it had in its forward, too: a temperature that the loop has
changed in between is put back meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from hightide.profiler.model.hooks import HOOKS
from hightide.profiler.trial.state import INTERNAL
from hightide.runtime.guards.contents import Hidden, ObjectContents

MOST_EPOCHS = 16  # that are known again when they come back
_LIBRARIES = frozenset({"torch", "builtins", *sys.stdlib_module_names})  # of which nothing is switched by assignment


class Epochs:
    """Numbers of states."""

    def __init__(self) -> None:
        self.now = 0
        self._numbers: dict[Any, int] = {}
        self._num_changes = 0

    def change_to(self, key: Any) -> None:
        if key in self._numbers:
            self.now = self._numbers[key]
            return
        self._num_changes += 1
        if self._num_changes <= MOST_EPOCHS:
            self._numbers[key] = self.now = self._num_changes
        elif self._num_changes & (self._num_changes - 1) == 0:
            self.now = self._num_changes


class BlockChanges:
    """Of what the modules of one block keep."""

    def __init__(self, block: nn.Module, tapped: Sequence[tuple[str, str]]) -> None:
        """`tapped`: attributes, each with its module's name, to which each call gives another value."""
        self._block, self._tapped = block, tapped
        self._epochs = Epochs()
        self._num_hooks = -1
        self.num_taken = 0  # how often more than numbers had changed
        self._take()

    def _take(self) -> None:
        self.inside = list(self._block.modules())
        names = {name: id(module.__dict__) for name, module in self._block.named_modules()}
        without: dict[int, list[str]] = {}
        for name, attribute in self._tapped:
            if name in names:
                without.setdefault(names[name], []).append(attribute)
        roots = [module.__dict__ for module in self.inside]
        roots += [root[part] for root in roots for part in ("_modules", "_buffers")]
        hooks = [root[part] for root in roots[: len(self.inside)] for part in HOOKS if root[part]]
        closed = [id(module.__dict__[part]) for module in self.inside for part in INTERNAL]
        self.contents = ObjectContents([*roots, *hooks], without, [*closed, *map(id, self.inside)])

    def epoch(self, num_hooks: int) -> int:
        if num_hooks == self._num_hooks and self.contents.are_same():
            return self._epochs.now
        other = self.contents.with_other_numbers() if num_hooks == self._num_hooks else None
        if other is None:
            self._num_hooks = num_hooks
            self._take()
            self.num_taken += 1
        else:
            self.contents = other
        self._epochs.change_to(self.contents.key())
        return self._epochs.now


class CodeChanges:
    """Of the classes of modules, of functions, and of the globals that these name."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        classes = {cls for module in modules for cls in type(module).__mro__ if cls not in (nn.Module, object)}
        code = _Code([*map(vars, classes), *map(vars, modules)])
        self._contents = ObjectContents([*map(vars, classes), *code.roots()])

    def are_same(self) -> bool:
        return self._contents.are_same()

    def key(self) -> tuple[Any, ...]:
        return self._contents.key()


class _Code:
    """Functions, and what they name that is no part of them."""

    def __init__(self, places: Sequence[Mapping[str, Any]]) -> None:
        """`places`: of methods, of which those count that a forward may come to by their names."""
        self._functions: dict[int, FunctionType] = {}
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self._classes: dict[int, type] = {}
        self._names: set[str] = set()
        new = {"forward", "__call__"}
        while new:
            self._names |= new
            for place in places:
                for name in new & place.keys():
                    self._follow(place[name])
            new = set().union(*(_names_in(one.__code__) for one in self._functions.values())) - self._names

    def _follow(self, value: Any) -> None:
        value = getattr(value, "__func__", getattr(value, "func", getattr(value, "fget", value)))
        if not isinstance(value, FunctionType) or id(value) in self._functions:
            return
        self._functions[id(value)] = value
        there = value.__globals__
        if _is_of_a_library(there.get("__name__")):
            return
        names = _names_in(value.__code__)
        for name in names & there.keys():
            self._name(there, name)
            inner = there[name]
            if isinstance(inner, ModuleType):
                for further in names & vars(inner).keys():  # config.temperature, F.silu
                    self._name(vars(inner), further)

    def _name(self, there: dict[str, Any], name: str) -> None:
        if (id(there), name) in self._globals:
            return
        self._globals[id(there), name] = there, name
        value = there[name]
        self._follow(value)
        if isinstance(value, type) and not _is_of_a_library(value.__module__):
            self._classes[id(value)] = value

    def roots(self) -> list[Any]:
        named = Hidden([partial(there.__getitem__, name) for there, name in self._globals.values()])
        code = Hidden([partial(getattr, function, "__code__") for function in self._functions.values()])
        return [named, code, *map(vars, self._classes.values())]


def _is_of_a_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _names_in(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))
