"""Everything that hightide keeps for one wrapped model, and what the model's swapped classes call."""

from __future__ import annotations

import ctypes
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from hightide.ir.action import Mode, Op
from hightide.ir.block import ModelProfile
from hightide.ir.chunk import DISK_REGION_BYTES
from hightide.ir.limits import DiskLimit
from hightide.ir.machine import MatmulRates
from hightide.ir.plan import Forecast, Update
from hightide.ir.refusal import Refused, RefusedArgument
from hightide.ir.split import Split
from hightide.ir.tier import Tier
from hightide.ir.units import format_bytes
from hightide.planner.predict.peaks import peaks, reserved_bytes
from hightide.planner.solution import Searched, Solution
from hightide.process.forks import Birthplace
from hightide.process.interrupts import Hold, deferred, held, safe_point
from hightide.process.progress import tell
from hightide.profiler.model.call_tree import Arguments, flatten_call, tensors
from hightide.profiler.model.probe import ProbeResult, probe
from hightide.profiler.model.samples import num_samples as samples_in
from hightide.profiler.model.samples import shapes
from hightide.profiler.switches.caches import Caches
from hightide.runtime.before import Before
from hightide.runtime.blocks import rng
from hightide.runtime.blocks.activations import Stashes
from hightide.runtime.blocks.autocast import Autocast
from hightide.runtime.blocks.batch import CpuCopies, copy_to, map_tensors
from hightide.runtime.blocks.block_function import BlockRunner
from hightide.runtime.blocks.compiled import CompiledForwards
from hightide.runtime.blocks.host_embedding import HostEmbedding
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.disk_homes import mapped
from hightide.runtime.chunks.moving import StatesOnTheMove
from hightide.runtime.chunks.origin import FirstValues
from hightide.runtime.gradients.gradient_placeholder import GradientPlaceholder
from hightide.runtime.gradients.gradients import Gradients
from hightide.runtime.guards.anchor import Anchor
from hightide.runtime.guards.first_look import FirstLooks
from hightide.runtime.guards.inner_hooks import InnerHooks
from hightide.runtime.guards.transforms import refuse_transforms
from hightide.runtime.guards.unchanged import Unchanged
from hightide.runtime.lanes.lanes import Lanes
from hightide.runtime.observer import Observer, watched_pass
from hightide.runtime.saving.copy_on_update import NUM_STAGED, CopyOnUpdate
from hightide.runtime.saving.snapshot import Snapshot
from hightide.runtime.saving.tiles import SMALL_TILE_BYTES, TILE_BYTES, Wanted, tiles_of
from hightide.runtime.saving.written import Written
from hightide.runtime.schedule.executor import Executor, Tick
from hightide.runtime.schedule.in_flight import InFlight
from hightide.runtime.schedule.performer import Performer
from hightide.runtime.step_work import Computed, StepWork
from hightide.stores.cuda import CudaAccelerator
from hightide.stores.disk import DiskStore
from hightide.stores.host_arena import HostArena
from hightide.stores.pinned import PinnedArena
from hightide.stores.simulated import SimulatedAccelerator
from hightide.stores.store import ALIGN_BYTES, Accelerator, OutOfMemory, Store

LOST = (
    "the model was being moved to another plan when that failed, and its values are lost; the run ends here, go on "
    "from its last checkpoint"
)
HALF_LOADED = (
    "a checkpoint was being loaded when that failed, and some values are of before it, some of the checkpoint; load a "
    "whole one (hightide.load) to go on"
)


