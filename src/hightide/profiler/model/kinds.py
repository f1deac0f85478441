"""Which blocks are of one kind, so that what was tried with one holds for the others.

Built alike is not enough: a flag in an attribute may make one of two blocks of a class do something else. Blocks are of
one kind if their plain attributes agree too, but for numbers that are the block's own index (`layer_idx`) and for names
of what is in it (`"model.layers.3.self_attn"`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hightide.profiler.model.block_finder import FoundBlock
from hightide.profiler.trial.state import INTERNAL

MAX_DEPTH = 3
Facts = Mapping[str, Hashable]  # of the attributes of a block, by their path


def build_of(module: nn.Module) -> tuple[Any, ...]:
    """How a block is built: its modules with their classes, and the shapes of its parameters."""
    parts = tuple((name, type(inside), inside.training) for name, inside in module.named_modules())
    params = tuple((name, param.shape, param.dtype, param.requires_grad) for name, param in module.named_parameters())
    return parts, params


def facts_of(module: nn.Module) -> Facts:
    facts: dict[str, Hashable] = {}
    for name, inside in module.named_modules():
        for key, value in inside.__dict__.items():
            if key not in INTERNAL:
                facts[f"{name}.{key}"] = _fact(value, 0)
        for key, buffer in inside._buffers.items():
            facts[f"{name}.{key}"] = None if buffer is None else (buffer.shape, buffer.dtype)
    return facts


def kinds_of(blocks: Sequence[FoundBlock]) -> list[Hashable]:
    """Per block: equal for those of one kind."""
    builds = [build_of(block.module) for block in blocks]
    facts = [_without_name(facts_of(block.module), block.name) for block in blocks]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, build in enumerate(builds):
        groups.setdefault(build, []).append(index)
    kinds: list[Hashable] = [None] * len(blocks)
    for build, group in groups.items():
        indices = _own_number(blocks, facts, group)
        for index in group:
            rest = frozenset((path, fact) for path, fact in facts[index].items() if path not in indices)
            kinds[index] = (build, rest)
    return kinds


def are_alike(one: FoundBlock, two: FoundBlock) -> bool:
    kinds = kinds_of([one, two])
    return kinds[0] == kinds[1]


def is_plain_linear(module: nn.Module) -> bool:
    """Is its output F.linear of its own parameters? A parametrised weight (weight norm) is computed, and no parameter
    of the module itself."""
    return type(module).forward is nn.Linear.forward and {"weight", "bias"} <= module._parameters.keys()


def is_plain_embedding(module: nn.Module) -> bool:
    """Is its output F.embedding of its own weight, whose gradient is the sum of its rows' gradients? Its hooks, if it
    has any, are the users' affair: they may take it for what runs on the GPU."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    is_plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return is_plain and module._parameters.keys() == {"weight"} and not any(hooks)


def _without_name(facts: Facts, name: str) -> Facts:
    """Strings that name a part of the block, by a path that begins anywhere above its place in a list, name it so."""
    stack, _, number = name.rpartition(".")
    if not number.isdigit():
        return facts
    own = re.compile(rf"(^|\.){re.escape(stack.rpartition('.')[2])}\.{number}(?=\.|$)")

    def without(fact: Hashable) -> Hashable:
        if type(fact) is str:
            return own.sub(".", fact) if number in fact else fact
        return tuple(map(without, fact)) if type(fact) is tuple else fact

    return {path: without(fact) for path, fact in facts.items()}


def _own_number(blocks: Sequence[FoundBlock], facts: Sequence[Facts], group: Sequence[int]) -> set[str]:
    """Attributes whose value is the block's place in its list, in each block of the group."""
    numbers = {index: blocks[index].name.rpartition(".")[2] for index in group}
    return {
        path
        for path in facts[group[0]]
        if len(group) > 1
        and all(type(facts[at].get(path)) is int and str(facts[at][path]) == numbers[at] for at in group)
    }


def _fact(value: Any, depth: int) -> Hashable:
    if isinstance(value, int | float | complex | str | bytes | type(None) | type | torch.dtype | torch.device):
        return value
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
        return value.__code__, tuple(_fact(cell, depth + 1) for cell in cells) if depth < MAX_DEPTH else ()
    if isinstance(value, partial):
        return _fact(value.func, depth), _fact(value.args, depth + 1), _fact(value.keywords, depth + 1)
    if depth < MAX_DEPTH:
        if isinstance(value, list | tuple):
            return type(value), tuple(_fact(part, depth + 1) for part in value)
        if isinstance(value, dict):
            return type(value), tuple((str(key), _fact(part, depth + 1)) for key, part in value.items())
    return (type(value),)
