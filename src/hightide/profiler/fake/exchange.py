"""Other tensors in the place of a module's parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn


def exchange(modules: Sequence[nn.Module], other_of: Callable[[Tensor], Tensor | None]) -> dict[int, Tensor]:
    """Each by its other, where there is one; by the id of the one before. Tied ones stay tied, and lists of tensors in
    attributes, such as the flat weights of recurrent modules, name the others too. Nothing is touched until all others
    are made."""
    slots: list[dict[str, Any]] = [there for one in modules for there in (one._parameters, one._buffers)]
    others: dict[int, Tensor] = {}
    for tensor in (tensor for there in slots for tensor in there.values() if tensor is not None):
        if id(tensor) not in others and (other := other_of(tensor)) is not None:
            others[id(tensor)] = other
    for there in slots:
        there.update({name: others[id(tensor)] for name, tensor in there.items() if id(tensor) in others})
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, list) and any(isinstance(part, Tensor) and id(part) in others for part in value):
                vars(module)[name] = [others.get(id(part), part) for part in value]
    return others