class Run:
    def __init__(
        self,
        model: nn.Module,
        solution: Solution,
        probed: ProbeResult,
        check_call: Callable[[Mapping[str, Any]], None],
        device: torch.device = rng.CPU,
        compile: bool = False,
        first_values: FirstValues | None = None,
        around_call: Callable[[tuple[Any, ...], Mapping[str, Any]], AbstractContextManager[None]] | None = None,
        learns: bool = True,
        disks: Sequence[DiskLimit] = (),
    ) -> None:
        """`learns` False: a rehearsal, which looks at no block (see first_look.py). `disks`: for plans that use any."""
        self.model, self.profile = model, solution.profile
        self._disks = tuple(disks)
        self.birthplace = Birthplace()
        self.probed = probed
        self.probing = False
        self.looks = FirstLooks(self, learns)
        self.runners: dict[int, BlockRunner] = {}  # by the id of the block's module
        self.unchanged: dict[int, Unchanged] = {}  # by block
        self.inner_hooks: dict[int, InnerHooks] = {}  # by block
        self.compiled = CompiledForwards(compile)
        self._check_call = check_call  # raises for arguments under which training through blocks would be wrong
        self._around_call = around_call or (lambda args, kwargs: nullcontext())
        self.caches = Caches(model)
        self.parameters = _by_key(model, solution.profile)
        self.keys = {id(param): key for key, param in self.parameters.items()}

        devices = (param.device for param in model.parameters() if not param.is_meta)
        self._device_before = next(devices, rng.CPU)
        self._before = Before(model, self.parameters, device)
        try:
            self._set_up(solution, device, first_values or FirstValues())
        except BaseException:
            self.retreat()
            raise
        self.observer: Observer | None = None
        self.cpu_copies = CpuCopies()  # of the batch whose forward is under way

        self.anchor = Anchor(device)
        self.lends = False  # see borrowed()
        self.between_passes: Callable[[], None] | None = None  # called before each pass, while a recording is on
        self.loaded_masters: dict[str, Tensor] = {}  # since the last step: their parameters may be loaded after them
        self.is_whole_batch = False  # the latest
        self.work = StepWork()
        self.products: MatmulRates | None = None  # how fast the GPU multiplies; None: nobody has measured it
        self.num_passes = 0
        self.num_steps = 0
        self.step_s = 0.0
        self._stepped_at_s: float | None = None
        self._splits: dict[tuple[int, str], Split] = {}
        self._warned_splits: set[str] = set()
        self._pass_seed = b""
        self._nth_call: Counter[int] = Counter()
        self._root_depth = 0
        self._lost = ""  # why; see check_values()
        self._root_batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._checked_samples: int | None = None  # of the batch of the next pass, if it is shaped as the profiled one
        self._end_queued = False
        self._backward = Hold(is_over=lambda: torch._C._current_graph_task_id() < 0)

    def _set_up(self, solution: Solution, device: torch.device, first_values: FirstValues) -> None:
        self.plan = plan = solution.plan
        self.stores = _Stores(solution, device, self._disks)
        self.chunks = Chunks(self.profile, solution.placement, self.stores.by_tier, self.parameters)
        self.chunks.load(first_values.origins)
        if first_values.initialise is not None:
            first_values.initialise(self.chunks)
        self._move_buffers()
        self.lanes = Lanes(device=device if device.type == "cuda" else None)
        self.flight = InFlight(self.lanes)
        self.gradients = Gradients(self.profile, self.chunks, plan.update, self.flight)
        self._make_executor(solution)

    def retreat(self) -> None:
        """The model is as before, values included. For a run that has not begun, however much of it there is."""
        there = vars(self)
        with held:
            if "lanes" in there:
                self.lanes.close()
            if "stores" in there:
                self.host.unpin()  # else its pages cannot be given back
            self._before.restore(there.get("chunks"))
            for part in ("chunks", "stores"):
                if part in there:
                    there[part].close()

    @property
    def gpu(self) -> Accelerator:
        return self.stores.gpu

    @property
    def host(self) -> HostArena:
        return self.stores.host

    @property
    def disk(self) -> DiskStore | None:
        """None: the plan uses none."""
        return self.stores.disk

    def _make_executor(self, solution: Solution) -> None:
        self.stashes = Stashes(self.gpu, self.host)
        streams, sharers = self.lanes.streams, self.lanes.sharers
        self.performer = Performer(self.chunks, self.gradients, self.stashes, streams.fence, sharers.run)
        names = [block.name or "(loose)" for block in self.profile.blocks]
        update, accumulate = self.plan.update, self.plan.accumulate
        self.executor = Executor(solution.schedules, self.flight, self.performer, update, names, accumulate)
        self.forecast = _forecast(solution, self.gpu.device)
        self.save_forecast = solution.save if isinstance(solution, Searched) else None  # None: nobody simulated it

    def move_to(self, solution: Solution) -> None:
        """Goes on under another plan, between passes: values, states, gradients and counters are what they were. Graphs
        and lazy logits of before are of no use any more.

        Raises torch.OutOfMemoryError (OutOfMemory is one) or MemoryError if memory for it cannot be had: then
        everything is as it was, and training can go on under the old plan; only a forward that still waited for its
        backward is given up. RuntimeError is the end of the run: meanwhile another process took the old plan's GPU
        memory."""
        self.birthplace.check()
        self._finish_saving()
        with held:  # between its two places, a value is nowhere
            self.executor.settle()
            if self.gpu.device.type == "cuda":
                torch.cuda.synchronize(self.gpu.device)  # what was enqueued reads and writes what moves now
            try:
                self._go_over(StatesOnTheMove(self.plan, self.chunks, self.gradients), solution)
            except (torch.OutOfMemoryError, MemoryError) as error:
                error.add_note("This was asked for by a move to another plan, which was given up: the old plan stays.")
                raise
            self.settle()  # by now nothing of the old plan's memory is left: that of the new one may become real

    def _go_over(self, carried: StatesOnTheMove, solution: Solution) -> None:
        """See [Note: moving]."""
        self.chunks.let_go()
        self.gpu.vacate()
        try:
            taken = self._allocate(solution)
        except BaseException as error:
            self._stay(carried, error)
            raise
        try:
            self._carry_over(carried, taken, solution)
        except BaseException as error:  # nothing that is known
            self._lost = LOST
            self.lanes.fail(error)
            raise RuntimeError(LOST) from error

    def _carry_over(self, carried: StatesOnTheMove, taken: tuple[_Stores, Chunks], solution: Solution) -> None:
        stores, chunks, performer, executor = self.stores, self.chunks, self.performer, self.executor
        self.profile, self.plan = solution.profile, solution.plan
        self.stores, self.chunks = taken
        for param in self.parameters.values():
            increment_version(param)  # what graphs of plain autograd have saved of it is gone: their backward raises
        stores.host.unpin()
        self.chunks.go_on(chunks)
        self.chunks.load(carried.origins(), begins=False)
        self.flight.forget()
        self.gradients.move_to(self.chunks)
        carried.unpack(self.chunks, self.gradients)
        chunks.close()
        stores.host.vacate()
        stores.close()
        if performer.updates is not None:
            performer.updates.move_to(self.chunks)
        self._make_executor(solution)
        self.performer.go_on(performer)
        self.executor.go_on(executor)
        self.runners = {
            module: self.make_runner(runner.index, runner.original) for module, runner in self.runners.items()
        }

    def make_runner(self, block: int, original: Callable[..., Any]) -> BlockRunner:
        """`original`: the forward of its module's own class."""
        on_host = self.plan.blocks[block].compute is Tier.HOST
        return (HostEmbedding if on_host else BlockRunner)(self, block, original)

    def _allocate(self, solution: Solution) -> tuple[_Stores, Chunks]:
        """All memory that another plan needs, or none."""
        stores = _Stores(solution, self.gpu.device, self._disks)
        try:
            for buffer in self.buffers:
                stores.gpu.adopt(buffer, "buffers")
            return stores, Chunks(solution.profile, solution.placement, stores.by_tier, self.parameters)
        except BaseException:
            stores.close()
            raise

    def _stay(self, carried: StatesOnTheMove, error: BaseException) -> None:
        """Under the old plan."""
        try:
            carried.put_back()
        except OutOfMemory as lost:
            self._lost = LOST
            self.lanes.fail(lost)
            raise RuntimeError(
                f"the model was moved to another plan, for which there was not enough memory ({error}), and meanwhile "
                "another process took GPU memory that the old plan had; the run ends here, go on from its last "
                "checkpoint"
            ) from lost

    def settle(self) -> None:
        """Once all values are in their places, the optimizer's too: fixes memory there. Earlier, what is still to move
        in would exist twice."""
        tell("pinning host memory")
        self.host.pin()
        self.gpu.enforce_limit()

    # -- the model's own forward ----------------------------------------------------------------------------------

    def forward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See [Note: interrupts]: the model's own code, too, is only interrupted where a block begins or a part of
        it."""
        with deferred:
            return self._forward(original, args, kwargs)

    def _forward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.probing or self._root_depth:
            return original(*args, **kwargs)
        training = torch.is_grad_enabled()
        if training:
            original = partial(self.caches.call, self.model, original)
            self._check_call(kwargs)
            self._check_batch(args, kwargs)
            if self.observer is not None and self.observer.is_watching and not self.executor.has_open_forward:
                return watched_pass(self, self.observer, original, args, kwargs)
        return self.run_pass(Mode.TRAIN if training else Mode.EVAL, original, args, kwargs)

    def run_pass(self, mode: Mode, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.begin_pass(mode)
        self._root_depth += 1
        try:
            safe_point()
            args, kwargs = self._moved(args, kwargs)
            self._root_batch = (args, kwargs)
            self.executor.start()
            with self.gpu.meter("activations"), self._around_call(args, kwargs):
                return original(*args, **kwargs)
        finally:
            self._root_depth -= 1
            self._root_batch = None
            self.cpu_copies.clear()

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The batch on the accelerator: a copy that dies with the pass, as of `.to(device)`, so that batches which
        the user keeps in host memory do not count."""
        moved: dict[int, Tensor] = {}

        def move(value: Tensor) -> Tensor:
            if self.gpu.holds(value):
                return value
            if id(value) not in moved:  # labels are often the input ids themselves
                moved[id(value)] = copy_to(value, self.gpu.device)
                if value.device.type == "cpu" and self.chunks.tables:
                    self.cpu_copies.note(moved[id(value)], value)
            return moved[id(value)]

        with self.gpu.meter("batch"):
            args, kwargs = map_tensors((args, kwargs), move)
        self.adopt(tensors(flatten_call(args, kwargs)[0]), "batch")
        return args, kwargs

    def _check_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        num_samples = samples_in(Arguments(args, kwargs), self.probed.samples)
        self.is_whole_batch = num_samples == self.plan.num_samples
        if num_samples > self.plan.num_samples:
            raise RefusedArgument(
                f"a batch of {num_samples} samples, but the plan holds up to {self.plan.num_samples}; wrap the "
                "model with the "
                "largest batch of your run as its example, or pass smaller batches and step after several of them"
            )
        is_known = shapes(Arguments(args, kwargs), self.probed.samples) == self.probed.shapes
        self._checked_samples = num_samples if is_known else None

    def begin_pass(self, mode: Mode) -> None:
        self._backward.end()
        refuse_transforms(mode is not Mode.EVAL)
        self.lanes.check()
        self.check_values()
        self.chunks.check_loose()
        if self.between_passes is not None:
            self.between_passes()
        self.executor.begin(mode)
        if mode is not Mode.EVAL:
            self.num_passes += 1
            self._pass_seed = rng.pass_seed(self.num_passes)
            self._nth_call.clear()
            self._end_queued = False
            self.work.begin_pass(self._work_of_pass())
            self.anchor.begin_pass(self.gradients.of_parameters_here)

    def _work_of_pass(self) -> Computed | None:
        """None: a part of the model is called, or a batch that nobody has profiled."""
        num_samples, self._checked_samples = self._checked_samples, None
        autocast = self.autocast()
        dtype = str(autocast.dtype).removeprefix("torch.") if autocast.enabled else ""
        return None if num_samples is None else Computed(num_samples, dtype)

    def ensure_pass(self, block: int) -> None:
        """A block that is called without the whole model (`model.model(...)`) still needs a pass to run in."""
        if not self._root_depth:
            mode = Mode.TRAIN if torch.is_grad_enabled() else Mode.EVAL
            if not self.executor.expects(mode, block):
                self.begin_pass(mode)
                self.executor.start()

    # -- what blocks call -----------------------------------------------------------------------------------------

    @contextmanager
    def tick(self, op: Op, block: int, call: int | None = None, accumulate: bool = False) -> Iterator[Tick]:
        with deferred:
            try:
                safe_point()
                tick = self.executor.enter(op, block, call, accumulate)
                if self.observer is not None:
                    self.observer.begin_tick(op)
                with self.gpu.meter("activations"):
                    yield tick
                if self.observer is not None:
                    self.observer.end_tick(op, tick.call)
                self.executor.leave(tick)
            except BaseException as error:
                self.executor.abandon()
                if op is Op.BACKWARD and self.observer is not None and isinstance(error, OutOfMemory):
                    self.observer.ran_out(error)
                self._backward.end()
                raise

    def draws(self, block: int, num_micro_batches: int) -> rng.Draws:
        nth_call = self._nth_call[block]
        self._nth_call[block] += 1
        return rng.Draws(self._pass_seed, block, nth_call, num_micro_batches, self.gpu.device)

    def split_of(self, block: int, signature: str) -> Split:
        """How a call divides into micro-batches. A way of calling that was never probed is probed now."""
        key = (block, signature)
        if key not in self._splits:
            split = self.probed.split(block, signature)
            if not split.inputs and self._root_batch is not None and not self.probed.failure:
                again = self._probe_again(*self._root_batch)
                split = again.split(block, signature)
                if (reason := again.refusals.get(block)) is not None:
                    raise Refused(f"the block {self.profile.blocks[block].name!r} {reason}")
                if not again.failure:
                    self.probed = again.after(self.probed)
            if not split.inputs and self._root_batch is None:
                return split  # called without the whole model: there is no batch to probe with; ask again next time
            self._splits[key] = split
            self._warn_unsplit(block, split)
        return self._splits[key]

    def _probe_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProbeResult:
        self.probing = True
        # A forward that somebody has put on the model has run already, with these arguments as its result. Accelerate's
        # enters autocast, and cannot be entered twice: autocast would stay on for ever.
        patched = vars(self.model).pop("forward", None)
        try:
            with self.gpu.unmetered():  # a probe computes on shapes, and in host memory
                batch = Arguments(*map_tensors((args, kwargs), lambda tensor: tensor.cpu()))
                return probe(
                    self.model,
                    self.probed.blocks,
                    batch,
                    taps=self.probed.taps,
                    device=self.gpu.device,
                    samples=self.probed.samples,
                )
        finally:
            self.probing = False
            if patched is not None:
                vars(self.model)["forward"] = patched

    def never_split(self, block: int, signature: str, reason: str) -> Split:
        split = self._splits[block, signature] = Split(signature, (), (), note=reason)
        self._warn_unsplit(block, split)
        return split

    def _warn_unsplit(self, block: int, split: Split) -> None:
        known = {call.note for call in self.profile.calls if call.block == block}
        if split.note and split.note not in known and split.note not in self._warned_splits:
            self._warned_splits.add(split.note)
            name = self.profile.blocks[block].name
            warnings.warn(f"block {name!r} runs the whole batch at once: {split.note}", stacklevel=2)

    def autocast(self) -> Autocast:
        return Autocast.capture(self.gpu.device.type)

    def _move_buffers(self, back: bool = False) -> None:
        """To the accelerator, or back to where the model was. One that several modules share stays one."""
        moved: dict[int, Tensor] = {}
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(self._device_before if back else self.gpu.device)
                module._buffers[name] = moved[id(buffer)]
                if not back:
                    self.gpu.adopt(moved[id(buffer)], "buffers")
        self.buffers = list(moved.values())

    def adopt(self, values: Sequence[Tensor], label: str) -> None:
        for value in values:
            self.gpu.adopt(value, label)

    def queue_end_of_backward(self) -> None:
        if not self._end_queued:
            self._end_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            if self.plan.update is Update.IN_BACKWARD:  # half of the updates would be half a step
                self._backward.begin()

    def _end_backward(self) -> None:
        with held:
            self._end_queued = False
            self.executor.finish_backward()
            self.work.end_backward()
        self._backward.end()

    # -- what the optimizer and users call ------------------------------------------------------------------------

    def step(self) -> None:
        self.executor.step()
        self.loaded_masters.clear()
        self.num_steps += 1
        self.work.end_step()
        now_s = time.perf_counter()
        if self._stepped_at_s is not None:
            self.step_s = now_s - self._stepped_at_s
        self._stepped_at_s = now_s
        if self.observer is not None:
            self.observer.end_step()

    def check_values(self) -> None:
        """Raises if they are lost, or are not of this process: what lies there must not become somebody's
        checkpoint."""
        self.birthplace.check()
        if self._lost:
            raise RuntimeError(self._lost)

    def value_of(self, key: str, borrow: bool = False) -> Tensor:
        """A copy of a parameter's present value. With `borrow` it is the very memory where it lies in RAM, to be read
        at once; it looks as if it had a storage of its own, or writers of files would take all parameters for one. From
        disk it comes in pages of a file, which need not stay in memory."""
        self.check_values()
        safe_point()
        self.executor.wait_for_update(self.chunks.places[key][0])
        place = self.chunks.value(key)
        if borrow and not place.is_memory and place.nbytes > 0:
            return mapped(place, self._disks[0].path)
        lies_in_ram = place.is_memory and place.view.device.type == "cpu" and place.nbytes > 0
        return alone(place.view) if borrow and lies_in_ram else place.get()

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Inside, state dicts have the memory of the chunks itself. Nothing may train meanwhile."""
        before, self.lends = self.lends, True
        try:
            yield
        finally:
            self.lends = before

    def store(self, key: str, value: Tensor) -> None:
        """New values for a parameter, from a state dict."""
        self.birthplace.check()
        chunk = self.chunks.places[key][0]
        self.executor.wait_for_fetch(chunk)
        self.executor.settle_home(chunk)
        self.secure(key)
        self.executor.forget_slot(chunk)
        self.chunks.store(key, value)
        if (master := self.loaded_masters.get(key)) is not None:
            self.chunks.restore_master(key, master)

    @contextmanager
    def rewriting(self) -> Iterator[Chunks]:
        """Inside, the caller writes the values of all parameters, and their states, straight to their places. If that
        does not come to its end, the model neither trains nor is saved until another one has."""
        self.birthplace.check()
        self.lanes.check()
        if self._lost != HALF_LOADED:
            self.check_values()
        self._finish_saving()
        for chunk in range(len(self.chunks.specs)):
            self.executor.wait_for_fetch(chunk)
            self.executor.settle_home(chunk)
            self.executor.forget_slot(chunk)
        self._lost = HALF_LOADED
        yield self.chunks
        with held:
            self.chunks.show_new_values()
            self.loaded_masters.clear()
            self._lost = ""

    def settle_states(self, key: str, changes: bool = True) -> None:
        """Until nothing is under way with a parameter's states; `changes`: whoever asks writes to them."""
        self.executor.settle_home(self.chunks.places[key][0])
        if changes:
            self.secure(key)

    # -- values for a checkpoint ----------------------------------------------------------------------------------

    def snapshot(self, wanted: Wanted | None = None) -> Snapshot:
        """The values after the latest step(), to be read beside training, of all parameters and their states or of
        those that are `wanted`. Updates that are still under way belong to it. One at a time."""
        self.check_values()
        self.lanes.check()
        if self.performer.saving is not None:
            raise Refused("a checkpoint of this model is still being read; wait for it, or close it, before the next")
        with held:
            updates, flight = self.performer.updates, self.flight
            has_states = (lambda key: False) if updates is None else updates.begin_saving()
            tile_bytes = TILE_BYTES if self.host.spare_bytes >= NUM_STAGED * TILE_BYTES else SMALL_TILE_BYTES
            order = self.executor.update_order()
            tiles = list(tiles_of(self.chunks, order, has_states, wanted or (lambda key, kind: True), tile_bytes))
            owed = {chunk: flight.changes(chunk) for chunk in order}
            on_gpu = [place.is_updated_on_gpu and place.chunk.optimised_numel > 0 for place in self.chunks.placed]
            written = Written(self.chunks)
            kept = CopyOnUpdate(tiles, owed, self.lanes, self.host, flight.moment(), on_gpu.__getitem__, written)
            self.performer.saving = kept
            return Snapshot(tiles, kept, self.lanes)

    def secure(self, key: str | None = None) -> None:
        """Before somebody changes the values of a parameter, or of all: those that a snapshot still needs are copied,
        or it is waited for."""
        saving = self.performer.saving
        if saving is not None:
            saving.settle(None if key is None else self.chunks.places[key][0])

    def _finish_saving(self) -> None:
        """Before values leave their places."""
        saving = self.performer.saving
        if saving is not None:
            with deferred:
                saving.wait()
                saving.close()

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self, is_plain: Callable[[], object] = lambda: None) -> None:
        """Gives the parameters back their values and frees everything else. Calls `is_plain` when nothing can fail any
        more. An interrupt leaves all as it is, or waits for the end."""
        self.check_values()
        with deferred:
            if self.lanes.failure is None:
                self.executor.wait_for_updates()
            self._finish_saving()
            values = self._plain_values()
            with held:
                is_plain()
                self._give_back(values)
                self.discard()

    def discard(self) -> None:
        """Frees everything; the model is of no use any more."""
        if self.performer.saving is not None:
            self.performer.saving.close()
        self.lanes.close()
        if self.performer.updates is not None:
            self.performer.updates.close()
        self.chunks.close()
        self.stores.close()

    def _plain_values(self) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for key in self.chunks.places:
            safe_point()
            values[key] = self.chunks.value(key).get(self._device_before)
        return values

    def _give_back(self, values: Mapping[str, Tensor]) -> None:
        gradients = self._take_gradients()
        for key, value in values.items():
            self.chunks.show(key)
            self.parameters[key].data = value
        for key, gradient in gradients.items():
            self.parameters[key].grad = gradient
        self._move_buffers(back=True)

    def _take_gradients(self) -> dict[str, Tensor]:
        """The gradients as plain tensors, off the parameters: a gradient must be where its parameter is."""
        readable = self.plan.update is Update.DEFERRED and self.lanes.failure is None
        taken: dict[str, Tensor] = {}
        for key, param in self.parameters.items():
            gradient, param.grad = param.grad, None
            if param.dtype != torch.float32:  # see Gradients: sums were in fp32
                param.grad_dtype = param.dtype
            if isinstance(gradient, GradientPlaceholder):
                gradient = self.gradients.read(key) if readable else None
            if gradient is not None:
                taken[key] = gradient.to(self._device_before, param.dtype)
        return taken


