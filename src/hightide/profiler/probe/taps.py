"""Tensors that leave a block by another way than its result: through a hook on a module inside, or as an attribute.

[Note: taps] What is made inside a block belongs to one micro-batch and to a graph that nobody outside sees, so a loss
of it would be wrong and its gradient lost. Each such way out is a tap: while the block runs, the hooks of a tapped
module are not called and a tapped attribute is put back; what they would have got becomes an output of the block, whole
and with its gradient. When the block is through, the hooks are called with that, once, as plain PyTorch does, and the
attribute is set to it. A hook may look at the module's output only: its inputs are not taken out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from hightide.ir.refusal import RefusedArgument
from hightide.profiler.model.call_tree import Tree, flatten, unflatten


@dataclass(frozen=True)
class Tap:
    """One way out of a block."""

    module: str  # its name inside the block; "" is the block itself
    attribute: str = ""  # "": the module's output, which its hooks get


@dataclass(frozen=True)
class Taken:
    """What one tap gave in one run of its block, without its tensors."""

    tap: Tap
    leaves: tuple[Any, ...]  # None for each tensor
    positions: tuple[int, ...]  # of the tensors
    tree: Tree


class NotATap(RefusedArgument):
    """A hook that does more than to look at an output."""


class Tapped:
    """What all taps gave in one run: the tensors, and how to hand them out."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.parts: list[Taken] = []

    def take(self, tap: Tap, value: Any) -> None:
        leaves, tree = flatten(value)
        positions = tuple(at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        self.tensors += [leaves[at] for at in positions]
        for at in positions:
            leaves[at] = None
        self.parts.append(Taken(tap, tuple(leaves), positions, tree))


def tapping(block: nn.Module, taps: Sequence[Tap]) -> AbstractContextManager[Tapped]:
    """Runs the body with the taps open. What they gave is there at its end, and the block is as it was before."""
    return _tapping(block, taps) if taps else nullcontext(Tapped())


@contextmanager
def _tapping(block: nn.Module, taps: Sequence[Tap]) -> Iterator[Tapped]:
    tapped = Tapped()
    hooked = [(tap, block.get_submodule(tap.module)) for tap in taps if not tap.attribute]
    hooks = [module._forward_hooks for _, module in hooked]
    attributes = [(tap, block.get_submodule(tap.module).__dict__) for tap in taps if tap.attribute]
    before = [there.get(tap.attribute, _MISSING) for tap, there in attributes]
    try:
        for tap, module in hooked:
            module._forward_hooks = OrderedDict({_KEY: _taker(tap, tapped)})
        yield tapped
        for tap, there in attributes:
            tapped.take(tap, there.get(tap.attribute))
    finally:
        for (_, module), theirs in zip(hooked, hooks, strict=True):
            module._forward_hooks = theirs
        for (tap, there), value in zip(attributes, before, strict=True):
            there[tap.attribute] = value
            if value is _MISSING:
                del there[tap.attribute]


def hand_out(block: nn.Module, parts: Sequence[Taken], tensors: Sequence[torch.Tensor]) -> None:
    """Gives those who wait outside of the block what its taps took."""
    rest = iter(tensors)
    for part in parts:
        leaves = list(part.leaves)
        for at in part.positions:
            leaves[at] = next(rest)
        value = unflatten(leaves, part.tree)
        module = block.get_submodule(part.tap.module)
        if part.tap.attribute:
            module.__dict__[part.tap.attribute] = value
        else:
            _call_hooks(module, part.tap, value)


def _call_hooks(module: nn.Module, tap: Tap, output: Any) -> None:
    absent = _Inputs(tap)
    for key, hook in list(module._forward_hooks.items()):
        inputs = (absent, absent) if key in module._forward_hooks_with_kwargs else (absent,)
        if hook(module, *inputs, output) is not None:
            raise NotATap(
                f"a hook on the module {tap.module!r} inside a block stores the module's output and replaces it too, "
                "which hightide cannot tell apart; use two hooks on two modules, or return the tensor from the block's "
                "forward"
            )


class _Inputs:
    """Stands for the inputs of a tapped module, which only exist inside the block."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotATap(
            f"a hook on the module {self._tap.module!r} inside a block reads the module's inputs; hightide takes only "
            "its output out of the block: hook the module that makes the tensor, or return it from the block's forward"
        )

    __getitem__ = __iter__ = __len__ = __contains__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()


_KEY = -1  # of our hook; torch counts from 0
_MISSING = object()


def _taker(tap: Tap, tapped: Tapped) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        tapped.take(tap, output)

    return hook
