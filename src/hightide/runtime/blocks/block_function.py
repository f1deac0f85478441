"""Blocks as single autograd functions: all micro-batches of a block run while its parameters are there.

[Note: the block function] Forward holds the block, runs it micro-batch by micro-batch under a graph of its own, writes
the outputs into whole-batch tensors and lets go. Backward holds it again and runs backward through each micro-batch's
graph: parameters are leaves whose `.grad` is bound to the gradient chunk. To autograd outside, parameters are
invisible; so that a block with no differentiable input (a trainable embedding behind integer inputs) still gets its
backward, every block with trainable parameters has an empty tensor that requires grad, the anchor, as an extra input.
Whether parameters take part in this particular backward (`torch.autograd.grad` of inputs must not touch them) is asked
from the engine: will the anchor's accumulation node run? See also [Note: backward of some inputs].

[Note: recomputation] The graph of a block that is recomputed saves nothing but the way to make its tensors again: it
is a checkpoint, entered in forward, whose output is dropped and whose gradient edge is kept. Recomputation then ends
with the last tensor that backward needs, and a block's last projection is not repeated. Eager, recomputation.py does
this; compiled, the checkpoint is inside of what is compiled, and the compiled backward contains the recomputation. What
inputs it reads is decided in backward: they may have been on host in between.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hightide.ir.action import Op
from hightide.ir.activation import Activation
from hightide.ir.refusal import Refused
from hightide.ir.tier import Tier
from hightide.process.interrupts import deferred, safe_point
from hightide.profiler.model.call_tree import mode_of, narrow
from hightide.profiler.needs.token_tiles import BLOCK, by_tiles, tiling
from hightide.profiler.probe.taps import Tapped, hand_out, tapping
from hightide.profiler.trial.state import ModuleState
from hightide.runtime.blocks.call_frame import CallFrame
from hightide.runtime.blocks.compiled import NotCompiled
from hightide.runtime.blocks.kept_since import KeptSince
from hightide.runtime.blocks.micro_batches import Gathered, Graph, InputGradient, dims_of, divided, sliced_grads
from hightide.runtime.blocks.recomputation import Recomputed
from hightide.runtime.guards.contents import Contents
from hightide.runtime.guards.first_look import BlockState
from hightide.runtime.guards.inner_hooks import InnerHooks
from hightide.runtime.guards.transforms import once
from hightide.runtime.waiting.activations import FREED
from hightide.runtime.waiting.held import Held, Holding, outlive_slots
from hightide.runtime.waiting.inputs_away import InputsAway
from hightide.runtime.waiting.selective import HeldResults

if TYPE_CHECKING:
    from hightide.runtime.blocks.block_runner import BlockRunner

NOT_TAPPED = Tapped()  # nothing was: of all blocks without taps
TAKEN_OUT = (
    "a gradient came into the middle of the block {name!r}: a tensor that was made inside of it is part of the loss, "
    "kept by a forward hook that was registered after hightide.wrap, or by what a hook has computed. It belongs to one "
    "micro-batch, and its gradient would be lost. Register the hook before hightide.wrap and let it keep the module's "
    "output itself, return the tensor from the block's forward, or keep it.detach()"
)


class _Running:
    """Inside, a call's forward or its backward runs."""

    __slots__ = ("_call",)

    def __init__(self, call: BlockCall) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._call._is_running = True

    def __exit__(self, *error: object) -> None:
        self._call._is_running = False


