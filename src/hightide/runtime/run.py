"""Everything that hightide keeps for one wrapped model, and what the model's swapped classes call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hightide.ir.limits import DiskLimit
from hightide.ir.plan import Update
from hightide.ir.refusal import Refused
from hightide.ir.tier import Tier
from hightide.planner.solution import Searched, Solution
from hightide.process.forks import Birthplace
from hightide.process.interrupts import deferred, uninterrupted
from hightide.process.progress import tell
from hightide.profiler.probe.probe_result import ProbeResult
from hightide.profiler.switches.caches import Caches
from hightide.runtime.alike import begin_alike, drawing_alike, is_watched_by, keep_alike, lanes_of
from hightide.runtime.before import Before, move_buffers
from hightide.runtime.blocks import rng
from hightide.runtime.blocks.autocast import Autocast
from hightide.runtime.blocks.block_runner import BlockRunner
from hightide.runtime.blocks.compiled import CompiledForwards
from hightide.runtime.blocks.splits import Splits
from hightide.runtime.chunks.between_ranks import BetweenRanks
from hightide.runtime.chunks.chunks import Chunks
from hightide.runtime.chunks.moving import StatesOnTheMove, go_over
from hightide.runtime.chunks.moving_shards import ShardsOnTheMove
from hightide.runtime.chunks.origin import FirstValues
from hightide.runtime.gradients.gradients import Gradients
from hightide.runtime.gradients.ranked_gradients import RankedGradients
from hightide.runtime.guards.anchor import Anchor
from hightide.runtime.guards.first_look import FirstLooks
from hightide.runtime.guards.inner_hooks import InnerHooks
from hightide.runtime.guards.unchanged import Unchanged
from hightide.runtime.lanes.lanes import Lanes
from hightide.runtime.model_passes import ModelPasses
from hightide.runtime.observer import Observer
from hightide.runtime.plan_stores import PlanStores, forecast_on
from hightide.runtime.run_context import RunContext
from hightide.runtime.run_values import RunValues
from hightide.runtime.same_acts import Acts
from hightide.runtime.schedule.executor import Executor
from hightide.runtime.schedule.in_flight import InFlight
from hightide.runtime.schedule.performer import Performer
from hightide.runtime.step_work import StepWork
from hightide.runtime.tables.host_embedding import HostEmbedding
from hightide.runtime.waiting.activations import Stashes
from hightide.runtime.waiting.inputs_on_disk import InputsOnDisk
from hightide.shard.collectives import Collectives
from hightide.shard.watchman import Watchman
from hightide.stores.disk import DiskStore
from hightide.stores.host_arena import HostArena
from hightide.stores.store import Accelerator

FORWARD_BEGINS = "the beginning of a forward"  # where ranks tell whether one has a larger batch than all before


class Run(RunValues):
    def __init__(
        self,
        model: nn.Module,
        solution: Solution,
        probed: ProbeResult,
        context: RunContext,
        device: torch.device = rng.CPU,
        compile: bool = False,
        learns: bool = True,
        disks: Sequence[DiskLimit] = (),
        collectives: Collectives | None = None,
    ) -> None:
        """`learns` False: a rehearsal, which looks at no block (see first_look.py). `disks`: for plans that use any.
        `collectives`: of a plan for several ranks."""
        super().__init__()
        self._collectives = collectives
        self.acts = None if collectives is None else Acts()
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
            self._set_up(solution, device, context.first_values)
        except BaseException:
            self.retreat()
            raise
        self.chunks.binding.ignored_versions.update(context.unwritten)
        self.passes = ModelPasses(self, context.check_call, context.around_call or (lambda args, kwargs: nullcontext()))
        self.splits = Splits(self)
        self.observer: Observer | None = None
        self.batches = context.batches
        self.admission = None if context.admission is None else context.admission(self)
        self.anchor = Anchor(device)
        self.options: Callable[[], dict[str, str]] = dict  # of the optimizer's groups
        self.between_passes: Callable[[], None] | None = None  # called before each pass, while a recording is on
        self.work = StepWork()
        self.products = context.products
        self.num_passes = 0
        self.num_steps = 0
        self.step_s = 0.0
        self._stepped_at_s: float | None = None
        self.save_pretrained, self.written_here = context.save_pretrained, context.written_here
        self.tells_all = False  # state dicts of several ranks are whole on each of them
        self.save_under_way: Callable[[], object] = lambda: None  # of several ranks: waits for its end
        self.when_memory_is_fixed: Callable[[], object] = lambda: None  # called when memory of another plan is in place

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
        self.flight = InFlight(self.lanes)
        if self.watchman is not None:
            is_watched_by(self.watchman, self.flight)
        known = (self.profile, self.chunks, plan.update, self.flight)
        self.gradients = Gradients(*known) if self.between is None else RankedGradients(*known, self.between)
        self.make_executor(solution)

    def retreat(self) -> None:
        """The model is as before, values included. For a run that has not begun, however much of it there is."""
        there = vars(self)
        with uninterrupted:
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

    def begins_forward(self, is_larger: bool) -> bool:
        """Of training. Whether any rank has a larger batch than all before. As all meet here, they compare what they
        have done since they last did."""
        if self._collectives is None or self.acts is None:
            return is_larger
        return any(map(any, self.acts.compare(self._collectives, FORWARD_BEGINS, self.options(), bytes([is_larger]))))

    def check_same_acts(self, when: str) -> None:
        """Before values leave for good. All ranks call it."""
        if self._collectives is not None and self.acts is not None:
            self.acts.compare(self._collectives, when, self.options())

    def any_rank(self, what: str, value: bool) -> bool:
        return value if self._collectives is None else self._collectives.any_true(what, value)

    def keep_alike(self) -> None:
        """At the end of a backward."""
        if self._collectives is not None:
            keep_alike(self._collectives, self.model)

    def on_the_move(self) -> StatesOnTheMove:
        """Its values, out of their places on the GPU."""
        if self.between is None:
            return StatesOnTheMove(self.chunks, self.gradients)
        return ShardsOnTheMove(self.chunks, self.gradients, self.between)

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
        streams, threads = self.lanes.streams, self.lanes.update_threads
        self.performer = Performer(self.chunks, self.gradients, self.stashes, streams.fence, threads.run)
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
        with uninterrupted:  # between its two places, a value is nowhere
            self.executor.come_to_rest()
            try:
                go_over(self, solution)
            except (torch.OutOfMemoryError, MemoryError) as error:
                error.add_note("This was asked for by a move to another plan, which was given up: the old plan stays.")
                raise
            self.fix_memory()  # by now nothing of the old plan's memory is left: that of the new one may become real

    def make_runner(self, block: int, original: Callable[..., Any]) -> BlockRunner:
        """`original`: the forward of its module's own class."""
        on_host = self.plan.blocks[block].compute is Tier.HOST
        return (HostEmbedding if on_host else BlockRunner)(self, block, original)

    def fix_memory(self) -> None:
        """Once all values are in their places, the optimizer's too: fixes memory there. Earlier, what is still to move
        in would exist twice."""
        tell("pinning host memory")
        self.host.pin()
        self.gpu.enforce_limit()
        self.when_memory_is_fixed()

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
            with uninterrupted:
                is_plain()
                self._before.give_back(self.chunks, values, self.gradients.read if readable else lambda key: None)
                self.discard()

    def discard(self) -> None:
        """Frees everything; the model is of no use any more."""
        self.looks.forget()
        if self.performer.updating.saving is not None:
            self.performer.updating.saving.close()
        self.lanes.close()
        if self.performer.updating.updates is not None:
            self.performer.updating.updates.close()
        self.chunks.close()
        self.stores.close()
        if self._collectives is not None:
            self._collectives.ranks.close()
