"""Attention that has no dropout draws no random numbers, and need not be repeated with those of its forward.

[Note: attention draws nothing] Torch marks attention as an operation that draws, whatever its dropout is. Where a
compiled graph computes one again in backward, each of its two calls is then wrapped in a higher-order operator, which
puts the state of a generator in place and takes some four hundred Python calls to do so: of a compiled layer's forward
and backward a fifth of all, in the thread that issues the GPU's work. So the partitioner, which looks through a graph
for such operations while it is compiled, is not shown those whose dropout is the constant zero. What it asks is a
private function of torch: where there is none by that name, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import partitioners

ASKED = "has_recomputable_rng_ops"  # of a graph: whether anything that draws is computed again
DROPOUT = "dropout_p"


def draws_nothing(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == DROPOUT:
            given = node.kwargs.get(DROPOUT, argument.default_value)
            dropout = node.args[position] if position < len(node.args) else given
            return isinstance(dropout, int | float) and dropout == 0
    return False


def _may_draw(node: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not draws_nothing(node)


@contextmanager
def attention_draws_nothing() -> Iterator[None]:
    """For what is compiled inside. See [Note: attention draws nothing]."""
    original: Callable[[Any], bool] | None = getattr(partitioners, ASKED, None)
    if original is None:
        yield
        return

    def asked(graph: Any) -> bool:
        return any(map(_may_draw, graph.graph.nodes)) and original(graph)

    setattr(partitioners, ASKED, asked)
    try:
        yield
    finally:
        setattr(partitioners, ASKED, original)
