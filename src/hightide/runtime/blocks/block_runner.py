"""How one block executes: what its calls have in common."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hightide.ir.action import Op
from hightide.ir.activation import Activation
from hightide.ir.block import Selective
from hightide.ir.plan import Update
from hightide.ir.refusal import Refused
from hightide.process.interrupts import deferred
from hightide.profiler.probe.taps import Tap
from hightide.runtime.blocks.block_function import BlockCall, BlockFunction

if TYPE_CHECKING:
    from hightide.runtime.run import Run


class BlockRunner:
    def __init__(self, run: Run, index: int, original: Callable[..., Any]) -> None:
        self.run = run
        self.index = index
        self.original = original  # the class's own forward
        self.spec = run.profile.blocks[index]
        self.plan = run.plan.blocks[index]
        module = run.model.get_submodule(self.spec.name)
        self.trainable = any(param.requires_grad for param in module.parameters())  # those of loose chunks too
        self.inside: list[nn.Module] = []  # the block's modules, since its first call

    def held_rule(self, call: int | None) -> Selective | None:
        """What is held of a call under Activation.SELECTIVE. None: nothing, as of calls that the plan did not
        foresee."""
        if call is None or self.plan.activation is not Activation.SELECTIVE:
            return None
        return self.run.profile.calls[call].selective

    def tiled_parts(self, call: int | None) -> tuple[str, ...]:
        """Modules inside that run tile by tile: see [Note: token tiles]."""
        return () if call is None else self.run.profile.calls[call].tiled

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.run.splits.is_probing:
            return self.original(module, *args, **kwargs)
        with deferred:
            self.run.passes.ensure(self.index)
            if not torch.is_grad_enabled():
                return self._without_grad(module, args, kwargs)
            return self.with_grad(module, args, kwargs)

    def _without_grad(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Unsplit: splitting would break what callers keep between calls, such as the cache of `generate`."""
        with self.run.passes.tick(Op.FORWARD, self.index), self.run.autocast().restored():
            return self.original(module, *args, **kwargs)

    def with_grad(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check_parameters()
        changes = self.run.looks.changes(self, module)
        self.inside = self.inside or list(module.modules())
        state = self.run.looks.state(self, changes)
        if changes is not None:
            self.inside = changes.inside
        call = BlockCall(self, module, args, kwargs, state, None if changes is None else changes.contents)
        self.run.passes.graphs.open_calls.add(call)
        outputs = BlockFunction.apply(call, self.anchor, *call.frame.take_tensors())
        result = call.assemble(list(outputs))
        place = self.run.probed.returned.get(self.index)
        return result if place is None else refilled(args[place] if isinstance(place, int) else kwargs[place], result)

    @property
    def taps(self) -> tuple[Tap, ...]:
        return self.run.probed.taps.get(self.index, ())

    @property
    def anchor(self) -> Tensor | None:
        return self.run.anchor.tensor if self.trainable else None

    @property
    def version(self) -> int:
        """Changes with every update of the block's parameters."""
        return sum(self.run.performer.updating.num_updates[chunk] for chunk in self.run.chunks.by_block[self.index])

    def check_plan(self, module: nn.Module) -> None:
        if self.run.runners.get(id(module)) is not self:
            raise Refused(
                f"the plan was changed after the forward of block {self.spec.name!r}, and what its backward or its "
                "logits need is gone with the old one; run the model's forward again"
            )

    def check_parameters(self) -> None:
        if (unchanged := self.run.unchanged.get(self.index)) is not None:
            unchanged.check()

    def check_forward(self, now: Callable[..., Any]) -> None:
        """`now`: what its class has for a forward."""
        if getattr(now, "__func__", self.original) is not self.original and isinstance(self.original, FunctionType):
            raise Refused(
                f"the class of block {self.spec.name!r} was given another forward after hightide.wrap, which would not "
                "be run; call hightide.unwrap(model), change it, and wrap again"
            )

    def check_version(self, version: int) -> None:
        """`version`: at forward."""
        if self.run.plan.update is Update.DEFERRED and version != self.version:
            raise Refused(
                f"the parameters of block {self.spec.name!r} were updated between its forward and its backward: the "
                "gradient would be that of other weights. Call backward() before optimizer.step()."
            )

    def will_accumulate(self) -> bool:
        return self.trainable and self.run.anchor.is_reached()


def refilled(container: Any, result: Any) -> Any:
    """A list or dict that a block fills and returns: its caller may know it by the name that it had before."""
    if type(container) is not type(result):
        return result
    container.clear()
    container.extend(result) if isinstance(container, list) else container.update(result)
    return container
