"""The public functions, and the only place that wires profile, plan, schedule and runtime together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from hightide.agreed_plan import plan_of_all
from hightide.asked import (
    check_accumulate,
    check_disks,
    check_fresh,
    check_limits,
    chosen_device,
    disk_bytes_of,
    gradient_dtype,
    known_calls,
    memory_limits,
    sets_memory,
    timing_of,
    warn_of_moving_in,
    warn_of_reserve,
    warn_of_room,
)
from hightide.checkpoint.pretrained_folder import save_pretrained
from hightide.integrations import lora, transformers
from hightide.ir.block import ModelProfile
from hightide.ir.foreign import kind_of
from hightide.ir.limits import DiskLimit, Limits
from hightide.ir.plan import GradientDtype, Plan, Update
from hightide.loading.unloaded import forget, origins_in, seem_unloaded
from hightide.loading.values import first_values
from hightide.observe.larger_batches import LargerBatches
from hightide.observe.ranked_batches import RankedLargerBatches
from hightide.observe.ranked_watch import RankedWatch
from hightide.observe.recorder import Recording
from hightide.observe.recorder import record as record_run
from hightide.observe.stats import Stats, read_stats
from hightide.observe.watch import Watch
from hightide.optim.optimizer import WrappedOptimizer, wrap_optimizer
from hightide.optim.registry import in_parts, rule_for
from hightide.plan_again import plan_again
from hightide.planner.problem import Problem, Terms
from hightide.planner.solution import Searched, Solution
from hightide.planner.verify.check_plan import check_plan, check_states
from hightide.posing import (
    Profiled,
    is_small,
    machine_of,
    measured_products,
    problem_of,
    rehearsed_profile,
    room_on,
    solved,
    verified,
)
from hightide.process.interrupts import deferred, held
from hightide.process.progress import shown, tell
from hightide.process.system import resident_bytes
from hightide.profiler.fake.values import made_up
from hightide.profiler.model.batch_sizes import BatchSizes
from hightide.profiler.model.block_finder import BlockChoice
from hightide.profiler.model.call_tree import Batch
from hightide.profiler.model.model_profile import profile_calls
from hightide.profiler.model.samples import Samples, possible_samples, samples_along_first
from hightide.profiler.probe.probe_record import CallRecord
from hightide.profiler.probe.probe_result import ProbeResult
from hightide.profiler.switches import checkpointing
from hightide.runtime.known_batches import KnownBatches
from hightide.runtime.run import Run
from hightide.runtime.surgery import check_modules, run_of, unwrap_modules, wrap_modules
from hightide.shard.agreement import check_same
from hightide.shard.collectives import Collectives
from hightide.shard.ranks import EVEN_ALONE_SWITCH, Ranks, talks_even_alone
from hightide.shard.watchman import Patience

S = TypeVar("S", bound=Solution)


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    limits: Limits | None = None,
    plan: Plan | None = None,
    micro_batch: int | None = None,
    update: str = "deferred",
    gradients: str = "float32",
    compile: bool = False,
    device: str | torch.device | None = None,
    blocks: BlockChoice | None = None,
    accumulate: int | Literal["auto"] = 1,
    group: ProcessGroup | None = None,
    timeout_s: float = Patience.timeout_s,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Makes a model and its optimizer train within limits; the training loop stays as it is. Returns the same model,
    and a new optimizer with the same groups and states: use it from now on in place of the one that was given.

    `batch` is one whole step's batch, as an example: a mapping (keyword arguments), a tuple (positional arguments) or
    a tensor. `plan` uses a plan made earlier instead of making one; where that uses a disk, `limits` says in which
    folder. `micro_batch` pins the micro-batch size.
    `update="in_backward"` is a promise of one step per backward and no clipping, which hides more of the update; a
    broken promise raises. `gradients="param"` rounds each finished gradient, whose sum is fp32, to its parameter's
    dtype: half the bytes to move and to keep on the host. `compile` compiles the blocks with torch.compile, equal ones
    once. `device`: CUDA where there is one, else 'cpu', the simulated accelerator: a bounded arena in RAM.
    `blocks` names the modules that move as a whole, by patterns of their names ("model.layers.*") or by their classes;
    by default they are found. A plan that was made with it needs it again. `accumulate` is how often the loop calls
    backward before each step, each time with a batch like the example: the step is planned as a whole. With "auto" the
    example is all samples of a step, and the plan says in how many equal calls the loop has to give them: its
    `accumulate`, of `num_samples` each.

    Under torchrun, or in a process of torch.distributed, all ranks train one model together, as with DDP: each calls
    this, with its own batches, and gradients are averaged. They are those of `group`, or of the default group. A rank
    that waits for another one gives up after `timeout_s`.
    """
    with _among_ranks(device, group, timeout_s) as (place, collectives):
        how = (limits, plan, micro_batch, update, gradients, compile, place, blocks, accumulate, collectives)
        return _wrapped(model, optimizer, batch, *how)


