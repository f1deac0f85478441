"""A model with its values, a block at a time: for code that asks for them.

[Note: a pass on values] A model that asks for a value of what it computes (`.item()`, `nonzero`, a branch) does not run
on tensors without values. Such a model is run on its own values and the user's batch before it is planned, under what
would be the leanest plan: a block's parameters are copied to the device when it is called and gone when it is through,
it sees all samples at once, and its graph ends where the block does. What it returns waits on the CPU, where the
model's own code between blocks runs. So the device never holds more than one block. Afterwards each call is metered by
itself, forward and backward, with the arguments that it had; equal calls of equal blocks may take different bytes here,
and the widest counts for all. Nothing stays: parameters and buffers are copies, random numbers are put back after each
call, and what modules keep is put back by `fake_parameters`.

Its blocks run unsplit: one batch does not tell how a decision over the whole batch divides. It is done before planning
and not in a first step under a lean plan, which would need a plan before the bytes are known, a trace of the runtime
and a move, and could refuse only when training has begun. What another batch takes beyond the example is for the watch
to see. A model that fails on values too is refused; without values at hand (`hightide plan`) nothing is told. Such
models are not rehearsed, so their times are estimates; and code between blocks that changes a result in place has it
changed twice while it is metered.

Parameters that the model's own code uses between blocks must have values throughout, and are not known at first: a run
that meets one without values fails, and tells which one it was; the next run has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hightide.profiler.fake.exchange import exchange
from hightide.profiler.fake.fake import Originals
from hightide.profiler.model.block_finder import first_names
from hightide.profiler.trial.state import GlobalRandom

CPU = torch.device("cpu")
SEED = 1
Source = Callable[[Tensor], Tensor]  # of a parameter or a buffer on the meta device: its values


def random_values(like: Tensor, device: torch.device, generator: torch.Generator) -> Tensor:
    """In fp32: matrices that keep the size of what they multiply; vectors are mostly the weights of norms, and
    biases."""
    values = torch.randn(like.shape, generator=generator, device=device)
    if like.ndim < 2:
        return 1.0 + 0.3 * values
    return values * max(1, like.numel() // max(1, like.shape[0])) ** -0.5


def made_up(tensor: Tensor) -> Tensor:
    """For what has no values yet."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return random_values(tensor, CPU, torch.Generator().manual_seed(SEED)).to(tensor.dtype)


class Values:
    """To be used with fake parameters. See [Note: a pass on values]."""

    def __init__(self, originals: Originals, device: torch.device, source: Source = made_up) -> None:
        self.device = device
        self._originals, self._source = originals, source
        self._anchor = torch.empty(0, requires_grad=True)

    @contextmanager
    def between(self, model: nn.Module, loose: Collection[str]) -> Iterator[None]:
        """For the model's own code: buffers, and loose parameters."""
        names = first_names(model)
        with self._in_place(model, CPU, lambda param: names[id(param)] in loose):
            yield

    @contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """For one call of a block."""
        random = GlobalRandom(self.device)
        try:
            with self._in_place(module, self.device, lambda _: True):
                yield
        finally:
            random.restore()

    def there(self, leaves: Sequence[Any]) -> list[Any]:
        """Arguments on the device."""
        return [self._moved(leaf, self.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def back(self, result: Any, there: Sequence[Any], given: Sequence[Any]) -> Any:
        """A result of a call with the arguments `given`, which were `there`: without its graph, but with a gradient,
        and not a leaf, so that the model's code may change it in place."""
        if not isinstance(result, Tensor):
            return result
        for moved, leaf in zip(there, given, strict=True):
            if result is moved:
                return leaf
        if not result.requires_grad:
            return result.to(CPU)
        border: Tensor = _Border.apply(self._anchor, [result.detach().to(CPU)])
        return border

    @staticmethod
    def _moved(tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device == device:
            return tensor
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    @contextmanager
    def _in_place(
        self, module: nn.Module, device: torch.device, has_values: Callable[[nn.Parameter], bool]
    ) -> Iterator[None]:
        """What code has put in the place of a buffer meanwhile stays there; a parameter comes back in any case."""
        inside = list(module.modules())
        params = [dict(one._parameters) for one in inside]
        before: dict[int, Tensor] = {}  # by the id of the copy

        def copied(tensor: Tensor) -> Tensor | None:
            if isinstance(tensor, nn.Parameter) and not has_values(tensor):
                return None
            copy = self._copy(tensor, device)
            before[id(copy)] = tensor
            return copy

        copies = exchange(inside, copied)
        try:
            yield
        finally:
            for one, theirs in zip(inside, params, strict=True):
                one._parameters.update(theirs)
            exchange(inside, lambda tensor: before.get(id(tensor)))
            del copies  # they must live until here: another tensor could get the id of one

    def _copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        if not isinstance(tensor, FakeTensor) and tensor.device == device:
            return tensor  # it has values already
        original = self._originals.of(tensor)
        values = self._source(original) if original.is_meta else original
        copy = values.detach().to(device, copy=True)
        if not isinstance(tensor, nn.Parameter):
            return copy
        param = nn.Parameter(copy, requires_grad=tensor.requires_grad)
        vars(param)[_STANDS_FOR] = stands_for(tensor)
        return param


_STANDS_FOR = "hightide_stands_for"


def stands_for(param: Tensor) -> int:
    """The id of the fake parameter that a copy with values is in the place of."""
    return int(vars(param).get(_STANDS_FOR, id(param)))


class _Border(torch.autograd.Function):
    """Gradients end here."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor]) -> Tensor:
        return tensors[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None