class _Stores:
    """All memory of one plan."""

    def __init__(self, solution: Solution, device: torch.device, disks: Sequence[DiskLimit]) -> None:
        """The disk first: where it has no room, nothing else was taken."""
        self.disk = _disk_store(solution, disks)
        try:
            self.gpu, self.host = _memory(solution, device)
        except BaseException:
            if self.disk is not None:
                self.disk.close()
            raise

    @property
    def by_tier(self) -> dict[Tier, Store]:
        disk = {} if self.disk is None else {Tier.DISK: self.disk}
        return {Tier.GPU: self.gpu, Tier.HOST: self.host, **disk}

    def close(self) -> None:
        for store in self.by_tier.values():
            store.close()


def _disk_store(solution: Solution, disks: Sequence[DiskLimit]) -> DiskStore | None:
    """Files of what the plan needs, on each disk in proportion to its limit. A chunk's arrays each lie on one: with
    several disks, each has room for one more."""
    placement = solution.placement
    needed_bytes, limit_bytes = placement.bytes_on[Tier.DISK], sum(disk.num_bytes for disk in disks)
    if not needed_bytes:
        return None
    if needed_bytes > limit_bytes:
        raise ValueError(
            f"the plan keeps {needed_bytes} bytes ({format_bytes(needed_bytes)}) on disk, and the folders of "
            f"Limits(disk=...) may have {limit_bytes} ({format_bytes(limit_bytes)}); give it a folder with as much: "
            f"limits=hightide.Limits(disk='/folder:{needed_bytes}')"
        )
    largest_bytes = max(place.bytes_on[Tier.DISK] for place in placement.chunks) if len(disks) > 1 else 0
    shares = [needed_bytes * disk.num_bytes // limit_bytes + DISK_REGION_BYTES + largest_bytes for disk in disks]
    files = [
        DiskLimit(disk.path, min(disk.num_bytes, share // DISK_REGION_BYTES * DISK_REGION_BYTES))
        for disk, share in zip(disks, shares, strict=True)
    ]
    known = solution.problem.machine.disk if isinstance(solution, Searched) else None
    return DiskStore(files) if known is None else DiskStore(files, request_bytes=known.request_bytes, depth=known.depth)


def _memory(solution: Solution, device: torch.device) -> tuple[Accelerator, HostArena]:
    profile, plan, schedules = solution.profile, solution.plan, solution.schedules
    host_bytes = max(peaks(schedule).host_peak_bytes for schedule in schedules.values())
    if device.type != "cuda":
        return SimulatedAccelerator(plan.gpu_limit_bytes), HostArena(plan.host_limit_bytes, needed_bytes=host_bytes)
    host = PinnedArena(max(plan.host_limit_bytes, ALIGN_BYTES), max(host_bytes, ALIGN_BYTES))
    base_bytes = max(schedule.gpu_base_bytes for schedule in schedules.values())
    slab_bytes = base_bytes - profile.batch_bytes - profile.buffer_bytes  # these two are no regions
    rounding_bytes = 2 * ALIGN_BYTES  # of the two pools of slots
    return CudaAccelerator(plan.gpu_limit_bytes, device, slab_bytes + rounding_bytes if slab_bytes else 0), host


def _forecast(solution: Solution, device: torch.device) -> Forecast:
    """The plan's, in the bytes that this device counts. A plan that the user brings may be made for another kind of
    device, or by hand."""
    plan, peak = solution.plan, solution.peaks
    if device.type != "cuda":
        return replace(plan.forecast, gpu_reserved_bytes=None)
    if plan.forecast.gpu_reserved_bytes is not None:
        return plan.forecast
    reserved = reserved_bytes(solution.passes, peak)
    return replace(plan.forecast, gpu_peak_bytes=peak.gpu_peak_bytes, gpu_reserved_bytes=reserved)


def alone(value: Tensor) -> Tensor:
    """The same memory under a storage that begins and ends with this tensor. Nothing keeps the memory alive."""
    assert value.is_contiguous()
    memory = (ctypes.c_uint8 * value.nbytes).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=value.dtype).view(value.shape)


def _by_key(model: nn.Module, profile: ModelProfile) -> dict[str, nn.Parameter]:
    parameters = dict(model.named_parameters())
    return {spec.name: parameters[spec.name] for spec in profile.params}
