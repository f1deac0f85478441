"""Hooks of the user's, which must not see what a block does while it is tried or timed.

[Note: hooks in a rehearsal] A block that is tried or timed runs many times on random inputs, of which the user's hooks
must not learn. The probe is the only one to run them: a few times, on tensors that show that they have no values. A
block's own hooks are outside of the block: the recorded arguments are what its pre-hooks made of them. Of those on
modules inside, a pre-hook that is an object is part of the computation, as those of weight_norm are, and runs; any
other hook is a function of the user's and would act on what is theirs. Hooks on all modules of the process are set
aside meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of modules
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)


def is_part_of_computation(hook: Callable[..., Any]) -> bool:
    return not isinstance(hook, FunctionType | MethodType | partial)


@contextmanager
def no_global_hooks() -> Iterator[None]:
    slots = _global_hooks()
    before = [slot.copy() for slot in slots]
    for slot in slots:
        slot.clear()
    try:
        yield
    finally:
        for slot, hooks in zip(slots, before, strict=True):
            slot.update(hooks)


@contextmanager
def users_hooks_aside(module: nn.Module) -> Iterator[None]:
    """See [Note: hooks in a rehearsal]."""
    before = [(inside, {name: inside.__dict__[name] for name in HOOKS}) for inside in module.modules()]
    try:
        for inside, hooks in before:
            for name, theirs in hooks.items():
                own = theirs if inside is not module and name == "_forward_pre_hooks" else {}
                kept = [(key, hook) for key, hook in own.items() if is_part_of_computation(hook)]
                inside.__dict__[name] = OrderedDict(kept)
        with no_global_hooks():
            yield
    finally:
        for inside, hooks in before:
            inside.__dict__.update(hooks)


def num_hooks(modules: Sequence[nn.Module]) -> int:
    """On any of them, those on all modules of the process included."""
    number = 0  # asked at every call of a block, and nearly always none
    shared = torch_module.__dict__
    for name in GLOBAL_HOOKS:
        if shared[name]:
            number += len(shared[name])
    for module in modules:
        kept = module.__dict__
        for name in HOOKS:
            if kept[name]:
                number += len(kept[name])
    return number


def _global_hooks() -> list[Any]:
    return [getattr(torch_module, name) for name in GLOBAL_HOOKS]


class HookWatch:
    """Sees whether hooks on modules inside a block change what the block computes: then it is not the block alone that
    must treat samples independently. To be opened while the block runs."""

    def __init__(self, block: nn.Module) -> None:
        modules = [inside for inside in block.modules() if inside is not block]
        self.replaces = any(_global_hooks()) or any(
            inside._backward_hooks or inside._backward_pre_hooks for inside in modules
        )  # they would see, and may change, gradients of a micro-batch
        self._hooked = [
            inside
            for inside in modules
            if inside._forward_hooks or not all(map(is_part_of_computation, inside._forward_pre_hooks.values()))
        ]
        self._handles: list[RemovableHandle] = []
        self._seen: list[Any] = []

    def open(self) -> None:
        for inside in self._hooked:
            self._handles += [
                inside.register_forward_pre_hook(self._note, prepend=True, with_kwargs=True),
                inside.register_forward_pre_hook(self._compare, with_kwargs=True),
                inside.register_forward_hook(self._note, prepend=True),
                inside.register_forward_hook(self._compare),
            ]

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _note(self, _module: nn.Module, *values: Any) -> None:
        self._seen.append(values)

    def _compare(self, _module: nn.Module, *values: Any) -> None:
        if self._seen:
            self.replaces |= not _same_objects(self._seen.pop(), values)


def _same_objects(one: Any, two: Any) -> bool:
    before, after = pytree.tree_leaves(one), pytree.tree_leaves(two)
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))
