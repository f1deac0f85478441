"""Everything that hightide keeps for one wrapped model, and what the model's swapped classes call."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hightide.ir.limits import DiskLimit
from hightide.ir.machine import MatmulRates
from hightide.ir.plan import Update
from hightide.ir.refusal import Refused
from hightide.ir.save_sizes import NUM_STAGED, SMALL_TILE_BYTES, TILE_BYTES
from hightide.ir.tier import Tier
from hightide.planner.solution import Searched, Solution
from hightide.process.forks import Birthplace
from hightide.process.interrupts import deferred, held, safe_point
from hightide.process.progress import tell
from hightide.profiler.model.probe import ProbeResult
from hightide.profiler.switches.caches import Caches
from hightide.runtime.alike import begin_alike, drawing_alike, keep_alike, lanes_of
from hightide.runtime.before import Before, move_buffers
from hightide.runtime.blocks import rng
from hightide.runtime.blocks.activations import Stashes
from hightide.runtime.blocks.autocast import Autocast
from hightide.runtime.blocks.block_runner import BlockRunner
from hightide.runtime.blocks.compiled import CompiledForwards
from hightide.runtime.blocks.host_embedding import HostEmbedding
from hightide.runtime.blocks.inputs_on_disk import InputsOnDisk
from hightide.runtime.blocks.splits import Splits
from hightide.runtime.chunks.between_ranks import BetweenRanks
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.disk_homes import mapped
from hightide.runtime.chunks.moving import StatesOnTheMove, go_over
from hightide.runtime.chunks.moving_shards import ShardsOnTheMove
from hightide.runtime.chunks.origin import FirstValues
from hightide.runtime.gradients.gradients import Gradients
from hightide.runtime.gradients.ranked_gradients import RankedGradients
from hightide.runtime.guards.anchor import Anchor
from hightide.runtime.guards.first_look import FirstLooks
from hightide.runtime.guards.inner_hooks import InnerHooks
from hightide.runtime.guards.unchanged import Unchanged
from hightide.runtime.known_batches import Admission, KnownBatches
from hightide.runtime.lanes.lanes import Lanes
from hightide.runtime.model_passes import AroundCall, ModelPasses
from hightide.runtime.observer import Observer
from hightide.runtime.plan_stores import PlanStores, forecast_on
from hightide.runtime.saving.copy_on_update import CopyOnUpdate
from hightide.runtime.saving.snapshot import Snapshot
from hightide.runtime.saving.tiles import Wanted, saved_tensors, tiles_of
from hightide.runtime.saving.written import Written
from hightide.runtime.schedule.executor import Executor
from hightide.runtime.schedule.in_flight import InFlight
from hightide.runtime.schedule.performer import Performer
from hightide.runtime.step_work import StepWork
from hightide.shard.collectives import Collectives
from hightide.shard.watchman import Watchman
from hightide.stores.disk import DiskStore
from hightide.stores.host_arena import HostArena
from hightide.stores.store import Accelerator

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
        around_call: AroundCall | None = None,
        learns: bool = True,
        disks: Sequence[DiskLimit] = (),
        collectives: Collectives | None = None,
    ) -> None:
        """`learns` False: a rehearsal, which looks at no block (see first_look.py). `disks`: for plans that use any.
        `collectives`: of a plan for several ranks."""
        self._collectives = collectives
        self.model, self.profile = model, solution.profile
        self.disks = tuple(disks)
        self.birthplace = Birthplace()
        self.probed = probed
        self.looks = FirstLooks(self, learns)
        self.runners: dict[int, BlockRunner] = {}  # by the id of the block's module
        self.unchanged: dict[int, Unchanged] = {}  # by block
        self.inner_hooks: dict[int, InnerHooks] = {}  # by block
        self.compiled = CompiledForwards(compile)
        self.caches = Caches(model)
        parameters = dict(model.named_parameters())
        self.parameters = {spec.name: parameters[spec.name] for spec in self.profile.params}
        self.keys = {id(param): key for key, param in self.parameters.items()}

        self._before = Before(model, self.parameters, device)
        try:
            self._set_up(solution, device, first_values or FirstValues())
        except BaseException:
            self.retreat()
            raise
        self.passes = ModelPasses(self, check_call, around_call or (lambda args, kwargs: nullcontext()))
        self.splits = Splits(self)
        self.observer: Observer | None = None
        self.batches: KnownBatches | None = None  # see [Note: larger batches]; None: any batch is let in
        self.admission: Admission | None = None
        self.anchor = Anchor(device)
        self.lends = False  # see borrowed()
        self.between_passes: Callable[[], None] | None = None  # called before each pass, while a recording is on
        self.loaded_masters: dict[str, Tensor] = {}  # since the last step: their parameters may be loaded after them
        self.work = StepWork()
        self.products: MatmulRates | None = None  # how fast the GPU multiplies; None: nobody has measured it
        self.num_passes = 0
        self.num_steps = 0
        self.step_s = 0.0
        self._stepped_at_s: float | None = None
        self._lost = ""  # why; see check_values()
        self.save_pretrained: Callable[..., object] | None = None  # of several ranks: takes a module and a folder
        self.tells_all = False  # state dicts of several ranks are whole on each of them
        self.save_under_way: Callable[[], object] = lambda: None  # of several ranks: waits for its end
        self.when_settled: Callable[[], object] = lambda: None  # called when memory of another plan is in place

    def _set_up(self, solution: Solution, device: torch.device, first_values: FirstValues) -> None:
        self.plan = plan = solution.plan
        self.stores = PlanStores(solution, device, self.disks)
        self.between: BetweenRanks | None = None  # several ranks
        collectives, own_shard = self._collectives, self.divide(plan.replicas)
        if collectives is not None:
            begin_alike(collectives, self.model, first_values.origins)
        self.chunks = Chunks(self.profile, solution.placement, self.stores.by_tier, self.parameters, own_shard)
        self.meet()
        self.chunks.load(first_values.origins)
        if first_values.initialise is not None:
            with nullcontext() if collectives is None else drawing_alike(collectives):
                first_values.initialise(self.chunks)
        self.buffers = move_buffers(self.model, self.gpu.device)
        self.adopt(self.buffers, "buffers")
        gpu = device if device.type == "cuda" else None
        self.lanes = Lanes(device=gpu) if collectives is None else lanes_of(collectives.ranks, gpu)
        if collectives is not None and collectives.ranks.watchman is not None:
            collectives.ranks.watchman.owes_others = _owes_others(weakref.ref(self.lanes))
        self.flight = InFlight(self.lanes)
        known = (self.profile, self.chunks, plan.update, self.flight)
        self.gradients = Gradients(*known) if self.between is None else RankedGradients(*known, self.between)
        self.make_executor(solution)

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

    @property
    def watchman(self) -> Watchman | None:
        """None: there is one rank."""
        return None if self._collectives is None else self._collectives.ranks.watchman

    def divide(self, replicas: int) -> int:
        """The ranks, into so many groups that have a copy of everything. Returns the number of the shard that this one
        has."""
        collectives = self._collectives
        if collectives is None:
            return 0
        if replicas * collectives.num_shards != collectives.ranks.world:
            collectives.divide(replicas)
        return collectives.shard

    def meet(self) -> None:
        """The others, about these chunks."""
        if self._collectives is not None:
            self.between = BetweenRanks(self._collectives, self.chunks)
            self.chunks.whole_value, self.chunks.answers = self.between.whole_value, self.between.answers

    def any_rank(self, what: str, value: bool) -> bool:
        return value if self._collectives is None else self._collectives.any_true(what, value)

    def keep_alike(self) -> None:
        """At the end of a backward."""
        if self._collectives is not None:
            keep_alike(self._collectives, self.model)

    def on_the_move(self) -> StatesOnTheMove:
        """Its values, out of their places on the GPU."""
        if self.between is None:
            return StatesOnTheMove(self.plan, self.chunks, self.gradients)
        return ShardsOnTheMove(self.plan, self.chunks, self.gradients, self.between)

    @property
    def has_gradients(self) -> bool:
        """That somebody may still use, as far as this rank knows."""
        self.gradients.any_valid()
        return any(self.gradients.of_use(spec.index) for spec in self.chunks.specs)

    @property
    def gets_whole(self) -> bool:
        """Whether state dicts have their tensors here, and not on the first rank alone."""
        return self.between is None or self.between.is_first or self.tells_all

    def refuse_several(self, what: str, instead: str) -> None:
        """What is not there yet for several ranks."""
        if self.between is not None:
            raise Refused(f"{what} of a model that several ranks train is not built yet; {instead}")

    def make_executor(self, solution: Solution) -> None:
        disk = None
        if self.chunks.disk is not None and self.plan.num_input_buffers:
            disk = InputsOnDisk.of(self.profile, self.plan, self.chunks.disk.rings.inputs, self.disk)
        self.stashes = Stashes(self.gpu, self.host, disk)
        streams, sharers = self.lanes.streams, self.lanes.sharers
        self.performer = Performer(self.chunks, self.gradients, self.stashes, streams.fence, sharers.run)
        names = [block.name or "(loose)" for block in self.profile.blocks]
        update, accumulate = self.plan.update, self.plan.accumulate
        self.executor = Executor(
            solution.schedules, self.flight, self.performer, update, names, accumulate, self.watchman
        )
        self.forecast = forecast_on(solution, self.gpu.device)
        self.solution = solution
        self.save_forecast = solution.save if isinstance(solution, Searched) else None  # None: nobody simulated it

    def move_to(self, solution: Solution) -> None:
        """Goes on under another plan, between passes: values, states, gradients and counters are what they were. Graphs
        and lazy logits of before are of no use any more.

        Raises torch.OutOfMemoryError (OutOfMemory is one) or MemoryError if memory for it cannot be had: then
        everything is as it was, and training can go on under the old plan; only a forward that still waited for its
        backward is given up. RuntimeError is the end of the run: meanwhile another process took the old plan's GPU
        memory."""
        self.birthplace.check()
        if self.between is not None and self.has_gradients:
            raise Refused(
                "another plan while there are gradients, which are in shards on several ranks; call zero_grad() before"
            )
        self._finish_saving()
        with held:  # between its two places, a value is nowhere
            self.executor.settle()
            try:
                go_over(self, solution)
            except (torch.OutOfMemoryError, MemoryError) as error:
                error.add_note("This was asked for by a move to another plan, which was given up: the old plan stays.")
                raise
            self.settle()  # by now nothing of the old plan's memory is left: that of the new one may become real

    def make_runner(self, block: int, original: Callable[..., Any]) -> BlockRunner:
        """`original`: the forward of its module's own class."""
        on_host = self.plan.blocks[block].compute is Tier.HOST
        return (HostEmbedding if on_host else BlockRunner)(self, block, original)

    def settle(self) -> None:
        """Once all values are in their places, the optimizer's too: fixes memory there. Earlier, what is still to move
        in would exist twice."""
        tell("pinning host memory")
        self.host.pin()
        self.gpu.enforce_limit()
        self.when_settled()

    # -- what blocks call -----------------------------------------------------------------------------------------

    def autocast(self) -> Autocast:
        return Autocast.capture(self.gpu.device.type)

    def adopt(self, values: Sequence[Tensor], label: str) -> None:
        for value in values:
            self.gpu.adopt(value, label)

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

    def lose_values(self, why: str, error: BaseException) -> None:
        self._lost = why
        self.lanes.fail(error)

    def value_of(self, key: str, borrow: bool = False) -> Tensor:
        """A copy of a parameter's present value. With `borrow` it is the very memory where it lies in RAM, to be read
        at once; it looks as if it had a storage of its own, or writers of files would take all parameters for one. From
        disk it comes in pages of a file, which need not stay in memory."""
        self.check_values()
        safe_point()
        self.executor.wait_for_update(self.chunks.places[key][0])
        if self.between is not None:
            return self.between.whole_value(key)
        place = self.chunks.value(key)
        if borrow and not place.is_memory and place.nbytes > 0:
            return mapped(place, self.disks[0].path)
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
        self.executor.open_home(chunk)
        self.secure(key)
        self.chunks.store(key, value)
        if (master := self.loaded_masters.get(key)) is not None and not self.misfits({key: master}):
            self.chunks.restore_master(key, master)

    def misfits(self, masters: Mapping[str, Tensor]) -> set[str]:
        """Which of these master copies are not of their parameters' present values, on this or another rank."""
        found = {key for key, master in masters.items() if not self.chunks.fits_master(key, master)}
        return found if self.between is None else self.between.any_of("obsolete masters", list(masters), found)

    def master_of(self, key: str) -> Tensor | None:
        """As a whole, of all ranks; None where the parameter is its own."""
        return self.chunks.master_of(key) if self.between is None else self.between.whole_master(key)

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
            self.executor.open_home(chunk)
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
            wanted = wanted or (lambda key, kind: True)
            tiles = list(tiles_of(self.chunks, order, has_states, wanted, tile_bytes))
            tensors = saved_tensors(self.chunks, order, has_states, wanted)
            owed = {chunk: flight.changes(chunk) for chunk in order}
            on_gpu = [place.is_updated_on_gpu and place.chunk.optimised_numel > 0 for place in self.chunks.placed]
            written = Written(self.chunks)
            kept = CopyOnUpdate(tiles, owed, self.lanes, self.host, flight.moment(), on_gpu.__getitem__, written)
            self.performer.saving = kept
            return Snapshot(tensors, tiles, kept, self.lanes)

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
            self.save_under_way()
            values = self._before.copies(self.chunks)
            is_alone = self.between is None
            readable = self.plan.update is Update.DEFERRED and self.lanes.failure is None and is_alone
            with held:
                is_plain()
                self._before.give_back(self.chunks, values, self.gradients.read if readable else lambda key: None)
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
        if self._collectives is not None:
            self._collectives.ranks.close()


def _owes_others(lanes: weakref.ref[Lanes]) -> Callable[[], bool]:
    """For the watchman, whose threads must not keep a run alive."""
    return lambda: (found := lanes()) is None or found.owes_others


def alone(value: Tensor) -> Tensor:
    """The same memory under a storage that begins and ends with this tensor. Nothing keeps the memory alive."""
    assert value.is_contiguous()
    memory = (ctypes.c_uint8 * value.nbytes).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=value.dtype).view(value.shape)
