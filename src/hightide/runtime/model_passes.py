"""The model's passes: what happens between a call of the model and the end of its backward."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hightide.ir.action import Mode, Op
from hightide.ir.plan import Update
from hightide.process.interrupts import Hold, deferred, safe_point, uninterrupted
from hightide.profiler.model.batch_sizes import BatchSizes
from hightide.profiler.model.call_tree import Arguments, flatten_call, tensors
from hightide.profiler.model.samples import num_samples as samples_in
from hightide.profiler.model.samples import shapes
from hightide.runtime.blocks import rng
from hightide.runtime.blocks.batch import CpuCopies, copy_to, map_tensors
from hightide.runtime.guards.transforms import refuse_transforms
from hightide.runtime.observer import Start, is_short, watched_pass
from hightide.runtime.run_context import AroundCall
from hightide.runtime.schedule.executor import Tick
from hightide.runtime.several_graphs import SeveralGraphs
from hightide.runtime.step_work import Computed
from hightide.stores.store import OutOfMemory

if TYPE_CHECKING:
    from hightide.runtime.run import Run

NUM_EVALUATIONS = 4  # of one batch, at most: what it needs is known as far as it got


class ModelPasses:
    def __init__(self, run: Run, check_call: Callable[[Mapping[str, Any]], None], around_call: AroundCall) -> None:
        """`check_call` raises for arguments under which training through blocks would be wrong."""
        self._run = run
        self._check_call, self._around_call = check_call, around_call
        self.batch: Arguments | None = None  # of the model's call that is under way
        self.cpu_copies = CpuCopies()  # of this batch
        self.is_whole_batch = False  # the latest
        self._num_samples: int | None = None  # of the batch of the next pass, if it can be told
        self._checked_samples: int | None = None  # the same, if it is shaped as the profiled one
        self._is_inside = False  # the model's own forward is under way
        self._seed = b""
        self._nth_call: Counter[int] = Counter()
        self.graphs = SeveralGraphs(run)
        self._end_queued = False
        self._backward = Hold(is_over=lambda: torch._C._current_graph_task_id() < 0)

    # -- the model's own forward ----------------------------------------------------------------------------------

    def forward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See [Note: interrupts]: the model's own code, too, is only interrupted where a block begins or a part of
        it."""
        run = self._run
        with deferred:
            if run.splits.is_probing or self._is_inside:
                return original(*args, **kwargs)
            if not torch.is_grad_enabled():
                return self._evaluate(original, args, kwargs)
            original = partial(run.caches.call, run.model, original)
            self._check_call(kwargs)
            run.executor.promises.check_forward()  # else a larger batch would be planned for before it is refused
            if not run.executor.has_open_forward:
                self.graphs.plan_for_all()
            self._check_batch(Arguments(args, kwargs))
            if run.executor.has_open_forward:
                self.graphs.make_room(self._num_samples)
            if run.observer is not None and run.observer.is_watching and not run.executor.has_open_forward:
                return watched_pass(run, run.observer, original, args, kwargs)
            return self.run_pass(Mode.TRAIN, original, args, kwargs)

    def _evaluate(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See [Note: larger batches]. What has filled a cache halfway is not begun again."""
        run = self._run
        if run.admission is None or BatchSizes.objects_in(args, kwargs):
            return self.run_pass(Mode.EVAL, original, args, kwargs)
        start = Start(run)
        for _ in range(NUM_EVALUATIONS - 1):
            try:
                return self.run_pass(Mode.EVAL, original, args, kwargs)
            except OutOfMemory as error:
                if not is_short(error) or not start.can_repeat:
                    raise
                shortage = error.with_traceback(None)  # its frames hold tensors
            run.executor.abandon()
            gc.collect()
            run.admission.make_room(shortage, BatchSizes.of(Arguments(args, kwargs), run.probed.samples))
            start.restore()
        return self.run_pass(Mode.EVAL, original, args, kwargs)

    def run_pass(self, mode: Mode, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.begin(mode)
        self._is_inside = True
        try:
            safe_point()
            args, kwargs = self._moved(args, kwargs)
            self.batch = Arguments(args, kwargs)
            self._run.executor.start()
            with self._run.gpu.meter("activations"), self._around_call(args, kwargs):
                return original(*args, **kwargs)
        except OutOfMemory as error:
            if mode is not Mode.EVAL:
                self.graphs.explain(error)
            raise
        finally:
            self._is_inside = False
            self.batch = None
            self.cpu_copies.clear()

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The batch on the accelerator: a copy that dies with the pass, as of `.to(device)`, so that batches which
        the user keeps in host memory do not count."""
        gpu, moved = self._run.gpu, dict[int, Tensor]()

        def move(value: Tensor) -> Tensor:
            if gpu.holds(value):
                return value
            if id(value) not in moved:  # labels are often the input ids themselves
                moved[id(value)] = copy_to(value, gpu.device)
                if value.device.type == "cpu" and self._run.chunks.tables:
                    with gpu.unmetered():
                        self.cpu_copies.note(moved[id(value)], value)
            return moved[id(value)]

        with gpu.meter("batch"):
            args, kwargs = map_tensors((args, kwargs), move)
        self._run.adopt(tensors(flatten_call(args, kwargs)[0]), "batch")
        return args, kwargs

    def _check_batch(self, batch: Arguments) -> None:
        if self._run.batches is not None and self._run.admission is not None:
            sizes = self._run.batches.sizes_of(batch, self._run.probed.samples)
            if self._run.begins_forward(not self._run.batches.hold(sizes)):
                self._run.admission.admit(batch, sizes)
        probed, most = self._run.probed, self._run.plan.num_samples
        num_samples = self._num_samples = samples_in(batch, probed.samples)
        self._checked_samples = num_samples if shapes(batch, probed.samples) == probed.shapes else None
        self.is_whole_batch = self._checked_samples == most

    def begin(self, mode: Mode) -> None:
        run = self._run
        self._backward.end()
        refuse_transforms(mode is not Mode.EVAL)
        run.executor.promises.check_forward()
        run.check_values()
        run.chunks.binding.check_loose()
        if run.between_passes is not None:
            run.between_passes()
        are_several = run.executor.has_open_forward
        run.executor.begin(mode)
        if mode is not Mode.EVAL:
            run.num_passes += 1
            run.looks.begin_pass()
            if torch._C._current_graph_task_id() < 0:  # else a checkpoint repeats a part of the latest
                self.graphs.begin_pass(are_several, self._num_samples)
                self._seed = rng.pass_seed(run.num_passes)
                self._nth_call.clear()
            self.graphs.open_calls.clear()
            self._end_queued = False
            run.work.begin_pass(self._work_of_pass())
            run.anchor.begin_pass(run.gradients.of_parameters_here)

    def _work_of_pass(self) -> Computed | None:
        """None: a part of the model is called, or a batch that nobody has profiled."""
        num_samples, self._checked_samples = self._checked_samples, None
        autocast = self._run.autocast()
        dtype = str(autocast.dtype).removeprefix("torch.") if autocast.enabled else ""
        return None if num_samples is None else Computed(num_samples, dtype)

    @property
    def awaits_backward(self) -> bool:
        """Whether somebody still has the graph of a forward whose backward has not begun."""
        if not self._run.executor.has_open_forward:
            return False
        gc.collect()
        return len(self.graphs.open_calls) > 0

    def _ran_out(self, error: OutOfMemory) -> None:
        """In backward."""
        if not self.graphs.explain(error) and self._run.observer is not None:
            self._run.observer.ran_out(error)

    # -- its blocks -----------------------------------------------------------------------------------------------

    def ensure(self, block: int) -> None:
        """A block that is called without the whole model (`model.model(...)`) still needs a pass to run in."""
        if not self._is_inside:
            mode = Mode.TRAIN if torch.is_grad_enabled() else Mode.EVAL
            if not self._run.executor.expects(mode, block):
                self.begin(mode)
                self._run.executor.start()

    @contextmanager
    def tick(self, op: Op, block: int, call: int | None = None, accumulate: bool = False) -> Iterator[Tick]:
        executor, observer = self._run.executor, self._run.observer
        with deferred:
            try:
                safe_point()
                is_frozen = op is Op.BACKWARD and not accumulate
                if is_frozen and self._run.watchman is not None and self._run.anchor.is_reached():
                    executor.begin_backward()  # others may add where this rank passes over
                tick = executor.enter(op, block, call, accumulate)
                if observer is not None:
                    observer.begin_tick(op)
                with self._run.gpu.meter("activations"):
                    yield tick
                if observer is not None:
                    observer.end_tick(op, tick.call)
                executor.leave(tick)
            except BaseException as error:
                if self._run.watchman is not None:  # the others wait for what this rank will not do
                    self._run.watchman.fail(error)
                executor.abandon()
                if op is Op.BACKWARD and isinstance(error, OutOfMemory):
                    self._ran_out(error)
                self._backward.end()
                raise

    def draws(self, block: int, num_micro_batches: int) -> rng.Draws:
        """See [Note: dropout in a checkpoint]."""
        num_calls, again = self._nth_call[block], torch._C._current_graph_task_id() >= 0
        if not again:
            self._nth_call[block] += 1
        is_known = not again or (num_calls == 1 and not self.graphs.are_alive)
        name = "" if is_known else self._run.profile.blocks[block].name
        nth_call = 0 if again else num_calls
        return rng.Draws(self._seed, block, nth_call, num_micro_batches, self._run.gpu.device, name)

    # -- its backward ---------------------------------------------------------------------------------------------

    def queue_end_of_backward(self) -> None:
        if not self._end_queued:
            self._end_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            if self._run.plan.update is Update.IN_BACKWARD:  # half of the updates would be half a step
                self._backward.begin()

    def _end_backward(self) -> None:
        with uninterrupted:
            self._end_queued = False
            if self._run.executor.finish_backward():
                self._run.keep_alike()
            self._run.work.end_backward()
        self._backward.end()
