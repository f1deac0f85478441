"""How much one call of a block computes, counted while it runs on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hightide.stores.meter import device_asked

aten = torch.ops.aten


@dataclass(frozen=True)
class Counted:
    """Of one run on one micro-batch."""

    flop: int = 0
    touched_bytes: int = 0

    def __sub__(self, other: Counted) -> Counted:
        return Counted(self.flop - other.flop, self.touched_bytes - other.touched_bytes)


@dataclass(frozen=True)
class CountedCall:
    forward: Counted = Counted()
    recompute: Counted = Counted()
    backward: Counted = Counted()


class WorkMeter(TorchDispatchMode):
    """Counts the operations of the thread that entered it, of real and of fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._flop = self._touched_bytes = 0

    @property
    def counted(self) -> Counted:
        return Counted(self._flop, self._touched_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := device_asked(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and not func.is_view and func is not aten._unsafe_view.default:
            self._flop += _flop(func, args, kwargs, out)
            if written := _bytes((out,)):  # else a question (which device?) about its arguments
                self._touched_bytes += written + _bytes(args) + _bytes(kwargs.values())
        return out

    @contextmanager
    def until_saved(self) -> Iterator[list[Counted]]:
        """The last entry is what had been counted when autograd saved its last tensor: a recomputation stops there."""
        counted = [Counted()]

        def saved(tensor: torch.Tensor) -> torch.Tensor:
            counted.append(self.counted)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
            yield counted


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
