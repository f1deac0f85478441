"""Blocks as single autograd functions: all micro-batches of a block run while its parameters are there.

[Note: the block function] Forward holds the block, runs it micro-batch by micro-batch under a graph of its own, writes
the outputs into whole-batch tensors and lets go. Backward holds it again and runs backward through each micro-batch's
graph: parameters are leaves whose `.grad` is bound to the gradient chunk. To autograd outside, parameters are
invisible; so that a block with no differentiable input (a trainable embedding behind integer inputs) still gets its
backward, every block with trainable parameters has an empty tensor that requires grad, the anchor, as an extra input.
Whether parameters take part in this particular backward (`torch.autograd.grad` of inputs must not touch them) is asked
from the engine: will the anchor's accumulation node run? See also [Note: backward of some inputs].
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hightide.ir.action import Op
from hightide.ir.refusal import Refused
from hightide.ir.tier import Tier
from hightide.process.interrupts import deferred, safe_point
from hightide.profiler.probe.taps import hand_out
from hightide.runtime.blocks.block_runs import BlockRuns
from hightide.runtime.blocks.micro_batches import Gathered, Graph, InputGradient, dims_of, divided, sliced_grads
from hightide.runtime.guards.contents import ObjectContents
from hightide.runtime.guards.first_look import BlockState
from hightide.runtime.guards.transforms import once
from hightide.runtime.guards.unseen import refuse_leading_outside, refuse_second_time
from hightide.runtime.waiting.activations import FREED
from hightide.runtime.waiting.held import Held, Holding, InputsOnGpu, address_of

if TYPE_CHECKING:
    from hightide.runtime.blocks.block_runner import BlockRunner


class _Running:
    """Inside, a call's forward or its backward runs."""

    __slots__ = ("_call",)

    def __init__(self, call: BlockCall) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._call.is_running = True

    def __exit__(self, *error: object) -> None:
        self._call.is_running = False


