"""The states of an optimizer on their way into chunks, and back again if they do not get there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hightide.optim.states.state_mapping import StateOf, States


class FormerStates:
    def __init__(self, original: torch.optim.Optimizer, keys: Mapping[int, str], moment_names: Sequence[str]) -> None:
        """Takes the states out of the optimizer: whoever moves them takes them out of `here`."""
        self._original = original
        self._order = [(param, keys[id(param)]) for param in original.state]
        self._moment_names = moment_names
        self._like = {  # of what moves: an empty tensor of its dtype, where it was; the rest itself
            key: {name: self._without_values(name, value) for name, value in original.state[param].items()}
            for param, key in self._order
        }
        self.here: dict[str, Any] = {key: original.state.pop(param) for param, key in self._order}

    def give_back(self, moved: States) -> None:
        """What is not here any more has moved."""
        for param, key in self._order:
            self._original.state[param] = self.here[key] if key in self.here else self._copied(key, moved[param])

    def _without_values(self, name: str, value: Any) -> Any:
        return value.new_empty(0) if name in self._moment_names and isinstance(value, Tensor) else value

    def _copied(self, key: str, state: StateOf) -> dict[str, Any]:
        copied, like = state.copied(), self._like[key]
        moved = {name: copied[name].to(like[name]) for name in self._moment_names if name in copied}
        return {**like, **moved}
