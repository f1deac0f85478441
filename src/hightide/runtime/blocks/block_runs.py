"""A block, run on one micro-batch of a call: without a graph, with one that is kept or made again, or compiled.

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
from torch.autograd.graph import saved_tensors_hooks

from hightide.ir.activation import Activation
from hightide.ir.refusal import Refused
from hightide.profiler.model.call_tree import mode_of, narrow
from hightide.profiler.needs.token_tiles import BLOCK, by_tiles, tiling
from hightide.profiler.probe.taps import Tapped, tapping
from hightide.profiler.trial.state import ModuleState
from hightide.runtime.blocks.call_frame import CallFrame
from hightide.runtime.blocks.changes_since_forward import ChangesSinceForward
from hightide.runtime.blocks.compiled import NotCompiled
from hightide.runtime.blocks.micro_batches import divided
from hightide.runtime.blocks.recomputation import Recomputed
from hightide.runtime.guards.contents import ObjectContents
from hightide.runtime.guards.inner_hooks import InnerHooks
from hightide.runtime.guards.unseen import refuse_unseen
from hightide.runtime.waiting.held import Holding, outlive_slots
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


class BlockRuns:
    """The runs of one call of one block."""

    def __init__(
        self,
        runner: BlockRunner,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        contents: ObjectContents | None,
    ) -> None:
        self.runner = runner
        self.module = module
        self.frame = CallFrame(args, kwargs, mode_of(runner.inside))
        self.signature, tensors = self.frame.signature, self.frame.tensors
        self.call: int | None = None  # set by forward
        self.requires_grad = [tensor.requires_grad for tensor in tensors]
        self.away = InputsAway(len(tensors))
        self._hold = Holding()
        self._is_compiled = False  # the present micro-batch
        self._now: list[Tensor] = []  # the inputs of the micro-batch that a recomputation is about
        self.is_running = False  # its forward or its backward
        self._has_run = False
        split = runner.run.splits.of(runner.index, self.signature)
        self.bounds, self._inputs, self.output_dims = divided(split, tensors, runner.run.plan.micro_batch)
        self._before: ModuleState | None = None  # what the block kept, if its forward changes it and is run again
        self._changes = ChangesSinceForward(runner, contents)  # else
        self._is_looked_at = False  # see first_look.py

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
        run = self.runner.run
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
                with self._hooks():
                    return self.run(inputs)
            stops_early = self.runner.index not in run.probed.replays_whole
            again = self._from_its_graph()
            made: list[Tensor] = Recomputed(lambda: again().run_or_replay(), *self._contexts(), stops_early).forward()
            return made

    def _without_graph(self, inputs: list[Tensor]) -> list[Tensor]:
        """Of what needs no gradient, as far as autograd knows. See [Note: gradients by another way]."""
        with torch.enable_grad():  # as the user has it
            outputs = self.run(inputs)
        refuse_unseen(self.runner.spec.name, outputs)
        return outputs

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Of forward and of recomputation."""
        rule = self.runner.held_rule(self.call)
        return (nullcontext(), nullcontext()) if rule is None else HeldResults(rule, self._hold).contexts()

    def _from_its_graph(self) -> Callable[[], BlockRuns]:
        """What an inner graph calls to get to this object, which owns it and must not be owned by it."""
        owner, taken_out = weakref.ref(self), self._taken_out()

        def call() -> BlockRuns:
            found = owner()
            if found is None or not found.is_running:
                raise taken_out()
            return found

        return call

    def _hooks(self) -> saved_tensors_hooks:
        """For tensors that a graph keeps."""
        return outlive_slots(self.runner.run.chunks, self._hold, self.away_now(), weakref.ref(self), self._taken_out())

    def _taken_out(self) -> Callable[[], Exception]:
        name = self.runner.spec.name
        return lambda: Refused(TAKEN_OUT.format(name=name))

    def _compiled_forward(self, inputs: list[Tensor], num_samples: int) -> Callable[..., Any] | None:
        """None: eager. A smaller last micro-batch is not worth a compilation of its own."""
        if num_samples != self.bounds[0][1] or self.runner.run.looks.keeps(self.runner.index):
            return None
        if self.runner.tiled_parts(self.call):
            return None
        shapes = tuple(tensor.shape for tensor in inputs)
        return self.runner.run.compiled.forward_of(self.runner.original, self._activation, shapes)

    def _compiled(self, inputs: list[Tensor], forward: Callable[..., Any]) -> list[Tensor]:
        run = self.runner.run
        with run.gpu.unmetered(), self._hooks():
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

    def run_or_replay(self) -> list[Tensor]:
        """In forward, and again in backward. See [Note: replays]. What backward itself changes, by a hook, stays."""
        if self._before is None:
            with self._changes.as_then():
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
