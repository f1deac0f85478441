"""torch.compile for blocks: one compilation for all equal ones, whatever slots their parameters are in.

[Note: compiled blocks] What is compiled is a function of the module and its inputs. Parameters are inputs of the graph,
so neither another block of the same class nor another slot under the same block compiles again. What would, is held
constant: micro-batches have one size (a smaller last one runs eager), the function is always entered with grad enabled,
and equal blocks have one class (see surgery.py).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]


class CompiledForwards:
    """The compiled forms of the blocks' forwards, by class."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._num_blocks: Counter[Forward] = Counter()
        self._forwards: dict[tuple[Forward, bool], Forward | None] = {}

    def add(self, original: Forward) -> None:
        """One more block with this forward."""
        self._num_blocks[original] += 1

    def forward_of(self, original: Forward, recompute: bool) -> Forward | None:
        """None: run it eagerly. A block that is the only one of its kind (an embedding, a final norm) is not worth a
        compilation."""
        if not self.enabled or self._num_blocks[original] < 2:
            return None
        key = (original, recompute)
        if key not in self._forwards:
            function = partial(checkpointed, original) if recompute else original
            compiled = torch.compile(_named(function), dynamic=False, fullgraph=True)
            self._forwards[key] = partial(self._call, key, compiled)
        return self._forwards[key]

    def _call(self, key: tuple[Forward, bool], compiled: Forward, *args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            self._forwards[key] = None
            name = f"{key[0].__module__}.{key[0].__qualname__}"
            warnings.warn(
                f"{name} cannot be compiled and runs eagerly from now on: slower, but right. "
                f"torch.compile says: {error}",
                stacklevel=2,
            )
            raise NotCompiled(name) from error


class NotCompiled(Exception):
    """This forward has to run eagerly, now and from now on."""


def checkpointed(function: Forward, *args: Any, **kwargs: Any) -> Any:
    """Its graph keeps only its inputs, and recomputes the rest as far as backward needs it. Random numbers and their
    replay are the caller's."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _named(function: Forward) -> Forward:
    """torch.compile wants a function, and not a partial."""

    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return forward
