"""Recomputation that takes some results from forward: those that take most operations for their bytes.

In forward, a mode below autograd holds the results of such operations. In recomputation the same operation, counted by
how often it ran, gets them instead of running again; everything else is repeated. Which operations are dear is asked of
each one that has a formula, and no list names them (ir.block.Selective). A result that somebody wrote to meanwhile is
made anew, too; what its version does not tell of that is seen by the mode: writes by `.data`, and aliases that are no
views (`_unsafe_view` behind a linear layer without bias, `unsafe_split` in a GRU), which have versions of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from hightide.ir.block import Selective
from hightide.profiler.needs.work import flop_per_byte, is_counted, may_hold
from hightide.runtime.waiting.held import Held

Key = tuple[Any, int]  # an operation, and how often it ran before


class HeldResults:
    """Of one micro-batch, from its forward to its recomputation."""

    def __init__(self, rule: Selective, hold: Callable[[Tensor], Held] = Held) -> None:
        self._rule, self._hold = rule, hold
        self.is_recording = self._is_given_up = False
        self._results: dict[Key, tuple[list[Any], Any]] = {}  # leaves, and the tree that they are of
        self._lying: dict[int, Held] = {}  # by storage, while forward runs

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For forward and for recomputation."""
        return _Recording(self), _Replaying(self)

    @property
    def is_full(self) -> bool:
        return self._is_given_up or len(self._results) == self._rule.num_held

    def give_up(self) -> None:
        """A gradient is taken in the middle of forward: its operations, and those that are repeated for it, are counted
        among forward's, so nobody could tell later which result is whose. All are made again."""
        self._results.clear()
        self._lying.clear()
        self._is_given_up = True

    def is_worth(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        dear = flop_per_byte(func, args, kwargs, out) >= self._rule.flop_per_byte
        return dear and may_hold(func, args, kwargs)

    def put(self, key: Key, out: Any) -> None:
        leaves, tree = tree_flatten(out)
        held = [self._hold(_apart(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._results[key] = held, tree
        self._lying |= {_storage(leaf): one for leaf, one in zip(leaves, held, strict=True) if isinstance(one, Held)}

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """What this operation does to results that are held already."""
        if not self._lying or func.is_view:
            return
        writes = func._schema.is_mutable
        for tensor in tree_flatten(list(_written(func, args, kwargs)) if writes else out)[0]:
            if isinstance(tensor, Tensor) and (held := self._lying.get(_storage(tensor))) is not None:
                held.spoil() if writes else held.watch(_apart(tensor))

    def drop_changed(self) -> None:
        """Forward has ended. What was written over, as by an activation function in place, has to be made again."""
        self._lying.clear()
        for key, (held, _) in list(self._results.items()):
            if any(leaf.is_changed for leaf in held if isinstance(leaf, Held)):
                del self._results[key]

    def take(self, key: Key) -> Any:
        """None: it has to run."""
        if key not in self._results:
            return None
        held, tree = self._results.pop(key)
        leaves = [leaf.get() if isinstance(leaf, Held) else leaf for leaf in held]
        changed = any(leaf is None for leaf, one in zip(leaves, held, strict=True) if isinstance(one, Held))
        return None if changed else tree_unflatten(leaves, tree)


def _apart(tensor: Tensor) -> Tensor:
    """The same memory without the graph that the tensor will be part of, and that owns this one. A mode works below the
    place at which views come to share their base's version; here they must, or writing to it would not be noticed."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


class _Counting(TorchDispatchMode):
    def __init__(self, held: HeldResults) -> None:
        super().__init__()
        self._held = held
        self._counts: Counter[Any] = Counter()

    def _key(self, func: Any) -> Key:
        self._counts[func] += 1
        return func, self._counts[func]


class _Recording(_Counting):
    def __enter__(self) -> Self:
        self._held.is_recording = True
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._held.note(func, args, kwargs, out)
        if is_counted(func):
            key = self._key(func)
            if not self._held.is_full and self._held.is_worth(func, args, kwargs, out):
                self._held.put(key, out)
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._held.is_recording = False
        self._held.drop_changed()


class _Replaying(_Counting):
    def __enter__(self) -> Self:
        if self._held.is_recording:
            self._held.give_up()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_counted(func) and (out := self._held.take(self._key(func))) is not None:
            return out
        return func(*args, **(kwargs or {}))
