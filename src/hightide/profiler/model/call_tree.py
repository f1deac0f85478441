"""Arguments and results of a call as flat lists of leaves, and how to take a micro-batch out of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hightide.ir.split import BatchDim


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A batch that is passed partly by position and partly by keyword."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


# Keyword arguments, positional arguments, the only argument, or both kinds.
Batch = Mapping[str, Any] | Sequence[Any] | torch.Tensor | Arguments


@dataclasses.dataclass(frozen=True)
class Tree:
    """The structure that `flatten` took off: what torch's pytree knows, and plain dataclasses, which it does not."""

    spec: pytree.TreeSpec
    records: Mapping[int, tuple[Any, Tree]]  # dataclass objects, by their position among the leaves of `spec`
    num_leaves: int
    outline: Any = dataclasses.field(default=None, compare=False, repr=False)  # see `_outline`; None: it is made anew
    signatures: dict[Any, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)  # if it is kept

    def __str__(self) -> str:
        inner = "".join(f"@{at}:{type(value).__qualname__}{tree}" for at, (value, tree) in self.records.items())
        return _spec_text(self.spec) + inner


class _Unknown(Exception):
    """A value that only torch's pytree knows how to take apart, or a dataclass."""


_LEAVES: set[type] = {torch.Tensor, nn.Parameter, type(None), bool, int, float, str}  # and kinds of the last three
_NAMES = frozenset({str})
_MOST_KEPT = 1024  # then they are forgotten: structures, and signatures of one structure, are few
_trees: dict[Any, Tree | None] = {}  # by outline. None: torch orders their leaves in another way


def _outline(value: Any, leaves: list[Any]) -> Any:
    """The structure of what most blocks are called with and return, as a key; its leaves are appended. Torch's pytree
    takes several times as long, and this runs at every call of a block."""
    keys: Any
    kind, values = type(value), value
    if kind is tuple or kind is list:
        keys = len(value)
    elif kind is dict and _NAMES.issuperset(map(type, value)):
        keys, values = tuple(value), value.values()
    elif kind in _LEAVES or isinstance(value, int | float | str):
        _LEAVES.add(kind)
        leaves.append(value)
        return None
    else:
        raise _Unknown
    if _LEAVES.issuperset(map(type, values)):
        leaves += values
        return kind, keys
    inner: list[Any] = []
    for one in values:
        if type(one) in _LEAVES:
            leaves.append(one)
            inner.append(None)
        else:
            inner.append(_outline(one, leaves))
    return kind, keys, tuple(inner)


def _filled(outline: Any, leaves: Iterator[Any]) -> Any:
    """The other way round."""
    if outline is None:
        return next(leaves)
    kind, keys, *inner = outline
    if not inner:
        values = list(islice(leaves, keys if kind is not dict else len(keys)))
    else:
        values = [next(leaves) if one is None else _filled(one, leaves) for one in inner[0]]
    if kind is dict:
        return dict(zip(keys, values, strict=True))
    return values if kind is list else tuple(values)


def flatten(value: Any) -> tuple[list[Any], Tree]:
    """Leaves of nested lists, tuples, mappings, model outputs and dataclasses that hold tensors. All else is a leaf."""
    leaves: list[Any] = []
    try:
        outline = _outline(value, leaves)
    except _Unknown:
        return _flatten(value)
    if outline not in _trees:
        if len(_trees) >= _MOST_KEPT:
            _trees.clear()
        found, tree = _flatten(value)
        is_same = len(found) == len(leaves) and all(a is b for a, b in zip(found, leaves, strict=True))
        _trees[outline] = dataclasses.replace(tree, outline=outline) if is_same else None
    known = _trees.get(outline)
    return _flatten(value) if known is None else (leaves, known)


def _flatten(value: Any) -> tuple[list[Any], Tree]:
    outer, spec = pytree.tree_flatten(value)
    leaves: list[Any] = []
    records: dict[int, tuple[Any, Tree]] = {}
    for position, leaf in enumerate(outer):
        if _is_record(leaf):
            inner, tree = flatten({field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)})
            if any(isinstance(entry, torch.Tensor) for entry in inner):
                records[position] = (leaf, tree)
                leaves.extend(inner)
                continue
        leaves.append(leaf)
    return leaves, Tree(spec, records, len(leaves))


def unflatten(leaves: Sequence[Any], tree: Tree) -> Any:
    assert len(leaves) == tree.num_leaves, f"{len(leaves)} leaves for a tree of {tree.num_leaves}"
    if tree.outline is not None:
        return _filled(tree.outline, iter(leaves))
    if not tree.records:
        return pytree.tree_unflatten(list(leaves), tree.spec)
    rest = iter(leaves)
    outer: list[Any] = []
    for position in range(tree.spec.num_leaves):
        if position not in tree.records:
            outer.append(next(rest))
            continue
        record, inner = tree.records[position]
        fields = unflatten([next(rest) for _ in range(inner.num_leaves)], inner)
        record = copy.copy(record)  # not a new one: fields may be missing from its constructor
        for name, value in fields.items():
            object.__setattr__(record, name, value)
        outer.append(record)
    return pytree.tree_unflatten(outer, tree.spec)


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Tree]:
    """Leaves of the arguments of one call. `unflatten` gives back the pair (args, kwargs)."""
    return flatten((tuple(args), dict(kwargs)))


def tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def num_bytes(values: Sequence[torch.Tensor]) -> int:
    """Of all of them, each once."""
    return sum(value.numel() * value.element_size() for value in {id(value): value for value in values}.values())