def wrap_again(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    before: Plan,
    *,
    limits: Limits | None = None,
    micro_batch: int | None = None,
    update: str = "deferred",
    gradients: str = "float32",
    compile: bool = False,
    device: str | torch.device | None = None,
    blocks: BlockChoice | None = None,
    accumulate: int | Literal["auto"] = 1,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """As `wrap`, for a run that goes on: with the plan that it had `before`, which was made for all that is asked here
    too. Where that cannot be used, another is made, which a warning tells; of several ranks all do the same. Unlike a
    plan that is given, it gives way to another where a larger batch comes."""
    with _among_ranks(device, None, Patience.timeout_s) as (place, collectives):
        how = (limits, None, micro_batch, update, gradients, compile, place, blocks, accumulate, collectives, before)
        return _wrapped(model, optimizer, batch, *how)


@contextmanager
def _among_ranks(
    device: str | torch.device | None, group: ProcessGroup | None, timeout_s: float
) -> Iterator[tuple[torch.device, Collectives | None]]:
    """Where a model is wrapped, and the ranks that do it together, if there are several. What is raised ends them."""
    place = chosen_device(device)
    is_any = device is None or torch.device(device) == torch.device("cuda")  # on several ranks a GPU for each
    ranks = Ranks.find(group, place.type if is_any else place, Patience(timeout_s=timeout_s), talks_even_alone())
    try:
        yield (place, None) if ranks.is_alone else (ranks.device, Collectives(ranks))
    except BaseException as error:
        if ranks.watchman is not None:
            ranks.watchman.fail(error)
        ranks.close()
        raise


def wrap_frozen(
    model: nn.Module,
    batch: Batch,
    *,
    limits: Limits | None = None,
    device: str | torch.device | None = None,
    blocks: BlockChoice | None = None,
    group: ProcessGroup | None = None,
    timeout_s: float = Patience.timeout_s,
) -> nn.Module:
    """Makes a model that is only evaluated run within limits, beside one that trains (the reference model of DPO, a
    teacher, a reward model): it has no gradients and no states, and what the GPU does not hold streams through it. Each
    of the models keeps to its own limits, so that together they keep to the sum. Returns the same model.

    All of its parameters must be frozen: `model.requires_grad_(False)`. Of several ranks each evaluates its own batches
    and has a shard of the model, as with `wrap`: together they have one copy, and all of them must call it."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {kind_of(model)}; pass a torch.nn.Module")
    trainable = [name for name, param in model.named_parameters() if param.requires_grad]
    if trainable:
        raise ValueError(
            f"{len(trainable)} parameters require gradients ({', '.join(trainable[:3])}), and a model without an "
            "optimizer is only evaluated; freeze it with model.requires_grad_(False), or use hightide.wrap"
        )
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError("the model has 0 parameters; there is nothing to move")
    # Evaluations run unsplit, and are planned so, where it is sure which dimension the samples are.
    whole = samples_along_first(batch) if possible_samples(batch) == [Samples.FIRST] else None
    wrapped, _ = wrap(
        model,
        torch.optim.SGD([first], lr=0.0),  # updates nothing: its only parameter is frozen
        batch,
        limits=limits,
        micro_batch=whole,
        device=device,
        blocks=blocks,
        group=group,
        timeout_s=timeout_s,
    )
    return wrapped


def _wrapped(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    limits: Limits | None,
    plan: Plan | None,
    micro_batch: int | None,
    update: str,
    gradients: str,
    compile: bool,
    place: torch.device,
    blocks: BlockChoice | None,
    accumulate: int | Literal["auto"],
    collectives: Collectives | None,
    before: Plan | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`collectives`: of several ranks. `before`: see `wrap_again`."""
    world, sharers = (1, 1) if collectives is None else (collectives.ranks.world, len(collectives.ranks.ranks_of_node))
    if plan is not None and not isinstance(plan, Plan):
        raise ValueError(f"plan is {kind_of(plan)}; pass a Plan, such as hightide.Plan.load('plan.json')")
    if plan is not None and plan.ranks != world:
        raise ValueError(
            f"the plan is for {plan.ranks} ranks, and there are {world}; leave plan= out: wrap makes one for these, "
            "which hightide.stats(model).plan has"
        )
    if plan is not None and plan.even_alone != (collectives is not None and world == 1):
        raise ValueError(
            f"the plan has even_alone={plan.even_alone}, which goes with {EVEN_ALONE_SWITCH}={int(plan.even_alone)} in "
            "the environment; set it, or make another plan"
        )
    check_limits(limits)
    if plan is not None and (sets_memory(limits) or micro_batch is not None):
        raise ValueError(
            "plan= already fixes limits and micro_batch; pass either plan= or these, not both (of limits, only disk=: "
            "a plan does not say in which folder)"
        )
    rule = rule_for(check_fresh(model, optimizer))
    timing = timing_of(update)
    if plan is not None and timing not in (Update.DEFERRED, plan.update):  # the default asks for nothing
        raise ValueError(
            f"update={update!r}, but the plan was made with update={str(plan.update)!r}; make a new plan with it"
        )
    check_accumulate(accumulate, plan)
    rounding = gradient_dtype(gradients)
    if plan is not None and rounding not in (GradientDtype.FLOAT32, plan.gradients):
        raise ValueError(
            f"gradients={gradients!r}, but the plan was made with gradients={str(plan.gradients)!r}; make a new plan"
        )
    disks = () if limits is None else limits.disks
    check_disks(disks)
    disks = tuple(DiskLimit(disk.path, disk.num_bytes // sharers) for disk in disks)
    run: Run | None = None
    wrapped: WrappedOptimizer | None = None
    try:
        with deferred, shown("hightide.wrap"), checkpointing.off_unless_it_fails(model):
            profiled = profile, probed, _ = _profile(model, optimizer, batch, blocks, place)
            solution: Solution
            if collectives is not None:
                given = "".join(one.digest for one in (plan, before) if one is not None)
                check_same(collectives, {"the model and its example batch": profile.fingerprint, "plan": given})
            again: Searched | None = None
            if before is not None:
                asked = (limits or Limits(), micro_batch, rule.states, accumulate == "auto")
                again = plan_again(before, *asked, profiled, model, optimizer, place, compile, disks, collectives)
            if again is not None:
                solution = again
            elif plan is None:
                sizes = memory_limits(limits or Limits(), place, model, optimizer, sharers)
                terms = Terms(
                    *sizes,
                    timing,
                    micro_batch,
                    rule.states,
                    rounding,
                    disk_bytes_of(disks),
                    known_calls(accumulate),
                    in_parts=in_parts(rule, optimizer),
                )

                def posed(terms: Terms) -> Problem:
                    nodes = None if collectives is None else collectives.ranks.nodes
                    if collectives is not None and place.type == "cuda":  # one at a time: each would disturb others
                        if collectives.ranks.local_rank == 0:
                            machine_of(place, is_small(profile))
                        collectives.exchange("measured machines", b"")
                    return problem_of(profiled, optimizer, place, compile, terms, disks, nodes)

                def planned(problem: Problem) -> Searched:
                    found = _searched(problem, profiled, place, compile, accumulate == "auto")
                    return _moving_in(found, model, optimizer, place)

                if collectives is None:
                    solution = planned(posed(terms))
                else:
                    solution = plan_of_all(collectives, profile, terms, posed, planned)
            else:
                check_plan(profile, plan)
                check_states(plan, rule.states)
                rehearsed = partial(rehearsed_profile, profiled, optimizer, place, compile, plan.gpu_limit_bytes)
                solution = verified(Solution.of(profile, plan), rehearsed)
                if plan.is_edited:
                    solution = solution.described()
                if place.type == "cuda":
                    warn_of_room(room_on(place, model, optimizer), plan)
            if place.type == "cuda":
                moving = _moving_in(solution, model, optimizer, place) if plan or again else solution
                warn_of_moving_in(moving.plan)
            adapted = {id(param) for param in lora.adapted_parameters(model)}
            check_modules(
                model, solution.profile, probed, {name for name, p in model.named_parameters() if id(p) in adapted}
            )
            checks = transformers.training_checks(model, batch)
            values = first_values(model)
            around = transformers.around_call(model)
            seem_unloaded(model, False)
            run = Run(
                model, solution, probed, checks, place, compile, values, around, disks=disks, collectives=collectives
            )
            run.products = measured_products(place)
            for param in lora.adapted_parameters(model):
                run.chunks.binding.ignored_versions.add(run.keys[id(param)])
            forget(model)
            if collectives is not None:
                run.save_pretrained = partial(save_pretrained, run)
            wrapped = wrap_optimizer(optimizer, run)
            run.settle()
            wrap_modules(run)
            run.batches = KnownBatches(BatchSizes.of(batch, probed.samples).with_samples(run.plan.num_samples))
            fixed = "" if plan is None else "it was given by plan=, and is never changed"
            if collectives is None:
                run.admission = LargerBatches(run, solution, fixed)
            else:
                run.admission = RankedLargerBatches(run, solution, collectives, fixed)
            if isinstance(solution, Searched) and again is None:  # one of before has been watched then
                run.observer = Watch(run, solution) if collectives is None else RankedWatch(run, solution, collectives)
            elif plan is not None:  # a plan that the user brings is never changed
                warn_of_reserve(run.forecast, run.plan.gpu_limit_bytes)
            return model, wrapped  # in here: what interrupts the end of the section is still undone
    except BaseException:
        with held:
            _undo(model, run, wrapped)
        raise


def _undo(model: nn.Module, run: Run | None, wrapped: WrappedOptimizer | None) -> None:
    """Model and optimizer are as before a `wrap` that was interrupted, or failed. A run that could not be made has done
    so itself."""
    if wrapped is not None:
        wrapped.give_back()
    if run is not None:
        run.retreat()
        checkpointing.switch_on_again(model)
    seem_unloaded(model, True)


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    limits: Limits | None = None,
    micro_batch: int | None = None,
    update: str = "deferred",
    gradients: str = "float32",
    compile: bool = False,
    device: str | torch.device | None = None,
    blocks: BlockChoice | None = None,
    accumulate: int | Literal["auto"] = 1,
) -> Plan:
    """The plan that `wrap` would use, without touching the model."""
    rule, place = rule_for(check_fresh(model, optimizer)), chosen_device(device)
    timing, rounding = timing_of(update), gradient_dtype(gradients)
    check_limits(limits)
    check_accumulate(accumulate)
    disks = () if limits is None else limits.disks
    check_disks(disks)
    with deferred, shown("hightide.plan"), checkpointing.off(model):
        profiled = _profile(model, optimizer, batch, blocks, place)
        sizes = memory_limits(limits or Limits(), place, model, optimizer)
        passes, parts = known_calls(accumulate), in_parts(rule, optimizer)
        terms = Terms(*sizes, timing, micro_batch, rule.states, rounding, disk_bytes_of(disks), passes, in_parts=parts)
        problem = problem_of(profiled, optimizer, place, compile, terms, disks)
        return _moving_in(
            _searched(problem, profiled, place, compile, accumulate == "auto"), model, optimizer, place
        ).plan


def unwrap(model: nn.Module) -> nn.Module:
    """Makes a wrapped model plain again, with its present values; its wrapped optimizer must not be used any more."""

    def is_plain() -> None:
        unwrap_modules(model)
        checkpointing.switch_on_again(model)

    _run(model).close(is_plain)
    return model


@contextmanager
def on_all_ranks(model: nn.Module) -> Iterator[None]:
    """Inside, `state_dict()` of the model and of its optimizer give whole tensors on each of several ranks, and not on
    the first alone: each then has room for all of them."""
    run = _run(model)
    before, run.tells_all = run.tells_all, True
    try:
        yield
    finally:
        run.tells_all = before


def stats(model: nn.Module) -> Stats:
    """What the run has measured so far, beside its forecast."""
    return read_stats(_run(model))


def record(model: nn.Module) -> AbstractContextManager[Recording]:
    """Records what every lane does and what the GPU holds, without waiting for it until the end:

    with hightide.record(model) as recording:
        ...  # a few steps
    recording.timeline.save("run.json")  # of the last one; `hightide simulate plan.json --measured run.json` shows it
    """
    return record_run(_run(model))


def _run(model: nn.Module) -> Run:
    run = run_of(model)
    if run is None:
        raise ValueError(f"this {type(model).__name__} is not wrapped; pass the model that hightide.wrap returned")
    return run


def _profile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    blocks: BlockChoice | None,
    device: torch.device,
) -> tuple[ModelProfile, ProbeResult, tuple[CallRecord, ...]]:
    tell("profiling the model")
    origins = origins_in(model)
    if not origins:
        return profile_calls(model, optimizer, batch, blocks, device=device)

    def loaded(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in origins:
            return made_up(tensor)
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        origins[id(tensor)].fill(values)
        return values

    return profile_calls(model, optimizer, batch, blocks, device=device, source=loaded)


def _searched(
    problem: Problem, profiled: Profiled, device: torch.device, compile: bool, cuts: bool = False
) -> Searched:
    solution = solved(problem, profiled, device, compile, cuts)
    solution.verify()
    return solution


def _moving_in(solution: S, model: nn.Module, optimizer: torch.optim.Optimizer, place: torch.device) -> S:
    """With what the host needs meanwhile. What the process has beside it is the same for all plans only where blocks
    run on a GPU: there it has been compiled for, and has its kernels."""
    on_host = {
        name: param for name, param in model.named_parameters() if param.device.type == "cpu" and not param.is_meta
    }
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    waiting_bytes = sum(state.nbytes for state in states if state.device.type == "cpu")
    model_bytes = sum(param.nbytes for param in on_host.values())
    process_bytes = max(0, resident_bytes() - model_bytes - waiting_bytes) if place.type == "cuda" else 0
    return solution.moving_in(set(on_host), waiting_bytes, process_bytes)
