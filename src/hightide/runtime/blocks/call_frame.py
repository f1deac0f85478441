"""The frame of a call: its arguments and its result without their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hightide.profiler.model.call_tree import flatten, flatten_call, signature_of, unflatten
from hightide.profiler.probe.probe_record import is_changed


class CallFrame:
    """It lives as long as the call's graph and must not keep tensors alive."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: str) -> None:
        leaves, self._tree = flatten_call(args, kwargs)
        self.signature = signature_of(leaves, self._tree, mode)
        self._leaves, self._positions, self.tensors = _parted(leaves)  # until somebody takes the tensors

    def take_tensors(self) -> list[Tensor]:
        tensors, self.tensors = self.tensors, []
        return tensors

    @property
    def numbers(self) -> tuple[Any, ...]:
        """Of the arguments."""
        return tuple(leaf for leaf in self._leaves if isinstance(leaf, int | float))

    def arguments(self, tensors: Sequence[Tensor]) -> Any:
        """(args, kwargs) with these tensors."""
        return unflatten(_filled(self._leaves, self._positions, tensors), self._tree)

    def are_changed(self, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> bool:
        """Whether such arguments were changed by whoever was called with them."""
        return is_changed(_filled(self._leaves, self._positions, tensors), flatten_call(args, kwargs)[0])

    def note_result(self, result: Any) -> list[Tensor]:
        """Returns its tensors."""
        leaves, self._out_tree = flatten(result)
        self._out_leaves, self._out_positions, tensors = _parted(leaves)
        return tensors

    def result(self, outputs: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """As the caller expects it, and those that are no part of it."""
        count = len(self._out_positions)
        leaves = _filled(self._out_leaves, self._out_positions, outputs[:count])
        return unflatten(leaves, self._out_tree), outputs[count:]


def _parted(leaves: list[Any]) -> tuple[list[Any], list[int], list[Tensor]]:
    """The leaves without tensors, where these were, and these."""
    positions, tensors = [], []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            positions.append(at)
            tensors.append(leaf)
            leaves[at] = None
    return leaves, positions, tensors


def _filled(leaves: list[Any], positions: list[int], tensors: Sequence[Tensor]) -> list[Any]:
    leaves = list(leaves)
    for at, tensor in zip(positions, tensors, strict=True):
        leaves[at] = tensor
    return leaves