def way_of(leaves: Sequence[Any], tree: Tree) -> str:
    """What tells two ways of calling a block apart: structure, dtypes, numbers of dimensions; not sizes."""
    return f"{tree} {' '.join(_leaf_text(leaf) for leaf in leaves)}"


def signature_of(leaves: Sequence[Any], tree: Tree, mode: str) -> str:
    """One way of calling a block, in one mode of it (see `mode_of`). Of sizes it tells which are 1: such a dimension
    may stand for any number of samples in one call, and be the batch in the next."""
    if tree.outline is None:
        return _signature(leaves, tree, mode)
    facts: list[Any] = [mode]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            facts += (leaf.dtype, leaf.shape)
        else:
            facts += (type(leaf), leaf if isinstance(leaf, bool | str) else None)
    key = tuple(facts)
    if key not in tree.signatures:
        if len(tree.signatures) >= _MOST_KEPT:
            tree.signatures.clear()
        tree.signatures[key] = _signature(leaves, tree, mode)
    return tree.signatures[key]


def _signature(leaves: Sequence[Any], tree: Tree, mode: str) -> str:
    ones = " ".join("".join("1" if size == 1 else "n" for size in leaf.shape) for leaf in tensors(leaves))
    return f"{way_of(leaves, tree)} {ones} {mode}"


def mode_of(modules: Sequence[nn.Module]) -> str:
    """Whether a block's modules train or evaluate: batch normalisation mixes samples in one mode only."""
    flags = [module.training for module in modules]
    if all(flags):
        return "train"
    return "".join("t" if flag else "e" for flag in flags) if any(flags) else "eval"


def leaves_key(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What a call's memory, and what can be tried of it, depend on of its arguments."""
    return tuple(
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in leaves
    )


def narrow(tensor: torch.Tensor, batch_dim: BatchDim | None, start: int, num_samples: int) -> torch.Tensor:
    """The samples [start, start + num_samples) of a tensor; all of it, if it does not carry the batch."""
    if batch_dim is None:
        return tensor
    return tensor.narrow(batch_dim.dim, start * batch_dim.rows, num_samples * batch_dim.rows)


def call_arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch as the (args, kwargs) of the model's call."""
    if isinstance(batch, Arguments):
        return batch.args, dict(batch.kwargs)
    if isinstance(batch, torch.Tensor) or (_is_record(batch) and not isinstance(batch, Mapping)):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise ValueError(
        f"a batch of type {type(batch).__name__} is not understood; pass a mapping (keyword arguments of the model), a "
        "tuple or list (positional arguments), or a single tensor or dataclass"
    )


class UnevenBatch(ValueError):
    """Tensors of a batch have different numbers of samples, if they have them along their first dimension."""


def batch_size(batch: Batch) -> int:
    """Number of samples: the first dimension of every tensor of the batch that has dimensions. Only a dataclass may
    hold others, if there are tensors outside of dataclasses: these tell."""
    args, kwargs = call_arguments(batch)
    named = [entry for entry in _named_tensors(args, kwargs) if entry[1].ndim > 0]
    decisive = {name: tensor.shape[0] for name, tensor, in_record in named if not in_record}
    sizes = decisive or {name: tensor.shape[0] for name, tensor, _ in named}
    if not sizes:
        found = ", ".join(f"{name}: {type(value).__name__}" for name, value in _named(args, kwargs)) or "nothing"
        raise ValueError(
            f"a batch without a batch dimension: none of its entries is a tensor with a dimension (found {found}); "
            "pass the whole batch of one step, with the samples along the first dimension of each tensor"
        )
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise UnevenBatch(
            f"the batch size differs between tensors ({listing}); the first dimension of each must be the number of "
            "samples: expand or drop the ones that differ"
        )
    (size,) = set(sizes.values())
    if size == 0:
        raise ValueError(f"a batch of 0 samples ({', '.join(sizes)}); pass at least 1")
    return size


def _named_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Names and tensors, and whether they are in a dataclass."""
    for name, leaf, in_record in _named_leaves(args, kwargs, False):
        if isinstance(leaf, torch.Tensor):
            yield name, leaf, in_record


def named_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Of nested structures and dataclasses."""
    return ((name, leaf) for name, leaf, _ in _named_leaves(args, kwargs, False))


def _named_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any], in_record: bool) -> Iterator[tuple[str, Any, bool]]:
    for name, value in _named(args, kwargs):
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            where = name + pytree.keystr(path)
            if _is_record(leaf):
                fields = {f"{where}.{field.name}": getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
                yield from _named_leaves((), fields, True)
            else:
                yield where, leaf, in_record


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"argument {index}", value) for index, value in enumerate(args))
    yield from kwargs.items()


def _is_record(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | torch.Tensor | torch.nn.Module)


def _spec_text(spec: pytree.TreeSpec) -> str:
    """Short text of a TreeSpec. Its own repr is slow, and this runs at every call of a block."""
    if spec.is_leaf():
        return "*"
    children = spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
    parts = [_spec_text(child) for child in children]
    if spec.type is tuple:
        return f"({','.join(parts)})"
    if spec.type is list:
        return f"[{','.join(parts)}]"
    keys = spec.context if isinstance(spec.context, list | tuple) else [spec.context]
    return f"{spec.type.__name__}<{keys}>{{{','.join(parts)}}}"


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}[{leaf.ndim}]"
    if isinstance(leaf, bool | str):  # a flag may change what a block returns
        return repr(leaf)
    return type(leaf).__name__
