"""An embedding that is looked up on the host, as one autograd function. See [Note: looking up on the host] in
planner/lookup.py.

[Note: ids on the host] A batch that comes from the CPU is copied to the GPU, and what the embedding is called with is
one of its tensors, or a view of one: then the ids are those of the user's own tensor (`CpuCopies`), and nobody waits.
Ids that were made on the GPU are fetched, which waits for all that it has to do; in training a warning says so."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hightide.ir.action import Op
from hightide.ir.refusal import Refused
from hightide.process.interrupts import deferred
from hightide.runtime.blocks.block_runner import BlockRunner
from hightide.runtime.guards.transforms import once
from hightide.runtime.waiting.activations import FREED

if TYPE_CHECKING:
    from hightide.runtime.run import Run

FROM_GPU = (
    "the ids for the embedding {name!r} are on the GPU, but its table is on the host: every call waits until the GPU "
    "has made them. Pass the batch as it comes from the loader, on the CPU, or plan this block with compute=gpu"
)
CHANGED = (
    "the embedding {name!r} was given max_norm, scale_grad_by_freq or sparse after hightide.wrap, but it is looked up "
    "on the host as it was then; set them before, or plan this block with compute=gpu"
)


class HostEmbedding(BlockRunner):
    def __init__(self, run: Run, index: int, original: Any) -> None:
        super().__init__(run, index, original)
        (self.chunk,) = run.chunks.by_block[index]
        self._has_warned = False

    def _without_grad(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unchanged = self.run.unchanged.get(self.index)
        if unchanged is not None and unchanged.is_exchanged:  # functional_call, averaged weights: those of the moment
            return self.original(module, *args, **kwargs)
        return LookUp(self, module, *args, **kwargs).forward()

    def with_grad(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check_parameters()
        call = LookUp(self, module, *args, **kwargs)
        return LookUpFunction.apply(call, self.anchor) if self.trainable else call.forward()

    def on_host(self, ids: Tensor) -> Tensor:
        """A copy, because ids may be written over before backward. See [Note: ids on the host]."""
        here = ids if ids.device.type == "cpu" else self.run.passes.cpu_copies.find(ids)
        if here is None and torch.is_grad_enabled() and not self._has_warned:
            self._has_warned = True
            warnings.warn(FROM_GPU.format(name=self.spec.name), stacklevel=2)
        with self.run.gpu.unmetered(), torch.inference_mode(False):
            return ids.cpu() if here is None else here.clone()


class LookUp:
    """One call, from its forward to its backward."""

    def __init__(self, runner: HostEmbedding, module: nn.Module, input: Tensor) -> None:
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise Refused(CHANGED.format(name=runner.spec.name))
        self.runner = runner
        self._module, self._padding, self._shape = module, module.padding_idx, input.shape
        self._ids = runner.on_host(input).flatten()
        self._call: int | None = None
        self._spent = False

    def forward(self) -> Tensor:
        run, chunk = self.runner.run, self.runner.chunk
        weight = run.chunks.tables[chunk].weight
        with run.passes.tick(Op.FORWARD, self.runner.index) as tick:
            self._call = tick.call
            with torch.inference_mode(False):  # a lane writes to it
                # No view is returned: of the result of a function autograd lets nobody change one in place.
                found = torch.empty((*self._shape, weight.shape[1]), dtype=weight.dtype, device=run.gpu.device)
                with run.gpu.unmetered():
                    run.executor.look_up(tick, chunk, self._ids, found.view(len(self._ids), weight.shape[1]))
                return found

    def backward(self, gradients: Tensor | None) -> None:
        if self._spent:
            raise Refused(FREED)
        self._spent = True
        runner = self.runner
        runner.check_plan(self._module)
        runner.check_parameters()
        if not runner.will_accumulate():
            return
        run = runner.run
        run.passes.queue_end_of_backward()
        run.adopt([gradients] if gradients is not None else [], "activations")
        with run.passes.tick(Op.BACKWARD, runner.index, self._call, accumulate=True) as tick:
            if gradients is not None:
                run.executor.add_rows(tick, runner.chunk, self._ids, gradients, self._padding)


class LookUpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: LookUp, anchor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return call.forward()

    @staticmethod
    @once(lambda ctx: ctx.call.runner.will_accumulate())
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with deferred:
            ctx.call.backward(*gradients)
        return None, None