class BlockCall(BlockRuns):
    """One call of one block, from its forward to its backward."""

    def __init__(
        self,
        runner: BlockRunner,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: BlockState,
        contents: ObjectContents | None,
    ) -> None:
        super().__init__(runner, module, args, kwargs, contents)
        self.state = state
        self.autocast = runner.run.autocast()
        self._version = runner.version
        self._draws = runner.run.passes.draws(runner.index, len(self.bounds))
        self._graphs: list[Graph] | None = None
        self.here: InputsOnGpu | None = None  # None: autograd has those that are not away
        self._differentiable: list[bool] = []  # of the outputs
        self._spent = False  # its one backward has begun

    def assemble(self, outputs: list[Tensor]) -> Any:
        """The block's result as its caller expects it. What was tapped goes its own way."""
        result, tapped = self.frame.result(outputs)
        hand_out(self.module, self._tapped, tapped)
        return result

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(self, tensors: Sequence[Tensor], needs_backward: bool) -> list[Tensor]:
        run = self.runner.run
        with run.passes.tick(Op.FORWARD, self.runner.index) as tick, _Running(self):
            self.call = tick.call
            if needs_backward:
                if self.runner.plan.inputs is not Tier.GPU and tick.call is not None:
                    # The rest (masks, positions) are shared and stay; so does what the plan did not foresee.
                    tensors = self.away.choose(tensors, self.requires_grad, is_whole=len(self.bounds) == 1)
                self._hold = self._holding(tensors)
            if len(self.bounds) > 1 and (reason := run.looks.difference(self, tensors)):
                self._stay_whole(reason)
            look = run.looks.look(self)
            self._is_looked_at = look is not None
            try:
                whole = self._run_parts(tensors, needs_backward)
            finally:
                self._is_looked_at = False
                if look is not None:
                    look.close()
            if look is not None and (reason := look.end(tensors)):  # see [Note: replays]
                if len(self.bounds) > 1:
                    whole.clear()
                    look.before.restore()
                    self._stay_whole(reason)
                    whole = self._run_parts(tensors, needs_backward)
                if needs_backward and not self._keep:
                    self._before = look.before
            if needs_backward and not self._keep and self._before is None:
                self._changes.note()
            held = self._hold.leaving()
            if any(self.away.which) or held:
                self._leave(tensors, held)
        return whole

    def _run_parts(self, tensors: Sequence[Tensor], needs_backward: bool) -> list[Tensor]:
        graphs: list[Graph] = []
        gathered: Gathered | None = None
        for number, (start, num_samples) in enumerate(self.bounds):
            safe_point()
            with self._draws.forward(number), self.autocast.restored():
                inputs = self.sliced(tensors, start, num_samples, with_grad=needs_backward)
                outputs = self._with_graph(inputs, num_samples) if needs_backward else self._without_graph(inputs)
            if needs_backward and self._is_looked_at and number == 0 and not self.runner.trainable:
                refuse_leading_outside(self.runner.spec.name, outputs, inputs)
            self._check_outputs(outputs)
            if gathered is None:
                self.output_dims = dims_of(outputs, self.output_dims, num_samples)
                gathered = Gathered(outputs, self.output_dims, self.bounds)
                self._differentiable = [output.requires_grad for output in outputs]
            gathered.put(number, outputs)
            if needs_backward:
                graphs.append(Graph(inputs, outputs, self._is_compiled))
            del inputs, outputs
        self._graphs = graphs
        self._now = []
        assert gathered is not None
        return gathered.whole

    def _stay_whole(self, reason: str) -> None:
        """This call, and those like it, run the whole batch at once."""
        split = self.runner.run.splits.never(self.runner.index, self.signature, reason)
        self.bounds, self._inputs, self.output_dims = divided(split, [None] * len(self._inputs), 1)
        self._draws = self.runner.run.passes.draws(self.runner.index, 1)

    def not_differentiable(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Whoever detaches what he returns gets it detached."""
        pairs = zip(outputs, self._differentiable, strict=True)
        return [output for output, differentiable in pairs if not differentiable]

    def _check_outputs(self, outputs: list[Tensor]) -> None:
        if self.output_dims is not None and len(outputs) != len(self.output_dims):
            raise Refused(
                f"the block {self.runner.spec.name!r} returned {len(outputs)} tensors (what hooks and attributes took "
                f"out of it included), and {len(self.output_dims)} when it was probed: their number must not depend on "
                "the values of the batch"
            )

    def _holding(self, tensors: Sequence[Tensor]) -> Holding:
        """Of what the block computes. See [Note: what leaves]."""
        if self.runner.plan.held is not Tier.HOST or self.call is None:
            return Holding()
        run = self.runner.run
        staying = [*tensors, *self.module.parameters(), *self.module.buffers(), *run.chunks.binding.loose_params()]
        return Holding(run.gpu.device, staying)

    def _leave(self, tensors: Sequence[Tensor], held: Sequence[Held]) -> None:
        assert self.call is not None and self._graphs is not None
        run, on_disk = self.runner.run, self.runner.plan.inputs is Tier.DISK
        self.away.leave(run.stashes, self.call, tensors, held, on_disk)
        self._hold.forget_staying()
        with run.gpu.unmetered():  # what takes their place is there once for all
            for graph in self._graphs:
                graph.forget_inputs(self.away.which)

    def put_away(self) -> None:
        """What it has on the GPU waits on the host, off the plan. See [Note: several graphs]."""
        run, here = self.runner.run, self.here
        if self._spent or self.is_running or self._graphs is None or here is None:
            return
        own = (*self.module.parameters(), *self.module.buffers(), *run.chunks.binding.loose_params())
        staying = {address_of(tensor) for tensor in own}
        held, before, is_whole = self._hold.others(run.gpu.device, staying), self.away.which, len(self.bounds) == 1
        gone, stashes = self.away.to_put_away(run.stashes, here.tensors, held, staying, is_whole)
        here.keep_only([not now for now, was in zip(gone, before, strict=True) if not was])
        with run.gpu.unmetered():
            for graph in self._graphs:
                graph.forget_inputs(gone)
        for stash in stashes:
            run.stashes.put_away(stash)

    # -- backward -------------------------------------------------------------------------------------------------

    @property
    def is_spent(self) -> bool:
        """Its one backward has begun."""
        return self._spent

    def backward(self, ctx: Any, grads: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
        """`ctx`: has the inputs that waited on the GPU, if this has not; `wanted`: which inputs need a gradient."""
        if self._spent:  # with retain_graph=True autograd itself lets it pass
            raise Refused(FREED)
        here, self.here = ctx.saved_tensors if self.here is None else self.here.checked(), None
        self._spent = True
        run = self.runner.run
        self.runner.check_plan(self.module)
        self.runner.check_parameters()
        self.runner.check_version(self._version)
        if not self._keep and self._before is None:
            self._changes.look(any(graph.compiled for graph in self._graphs or ()))
        accumulate = self.runner.will_accumulate()
        run.passes.queue_end_of_backward()
        run.adopt([grad for grad in grads if grad is not None], "activations")
        with run.passes.tick(Op.BACKWARD, self.runner.index, self.call, accumulate), _Running(self):
            tensors = self.away.back(run.stashes, here)
            summed = [
                InputGradient(tensor, dim, len(self.bounds)) for tensor, dim in zip(tensors, self._inputs, strict=True)
            ]
            for number, (start, num_samples) in enumerate(self.bounds):
                safe_point()
                assert self._graphs is not None
                graph, self._graphs[number] = self._graphs[number], None  # type: ignore[call-overload]
                roots = graph.roots(sliced_grads(grads, self.output_dims, self.bounds, number))
                if roots:
                    self._now = self.sliced(tensors, start, num_samples, with_grad=True)
                    with (
                        self._draws.replay(number),
                        self.autocast.restored(),
                        run.gpu.unmetered() if graph.compiled else nullcontext(),
                    ):
                        try:
                            graph.backward(roots, wanted, accumulate)
                        except RuntimeError as error:
                            refuse_second_time(self.runner.spec.name, error)
                            raise
                    self._now = []
                for index, want in enumerate(wanted):
                    if want:
                        summed[index].add(graph.take_grad(index), start, num_samples)
                del graph, roots
            found = [total.value if want else None for total, want in zip(summed, wanted, strict=True)]
            del tensors, summed  # inputs go before gradients leave, which may wait where they lay
            self.away.release(run.stashes)
        self._graphs = self._before = None
        self._changes.forget()
        return found


class BlockFunction(torch.autograd.Function):
    """See [Note: the block function]."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, anchor: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call.forward(tensors, any(ctx.needs_input_grad))
        ctx.set_materialize_grads(False)
        ctx.call = call
        here = [tensor for tensor, away in zip(tensors, call.away.which, strict=True) if not away]
        call.here = InputsOnGpu.of(here) if any(ctx.needs_input_grad) else None
        if call.here is None:
            ctx.save_for_backward(*here)
        ctx.mark_non_differentiable(*call.not_differentiable(outputs))
        return tuple(outputs)

    @staticmethod
    @once(lambda ctx: ctx.call.runner.will_accumulate())
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with deferred:
            return None, None, *ctx.call.backward(ctx, grads, ctx.needs_input_grad[2:])