class BlockCall:
    """One call of one block, from its forward to its backward."""

    def __init__(
        self,
        runner: BlockRunner,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: BlockState,
        contents: Contents | None,
    ) -> None:
        self.state = state
        self.runner = runner
        self.module = module
        self.frame = CallFrame(args, kwargs, mode_of(runner.inside))
        self.signature, tensors = self.frame.signature, self.frame.tensors
        self.call: int | None = None  # set by forward
        self._version = runner.version
        self.requires_grad = [tensor.requires_grad for tensor in tensors]
        self.away = InputsAway(len(tensors))
        self._hold = Holding()
        self._graphs: list[Graph] | None = None
        self._is_compiled = False  # the present micro-batch
        self._now: list[Tensor] = []  # the inputs of the micro-batch that a recomputation is about
        self._spent = False  # its one backward has begun
        self._is_running = False  # its forward or its backward
        self._has_run = False
        self.autocast = runner.run.autocast()
        split = runner.run.splits.of(runner.index, self.signature)
        self.bounds, self._inputs, self.output_dims = divided(split, tensors, runner.run.plan.micro_batch)
        self._draws = runner.run.passes.draws(runner.index, len(self.bounds))
        self._before: ModuleState | None = None  # what the block kept, if its forward changes it and is run again
        self._kept = KeptSince(runner, contents)  # else
        self._differentiable: list[bool] = []  # of the outputs
        self._is_looked_at = False  # see first_look.py

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
                self._kept.note()
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
                outputs = self._with_graph(inputs, num_samples) if needs_backward else self.run(inputs)
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
        self._hold = Holding()
        with run.gpu.unmetered():  # what takes their place is there once for all
            for graph in self._graphs:
                graph.forget_inputs(self.away.which)

    @property
    def _keep(self) -> bool:
        return self.runner.plan.activation is Activation.KEEP

    @property
    def _activation(self) -> Activation:
        """Where the plan has no bytes for what a rule would hold, there is no rule."""
        if self._keep or self.runner.held_rule(self.call) is not None:
            return self.runner.plan.activation
        return Activation.RECOMPUTE

    def _with_graph(self, inputs: list[Tensor], num_samples: int) -> list[Tensor]:
        """Runs one micro-batch so that backward can follow. See [Note: recomputation]."""
        run, again = self.runner.run, self._from_its_graph()
        compiled = self._compiled_forward(inputs, num_samples)
        self._now, self._is_compiled = inputs, compiled is not None
        with torch.enable_grad():
            if compiled is not None:
                try:
                    return self._compiled(inputs, compiled)
                except NotCompiled:  # the user has been told
                    self._is_compiled = False
                gc.collect()  # the failed attempt's frames hold tensors
            if self._keep:
                with outlive_slots(run.chunks, self._hold, self.away_now(), again):
                    return self.run(inputs)
            stops_early = self.runner.index not in run.probed.replays_whole
            made: list[Tensor] = Recomputed(lambda: again().run_or_replay(), *self._contexts(), stops_early).forward()
            return made

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Of forward and of recomputation."""
        rule = self.runner.held_rule(self.call)
        return (nullcontext(), nullcontext()) if rule is None else HeldResults(rule, self._hold).contexts()

    def _from_its_graph(self) -> Callable[[], BlockCall]:
        """What an inner graph calls to get to this object, which owns it and must not be owned by it."""
        owner, name = weakref.ref(self), self.runner.spec.name

        def call() -> BlockCall:
            found = owner()
            if found is None or not found._is_running:
                raise Refused(TAKEN_OUT.format(name=name))
            return found

        return call

    def _compiled_forward(self, inputs: list[Tensor], num_samples: int) -> Callable[..., Any] | None:
        """None: eager. A smaller last micro-batch is not worth a compilation of its own."""
        if num_samples != self.bounds[0][1] or self.runner.run.looks.keeps(self.runner.index):
            return None
        if self.runner.tiled_parts(self.call):
            return None
        shapes = tuple(tensor.shape for tensor in inputs)
        return self.runner.run.compiled.forward_of(self.runner.original, self._activation, shapes)

    def _compiled(self, inputs: list[Tensor], forward: Callable[..., Any]) -> list[Tensor]:
        run, again = self.runner.run, self._from_its_graph()
        hooks = outlive_slots(run.chunks, self._hold, self.away_now(), again)
        with run.gpu.unmetered(), hooks:
            outputs = self.run(inputs, forward)
        run.adopt(outputs, "activations")
        return outputs

    def away_now(self) -> list[Tensor]:
        """Of the present micro-batch's inputs, those that wait on host."""
        return self.away.of(self._now)

    def tried(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """`run` beside the run that counts. Users' hooks are aside."""
        has_run, self._has_run = self._has_run, False  # the first run of a call is not counted
        try:
            return self.run(inputs)
        finally:
            self._has_run = has_run

    def run(self, inputs: Sequence[Tensor], forward: Callable[..., Any] | None = None) -> list[Tensor]:
        """Runs the block on one micro-batch; returns the tensors of its result."""
        args, kwargs = self.frame.arguments(inputs)
        runner, hooks = self.runner, self._hooks_to_count(forward is not None)
        tiled, taps, tapped = runner.tiled_parts(self.call), runner.taps, NOT_TAPPED
        whole = forward or runner.original
        forward = by_tiles(self.module, whole) if BLOCK in tiled else partial(whole, self.module)
        if hooks is None and not tiled and not taps:  # of nearly all blocks
            result = runner.run.caches.call(self.module, forward, *args, **kwargs)
        else:
            with (
                nullcontext() if hooks is None else hooks.counted(),
                nullcontext() if BLOCK in tiled else tiling(self.module, tiled),
                tapping(self.module, taps) as tapped,
            ):
                result = runner.run.caches.call(self.module, forward, *args, **kwargs)
        if (
            self._is_looked_at
            and self.runner.index not in self.runner.run.probed.returned
            and self.frame.are_changed(inputs, args, kwargs)
        ):
            raise Refused(
                f"the block {self.runner.spec.name!r} changes a list or dict that it is called with, which gets lost: "
                "it is given a copy. Return what it adds instead"
            )
        self._tapped = tapped.parts
        return self.frame.note_result(result) + tapped.tensors

    def _hooks_to_count(self, is_compiled: bool) -> InnerHooks | None:
        """The first run is that of plain PyTorch. Those of a compiled block cannot be counted."""
        is_first, self._has_run = not self._has_run, True
        if is_first or is_compiled:
            return None
        hooks = self.runner.run.inner_hooks.get(self.runner.index)
        return hooks if hooks is not None and hooks.are_there else None

    def sliced(self, tensors: Sequence[Tensor], start: int, num_samples: int, with_grad: bool = False) -> list[Tensor]:
        if len(self.bounds) > 1:
            tensors = [
                narrow(tensor, dim, start, num_samples) for tensor, dim in zip(tensors, self._inputs, strict=True)
            ]
        parts = [tensor.detach() for tensor in tensors]
        if with_grad:
            for part, requires_grad in zip(parts, self.requires_grad, strict=True):
                part.requires_grad_(requires_grad)
        return parts

    # -- backward -------------------------------------------------------------------------------------------------

    @property
    def is_spent(self) -> bool:
        """Its one backward has begun."""
        return self._spent

    def backward(
        self, here: Sequence[Tensor], grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """`here`: the inputs that waited on the GPU; `wanted`: which inputs need a gradient."""
        if self._spent:  # with retain_graph=True autograd itself lets it pass
            raise Refused(FREED)
        self._spent = True
        run = self.runner.run
        self.runner.check_plan(self.module)
        self.runner.check_parameters()
        self.runner.check_version(self._version)
        if not self._keep and self._before is None:
            self._kept.look(any(graph.compiled for graph in self._graphs or ()))
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
                        graph.backward(roots, wanted, accumulate)
                    self._now = []
                for index, want in enumerate(wanted):
                    if want:
                        summed[index].add(graph.take_grad(index), start, num_samples)
                del graph, roots
            found = [total.value if want else None for total, want in zip(summed, wanted, strict=True)]
            del tensors, summed  # inputs go before gradients leave, which may wait where they lay
            self.away.release(run.stashes)
        self._graphs = self._before = None
        self._kept.forget()
        return found

    def run_or_replay(self) -> list[Tensor]:
        """In forward, and again in backward. See [Note: replays]. What backward itself changes, by a hook, stays."""
        if self._before is None:
            with self._kept.as_then():
                return self.run(self._now)
        gpu = self.runner.run.gpu
        with gpu.unmetered():
            now = ModuleState(self.module, shared_random=True, hooks=True)
            self._before.restore()
        try:
            return self.run(self._now)
        finally:
            with gpu.unmetered():
                now.restore()


class BlockFunction(torch.autograd.Function):
    """See [Note: the block function]."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, anchor: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call.forward(tensors, any(ctx.needs_input_grad))
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*(tensor for tensor, away in zip(tensors, call.away.which, strict=True) if not away))
        ctx.mark_non_differentiable(*call.not_differentiable(outputs))
        return tuple(outputs)

    @staticmethod
    @once(lambda ctx: ctx.call.runner.will_accumulate())
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        here = ctx.saved_tensors  # raises if this is the second backward
        with deferred:
            return None, None, *ctx.call.backward(here, grads, ctx.needs_input_grad[2:])
