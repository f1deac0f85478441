"""How much one call of a block computes, counted while it runs on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


@dataclass(frozen=True)
class Counted:
    """Of one run on one micro-batch."""

    flop: int = 0
    touched_bytes: int = 0

    def __sub__(self, other: Counted) -> Counted:
        return Counted(self.flop - other.flop, self.touched_bytes - other.touched_bytes)


@dataclass(frozen=True)
class Result:
    """What one operation with a known number of operations has made."""

    num_bytes: int
    counted: Counted  # of the operation

    @property
    def flop_per_byte(self) -> float:
        return self.counted.flop / max(1, self.num_bytes)


class WorkMeter:
    """Counts the operations that it is shown, of real and of fake tensors."""

    def __init__(self) -> None:
        self._flop = self._touched_bytes = 0
        self.results: list[Result] = []

    @property
    def counted(self) -> Counted:
        return Counted(self._flop, self._touched_bytes)

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if isinstance(func, torch._ops.OpOverload) and not func.is_view and func is not aten._unsafe_view.default:
            flop = _flop(func, args, kwargs, out)
            self._flop += flop
            if written := _bytes((out,)):  # else a question (which device?) about its arguments
                touched_bytes = written + _bytes(args) + _bytes(kwargs.values())
                self._touched_bytes += touched_bytes
                if flop and may_hold(func, args, kwargs):
                    self.results.append(Result(written, Counted(flop, touched_bytes)))

    @contextmanager
    def until_saved(self) -> Iterator[list[tuple[Counted, int]]]:
        """The last entry is what had been counted, and how many results there were, when autograd saved its last
        tensor: a recomputation stops there."""
        counted = [(Counted(), 0)]

        def saved(tensor: torch.Tensor) -> torch.Tensor:
            counted.append((self.counted, len(self.results)))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
            yield counted


def may_hold(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a recomputation can take this operation's results from forward, instead of running it again: it makes new
    tensors and draws no random numbers, which those that are drawn after it would miss."""
    if func._schema.is_mutable or func.is_view:
        return False
    return torch.Tag.nondeterministic_seeded not in func.tags or _argument(func, "dropout_p", args, kwargs) == 0.0


@cache
def is_counted(func: Any) -> bool:
    """Whether its operations are known at all."""
    return "_scaled_dot_product_" in func.overloadpacket.__name__ or func.overloadpacket in flop_registry


def flop_per_byte(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """Of the results of an operation that is counted."""
    return _flop(func, args, kwargs, out) / max(1, _bytes((out,)))


def _flop(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    if "_scaled_dot_product_" in func.overloadpacket.__name__:
        return _attention_flop(func, args, kwargs)
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _attention_flop(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Torch's formulas know neither the CPU's kernels nor, in some versions, several heads that share keys."""
    query, key, value = (_argument(func, name, args, kwargs) for name in ("query", "key", "value"))
    pairs = query.shape[:-1].numel() * key.shape[-2]
    wide, deep = query.shape[-1], value.shape[-1]
    is_backward = func.overloadpacket.__name__.endswith("_backward")
    # Scores and values; backward makes the scores again, then the gradients of values, of weights, of queries and keys.
    flop = 2 * pairs * (3 * wide + 2 * deep if is_backward else wide + deep)
    return flop // 2 if _argument(func, "is_causal", args, kwargs) else flop


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == name:
            return value
    return None


def _bytes(values: Any) -> int:
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, list | tuple):
            total += _bytes(value)
    return total
