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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hightide.ir.action import Op
from hightide.ir.activation import Activation
from hightide.ir.block import Selective
from hightide.ir.plan import Update
from hightide.ir.refusal import Refused
from hightide.ir.tier import Tier
from hightide.process.interrupts import deferred, safe_point
from hightide.profiler.model.call_tree import flatten, flatten_call, mode_of, narrow, signature_of, unflatten
from hightide.profiler.model.probe_record import is_changed
from hightide.profiler.model.taps import Tap, hand_out, tapping
from hightide.profiler.trial.state import Snapshot
from hightide.runtime.blocks.activations import FREED, Stash
from hightide.runtime.blocks.compiled import NotCompiled
from hightide.runtime.blocks.held import Held, Holding, outlive_slots
from hightide.runtime.blocks.micro_batches import Gathered, Graph, InputGradient, divided
from hightide.runtime.blocks.recomputation import Recomputed
from hightide.runtime.blocks.selective import HeldResults
from hightide.runtime.guards.transforms import once

if TYPE_CHECKING:
    from hightide.runtime.run import Run


TAKEN_OUT = (
    "a gradient came into the middle of the block {name!r}: a tensor that was made inside of it is part of the loss, "
    "kept by a forward hook that was registered after hightide.wrap, or by what a hook has computed. It belongs to one "
    "micro-batch, and its gradient would be lost. Register the hook before hightide.wrap and let it keep the module's "
    "output itself, return the tensor from the block's forward, or keep it.detach()"
)


