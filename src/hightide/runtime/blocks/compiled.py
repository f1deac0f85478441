"""torch.compile for blocks: one compilation for all equal ones, whatever slots their parameters are in.

[Note: compiled blocks] What is compiled is a function of the module and its inputs. Parameters are inputs of the graph,
so neither another block of the same class nor another slot under the same block compiles again. What would, is held
constant: micro-batches have one size (a smaller last one runs eagerly), the function is always entered with grad
enabled, and equal blocks have one class (see surgery.py). What is left are shapes of inputs: the first MAX_SHAPES of
them are compiled, all others run eagerly. A plan with another micro-batch begins to count anew.

[Note: attention draws nothing] Torch marks attention as an operation that draws, whatever its dropout is. Where a
compiled graph computes one again in backward, each of its two calls is then wrapped in a higher-order operator, which
puts the state of a generator in place and takes some four hundred Python calls to do so: of a compiled layer's forward
and backward a fifth of all, in the thread that issues the GPU's work. So the partitioner, which looks through a graph
for such operations while it is compiled, is not shown those whose dropout is the constant zero. What it asks is a
private function of torch: where there is none by that name, nothing changes.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch._functorch import partitioners
from torch.utils import checkpoint

from hightide.ir.activation import Activation

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


Forward = Callable[..., Any]
Shapes = tuple[torch.Size, ...]

SELECTIVE_BUDGET = 0.7  # the least at which products are not repeated: docs/log.md, the curve of activation budgets
MAX_SHAPES = 8  # of one forward under one plan: four lengths (see data/buckets.py), each with a mask and without
MAX_COMPILATIONS = 2 * MAX_SHAPES  # at which torch.compile gives up; by itself it would at eight


class CompiledForwards:
    """The compiled forms of the blocks' forwards, by class."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._num_blocks: Counter[Forward] = Counter()
        self._shapes: dict[Forward, set[Shapes]] = defaultdict(set)
        self._ran: set[tuple[Forward, Activation, Shapes]] = set()  # so they are compiled
        self._warned: set[Forward] = set()
        self._forwards: dict[tuple[Forward, Activation], Forward | None] = {}

    def forget(self) -> None:
        """What was compiled: shapes of micro-batches are others from now on."""
        self._shapes.clear()
        self._ran.clear()
        self._forwards.clear()

    def add(self, module: torch.nn.Module, original: Forward) -> None:
        """One more block with this forward. A module without parts (an embedding, a norm) is hardly more than one
        kernel as it is."""
        if next(module.children(), None) is not None:
            self._num_blocks[original] += 1

    def forward_of(self, original: Forward, activation: Activation, shapes: Shapes) -> Forward | None:
        """None: run it eagerly. A block that is the only one of its kind is not worth a compilation; nor are more than
        a few shapes of inputs."""
        if not self.enabled or self._num_blocks[original] < 2 or not self._is_known(original, shapes):
            return None
        key = (original, activation)
        if key not in self._forwards:
            function = partial(checkpointed, original) if activation is Activation.RECOMPUTE else original
            compiled = torch.compile(_named(function), dynamic=False, fullgraph=True, **_LIMIT)
            if activation is Activation.SELECTIVE:
                compiled = partial(_within_budget, compiled)
            self._forwards[key] = compiled
        found = self._forwards[key]
        return None if found is None else partial(self._call, key, shapes, found)

    def _is_known(self, original: Forward, shapes: Shapes) -> bool:
        known = self._shapes[original]
        if shapes in known or len(known) < MAX_SHAPES:
            known.add(shapes)
            return True
        if original not in self._warned:
            self._warned.add(original)
            warnings.warn(
                f"{_name(original)} was compiled for {MAX_SHAPES} shapes of its inputs; others run eagerly: slower, "
                "but right. Pad batches to a few lengths (hightide.PadToBucket)",
                stacklevel=2,
            )
        return False

    def _call(
        self, key: tuple[Forward, Activation], shapes: Shapes, compiled: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            if (*key, shapes) not in self._ran:
                with _limited(), attention_draws_nothing():
                    result = compiled(*args, **kwargs)
                self._ran.add((*key, shapes))
                return result
            if _LIMIT:
                return compiled(*args, **kwargs)
            with _limited():
                return compiled(*args, **kwargs)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            self._forwards[key] = None
            name = _name(key[0])
            warnings.warn(
                f"{name} cannot be compiled and runs eagerly from now on: slower, but right. "
                f"torch.compile says: {error}",
                stacklevel=2,
            )
            raise NotCompiled(name) from error


# Where torch.compile takes the limit itself, it need not be put in place for each call.
_LIMIT: dict[str, Any] = (
    {"recompile_limit": MAX_COMPILATIONS} if "recompile_limit" in signature(torch.compile).parameters else {}
)


def _limited() -> AbstractContextManager[object]:
    """Inside, so many compilations of one forward are allowed."""
    if _LIMIT:
        return nullcontext()
    return torch._dynamo.config.patch(recompile_limit=MAX_COMPILATIONS)


def _name(forward: Forward) -> str:
    return f"{forward.__module__}.{forward.__qualname__}"


class NotCompiled(Exception):
    """This forward has to run eagerly, now and from now on."""


def _within_budget(compiled: Forward, *args: Any, **kwargs: Any) -> Any:
    """What torch's partitioner holds for backward takes this part of what it would hold by itself. It asks when it
    compiles, which may be in any call; and functions of their own have code of their own, so none is taken for another
    (see _named)."""
    with torch._functorch.config.patch(activation_memory_budget=SELECTIVE_BUDGET):
        return compiled(*args, **kwargs)


def checkpointed(function: Forward, *args: Any, **kwargs: Any) -> Any:
    """Its graph keeps only its inputs, and recomputes the rest as far as backward needs it. Random numbers and their
    replay are the caller's."""
    return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _named(function: Forward) -> Forward:
    """torch.compile wants a function, and not a partial; and it counts compilations by code, which is therefore the
    function's own."""

    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    forward.__code__ = forward.__code__.replace()
    return forward
