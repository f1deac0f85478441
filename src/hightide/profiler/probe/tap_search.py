"""Finds where tensors leave the blocks of a model by another way than their results. See [Note: taps]."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from hightide.profiler.model.call_tree import flatten, tensors
from hightide.profiler.probe.taps import Tap
from hightide.profiler.trial.state import INTERNAL

Taps = Mapping[int, tuple[Tap, ...]]  # per block


@dataclass(frozen=True, eq=False)
class Opening:
    """A place in one call of a block from where tensors may have left it."""

    block: int
    tap: Tap
    tensors: list[torch.Tensor]
    hooks: frozenset[Any] = frozenset()  # what tells hooks apart: their code


class TapSearch:
    """Watches the calls of blocks in one run. Modules that are tapped already are left out."""

    def __init__(self, blocks: Sequence[nn.Module], taps: Taps) -> None:
        self._blocks = blocks
        self._taps = taps
        self._before: list[dict[tuple[str, str], tuple[Any, set[int]]]] = []
        self._handles: list[list[Any]] = []
        self.openings: list[Opening] = []
        self.leaking: set[int] = set()  # blocks that add a tensor to a list or dict they keep: that is no tap

    def enter(self, index: int) -> None:
        block = self._blocks[index]
        known = {tap.module for tap in self._taps.get(index, ()) if not tap.attribute}
        handles = []
        for name, module in block.named_modules():
            if name and name not in known and module._forward_hooks:
                hooks = frozenset(getattr(hook, "__code__", type(hook)) for hook in module._forward_hooks.values())
                handles.append(module.register_forward_hook(self._note(index, Tap(name), hooks), prepend=True))
        self._handles.append(handles)
        self._before.append({key: (value, set(map(id, _tensors_in(value)))) for key, value in _attributes(block)})

    def leave(self, index: int) -> None:
        for handle in self._handles.pop():
            handle.remove()
        before = self._before.pop()
        for (name, attribute), value in _attributes(self._blocks[index]):
            old, old_ids = before.get((name, attribute), (None, set()))
            new = [leaf for leaf in _tensors_in(value) if leaf.grad_fn is not None and id(leaf) not in old_ids]
            if not new:
                continue
            if value is old:
                self.leaking.add(index)
            else:
                self.openings.append(Opening(index, Tap(name, attribute), new))

    def close(self) -> None:
        """After a failure in the middle of blocks."""
        for handles in self._handles:
            for handle in handles:
                handle.remove()

    def _note(self, index: int, tap: Tap, hooks: frozenset[Any]) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self.openings.append(Opening(index, tap, _tensors_in(output), hooks))

        return hook

    def taps(self, reached: Collection[int]) -> dict[int, tuple[Tap, ...]]:
        """The openings that are used: those whose tensors gradients reach from outside (`reached`: their ids), those
        that somebody has stored, all attributes, and all hooks that are the same as one of these."""
        in_doubt = [
            opening
            for opening in self.openings
            if not opening.tap.attribute and not any(id(tensor) in reached for tensor in opening.tensors)
        ]
        held = _held(in_doubt, self.openings)
        unused = [opening for opening in in_doubt if not any(id(tensor) in held for tensor in opening.tensors)]
        used = [opening for opening in self.openings if opening not in unused]
        codes = {code for opening in used for code in opening.hooks}
        found: dict[int, dict[Tap, None]] = {}
        for opening in self.openings:
            if opening in used or codes & opening.hooks:
                found.setdefault(opening.block, {})[opening.tap] = None
        return {block: tuple(taps) for block, taps in found.items()}


def merged(one: Taps, two: Taps) -> dict[int, tuple[Tap, ...]]:
    return {block: tuple(dict.fromkeys([*one.get(block, ()), *two.get(block, ())])) for block in {**one, **two}}


def _held(openings: Sequence[Opening], all_openings: Sequence[Opening]) -> set[int]:
    """Ids of the tensors that Python objects other than our own hold. What a graph alone keeps has no such holder.
    Whose references are all ours needs no search, which goes through all objects that there are."""
    lists = [opening.tensors for opening in all_openings]
    lists.append([tensor for opening in openings for tensor in opening.tensors])
    ours = Counter(id(tensor) for tensors in lists for tensor in tensors)
    (asking,) = _num_references([object()])  # one of them is its list's
    wanted = {
        id(tensor): tensor
        for tensor, count in zip(lists[-1], _num_references(lists[-1]), strict=True)
        if count - (asking - 1) > ours[id(tensor)]  # a graph may have one, too
    }
    our_ids = {id(wanted), *map(id, lists)}
    holders = gc.get_referrers(*wanted.values()) if wanted else []
    return {
        id(entry)
        for holder in holders
        if id(holder) not in our_ids and not isinstance(holder, FrameType)
        for entry in gc.get_referents(holder)
        if id(entry) in wanted
    }


def _num_references(objects: list[Any]) -> list[int]:
    """Those of the list and of the question included."""
    return [sys.getrefcount(one) for one in objects]


def _attributes(block: nn.Module) -> Iterable[tuple[tuple[str, str], Any]]:
    for name, module in block.named_modules():
        for attribute, value in list(module.__dict__.items()):
            if attribute not in INTERNAL and isinstance(value, torch.Tensor | list | tuple | dict):
                yield (name, attribute), value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return tensors(flatten(value)[0])