class BlockRunner:
    """How one block executes."""

    def __init__(self, run: Run, index: int, original: Callable[..., Any]) -> None:
        self.run = run
        self.index = index
        self.original = original  # the class's own forward
        self.spec = run.profile.blocks[index]
        self.plan = run.plan.blocks[index]
        self.trainable = any(run.gradients.is_trainable(chunk) for chunk in run.chunks.by_block[index])
        self.inside: list[nn.Module] = []  # the block's modules, since its first call

    def held_rule(self, call: int | None) -> Selective | None:
        """What is held of a call under Activation.SELECTIVE. None: nothing, as of calls that the plan did not
        foresee."""
        if call is None or self.plan.activation is not Activation.SELECTIVE:
            return None
        return self.run.profile.calls[call].selective

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.run.probing:
            return self.original(module, *args, **kwargs)
        with deferred:
            self.run.ensure_pass(self.index)
            if not torch.is_grad_enabled():
                return self._without_grad(module, args, kwargs)
            return self.with_grad(module, args, kwargs)

    def _without_grad(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Unsplit: splitting would break what callers keep between calls, such as the cache of `generate`."""
        with self.run.tick(Op.FORWARD, self.index), self.run.autocast().restored():
            return self.original(module, *args, **kwargs)

    def with_grad(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check_parameters()
        self.inside = self.inside or list(module.modules())
        call = BlockCall(self, module, args, kwargs)
        outputs = BlockFunction.apply(call, self.anchor, *call.tensors())
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
        return sum(self.run.performer.num_updates[chunk] for chunk in self.run.chunks.by_block[self.index])

    def check_plan(self, module: nn.Module) -> None:
        if self.run.runners.get(id(module)) is not self:
            raise Refused(
                f"the plan was changed after the forward of block {self.spec.name!r}, and what its backward or its "
                "logits need is gone with the old one; run the model's forward again"
            )

    def check_parameters(self) -> None:
        if (unchanged := self.run.unchanged.get(self.index)) is not None:
            unchanged.check()

    def will_accumulate(self) -> bool:
        return self.trainable and self.run.anchor.is_reached()


def refilled(container: Any, result: Any) -> Any:
    """A list or dict that a block fills and returns: its caller may know it by the name that it had before."""
    if type(container) is not type(result):
        return result
    container.clear()
    container.extend(result) if isinstance(container, list) else container.update(result)
    return container


class BlockCall:
    """One call of one block, from its forward to its backward."""

    def __init__(self, runner: BlockRunner, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.runner = runner
        self.module = module
        leaves, self._tree = flatten_call(args, kwargs)
        self._positions = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._tensors: list[Tensor] | None = [leaves[at] for at in self._positions]
        for at in self._positions:
            leaves[at] = None  # this object lives as long as the graph and must not keep tensors alive
        self._leaves = leaves
        self.call: int | None = None  # set by forward
        self._version = runner.version
        self.stash: Stash | None = None
        self.requires_grad = [tensor.requires_grad for tensor in self._tensors]
        self.on_host: list[bool] = [False] * len(self._tensors)  # which inputs wait for backward on host
        self._orders: list[tuple[int, ...] | None] = [None] * len(self._tensors)  # of their dimensions in memory
        self._hold = Holding()
        self._graphs: list[Graph] | None = None
        self._is_compiled = False  # the present micro-batch
        self._now: list[Tensor] = []  # the inputs of the micro-batch that a recomputation is about
        self._spent = False  # its one backward has begun
        self._is_running = False  # its forward or its backward
        self._has_run = False
        self.autocast = runner.run.autocast()
        self.signature = signature_of(self._merged(self._tensors), self._tree, mode_of(runner.inside))
        split = runner.run.split_of(runner.index, self.signature)
        self.bounds, self._inputs, self.output_dims = divided(split, self._tensors, runner.run.plan.micro_batch)
        self._draws = runner.run.draws(runner.index, len(self.bounds))
        self._before: Snapshot | None = None  # what the block kept, if its forward changes it and is run again
        self._differentiable: list[bool] = []  # of the outputs
        self._is_looked_at = False  # see first_look.py

    def tensors(self) -> list[Tensor]:
        tensors, self._tensors = self._tensors, None
        assert tensors is not None
        return tensors

    def assemble(self, outputs: list[Tensor]) -> Any:
        """The block's result as its caller expects it. What was tapped goes its own way."""
        leaves = list(self._out_leaves)
        num_results = len(self._out_positions)
        for at, output in zip(self._out_positions, outputs[:num_results], strict=True):
            leaves[at] = output
        hand_out(self.module, self._tapped, outputs[num_results:])
        return unflatten(leaves, self._out_tree)

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(self, tensors: Sequence[Tensor], needs_backward: bool) -> list[Tensor]:
        run = self.runner.run
        with run.tick(Op.FORWARD, self.runner.index) as tick, self._running():
            self.call = tick.call
            if needs_backward:
                tensors = self._choose_away(tensors)
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
            held = self._hold.leaving()
            if any(self.on_host) or held:
                self._register_stash(tensors, held)
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
        split = self.runner.run.never_split(self.runner.index, self.signature, reason)
        self.bounds, self._inputs, self.output_dims = divided(split, [None] * len(self._inputs), 1)
        self._draws = self.runner.run.draws(self.runner.index, 1)

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

    def _choose_away(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Inputs that carry gradients wait on host, or on disk. The rest (masks, positions) are shared and stay; so
        does everything that the plan did not foresee. What comes back lies in memory as it did: dropout fills memory in
        its order. Of several micro-batches it is contiguous, so it leaves so."""
        if self.runner.plan.inputs is Tier.GPU or self.call is None:
            return tensors
        self.on_host = list(self.requires_grad)
        tensors = [
            tensor.resolve_conj().resolve_neg() if away else tensor  # what no byte says does not leave
            for tensor, away in zip(tensors, self.on_host, strict=True)
        ]
        if len(self.bounds) == 1:
            self._orders = [_order_in_memory(tensor) for tensor in tensors]
        return [
            tensor if not away or self._orders[index] else tensor.contiguous()
            for index, (tensor, away) in enumerate(zip(tensors, self.on_host, strict=True))
        ]

    def _holding(self, tensors: Sequence[Tensor]) -> Holding:
        """Of what the block computes. See [Note: what leaves]."""
        if self.runner.plan.held is not Tier.HOST or self.call is None:
            return Holding()
        run = self.runner.run
        staying = [*tensors, *self.module.parameters(), *self.module.buffers(), *run.chunks.loose_params()]
        return Holding(run.gpu.device, staying)

    def _register_stash(self, tensors: Sequence[Tensor], held: Sequence[Held]) -> None:
        assert self.call is not None and self._graphs is not None
        leaving = [(tensor, self._orders[at]) for at, tensor in enumerate(tensors) if self.on_host[at]]
        away = [tensor if order is None else tensor.permute(order) for tensor, order in leaving]
        on_disk = self.runner.plan.inputs is Tier.DISK
        self.stash = self.runner.run.stashes.register(self.call, away, held, on_disk)
        self._hold = Holding()
        with self.runner.run.gpu.unmetered():  # what takes their place is there once for all
            for graph in self._graphs:
                graph.forget_inputs(self.on_host)

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
                with outlive_slots(run.chunks, self._hold, self.away_now(), lambda: again().away_now):
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
        home, name = weakref.ref(self), self.runner.spec.name

        def call() -> BlockCall:
            found = home()
            if found is None or not found._is_running:
                raise Refused(TAKEN_OUT.format(name=name))
            return found

        return call

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _compiled_forward(self, inputs: list[Tensor], num_samples: int) -> Callable[..., Any] | None:
        """None: eager. A smaller last micro-batch is not worth a compilation of its own."""
        if num_samples != self.bounds[0][1] or self.runner.run.looks.keeps(self.runner.index):
            return None
        shapes = tuple(tensor.shape for tensor in inputs)
        return self.runner.run.compiled.forward_of(self.runner.original, self._activation, shapes)

    def _compiled(self, inputs: list[Tensor], forward: Callable[..., Any]) -> list[Tensor]:
        run, again = self.runner.run, self._from_its_graph()
        hooks = outlive_slots(run.chunks, self._hold, self.away_now(), lambda: again().away_now)
        with run.gpu.unmetered(), hooks:
            outputs = self.run(inputs, forward)
        run.adopt(outputs, "activations")
        return outputs

    def away_now(self) -> list[Tensor]:
        """Of the present micro-batch's inputs, those that wait on host."""
        return [tensor for tensor, on_host in zip(self._now, self.on_host, strict=True) if on_host]

    def tried(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """`run` beside the run that counts. Users' hooks are aside."""
        has_run, self._has_run = self._has_run, False  # the first run of a call is not counted
        try:
            return self.run(inputs)
        finally:
            self._has_run = has_run

    def run(self, inputs: Sequence[Tensor], forward: Callable[..., Any] | None = None) -> list[Tensor]:
        """Runs the block on one micro-batch; returns the tensors of its result."""
        args, kwargs = unflatten(self._merged(inputs), self._tree)
        with self._hooks_counted(forward is not None), tapping(self.module, self.runner.taps) as tapped:
            forward = partial(forward or self.runner.original, self.module)
            result = self.runner.run.caches.call(self.module, forward, *args, **kwargs)
        if (
            self._is_looked_at
            and self.runner.index not in self.runner.run.probed.returned
            and is_changed(self._merged(inputs), flatten_call(args, kwargs)[0])
        ):
            raise Refused(
                f"the block {self.runner.spec.name!r} changes a list or dict that it is called with, which gets lost: "
                "it is given a copy. Return what it adds instead"
            )
        leaves, tree = flatten(result)
        self._out_tree = tree
        self._out_positions = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        outputs = [leaves[at] for at in self._out_positions]
        self._out_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._tapped = tapped.parts
        return outputs + tapped.tensors

    def _hooks_counted(self, is_compiled: bool) -> AbstractContextManager[None]:
        """The first run is that of plain PyTorch. Those of a compiled block cannot be counted."""
        is_first, self._has_run = not self._has_run, True
        hooks = self.runner.run.inner_hooks.get(self.runner.index)
        return nullcontext() if is_first or is_compiled or hooks is None else hooks.counted()

    @property
    def numbers(self) -> tuple[Any, ...]:
        """Of the arguments."""
        return tuple(leaf for leaf in self._leaves if isinstance(leaf, int | float))

    def _merged(self, tensors: Sequence[Tensor]) -> list[Any]:
        leaves = list(self._leaves)
        for at, tensor in zip(self._positions, tensors, strict=True):
            leaves[at] = tensor
        return leaves

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
        if run.plan.update is Update.DEFERRED and self.runner.version != self._version:
            raise Refused(
                f"the parameters of block {self.runner.spec.name!r} were updated between its forward and its backward: "
                "the gradient would be that of other weights. Call backward() before optimizer.step()."
            )
        accumulate = self.runner.will_accumulate()
        run.queue_end_of_backward()
        run.adopt([grad for grad in grads if grad is not None], "activations")
        with run.tick(Op.BACKWARD, self.runner.index, self.call, accumulate), self._running():
            tensors = self._inputs_back(here)
            summed = [
                InputGradient(tensor, dim, len(self.bounds)) for tensor, dim in zip(tensors, self._inputs, strict=True)
            ]
            for number, (start, num_samples) in enumerate(self.bounds):
                safe_point()
                assert self._graphs is not None
                graph, self._graphs[number] = self._graphs[number], None  # type: ignore[call-overload]
                roots = graph.roots(self._slice_grads(grads, number, start, num_samples))
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
            if self.stash is not None:  # before gradients leave, which may wait where it lay
                run.stashes.release(self.stash)
        self._graphs = None
        return [total.value if want else None for total, want in zip(summed, wanted, strict=True)]

    def run_or_replay(self) -> list[Tensor]:
        """In forward, and again in backward. See [Note: replays]. What backward itself changes, by a hook, stays."""
        if self._before is None:
            return self.run(self._now)
        gpu = self.runner.run.gpu
        with gpu.unmetered():
            now = Snapshot(self.module, shared_random=True, hooks=True)
            self._before.restore()
        try:
            return self.run(self._now)
        finally:
            with gpu.unmetered():
                now.restore()

    def _inputs_back(self, here: Sequence[Tensor]) -> list[Tensor]:
        staying = iter(here)
        away = iter(self.runner.run.stashes.consume(self.stash) if self.stash is not None else ())
        return [
            _in_order(next(away), order) if on_host else next(staying)
            for on_host, order in zip(self.on_host, self._orders, strict=True)
        ]

    def _slice_grads(
        self, grads: Sequence[Tensor | None], number: int, start: int, num_samples: int
    ) -> list[Tensor | None]:
        """The outputs' gradients for one micro-batch. An output without batch dimension takes its own in the first
        only."""
        if len(self.bounds) == 1:
            return list(grads)
        parts: list[Tensor | None] = []
        for grad, dim in zip(grads, self.output_dims or [None] * len(grads), strict=True):
            if grad is None or (dim is None and number > 0):
                parts.append(None)
            else:
                parts.append(narrow(grad, dim, start, num_samples))
        return parts


class BlockFunction(torch.autograd.Function):
    """See [Note: the block function]."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, anchor: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call.forward(tensors, any(ctx.needs_input_grad))
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*(tensor for tensor, away in zip(tensors, call.on_host, strict=True) if not away))
        ctx.mark_non_differentiable(*call.not_differentiable(outputs))
        return tuple(outputs)

    @staticmethod
    @once(lambda ctx: ctx.call.runner.will_accumulate())
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        here = ctx.saved_tensors  # raises if this is the second backward
        with deferred:
            return None, None, *ctx.call.backward(here, grads, ctx.needs_input_grad[2:])


def _order_in_memory(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor is contiguous; None: as it is, or in none."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return order if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else None


def _in_order(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Back from the order in memory."""
    if order is None:
        return tensor
    return tensor.permute(sorted(range(len(order)), key=order.__getitem__))
