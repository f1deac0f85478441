"""The public functions, and the only place that wires profile, plan, schedule and runtime together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from hightide.integrations import lora, transformers
from hightide.ir.block import ModelProfile
from hightide.ir.limits import DiskLimit, Limits
from hightide.ir.plan import Forecast, GradientDtype, Plan, Update
from hightide.ir.tier import Tier
from hightide.ir.units import format_bytes
from hightide.loading.unloaded import forget, origins_in
from hightide.loading.values import first_values
from hightide.observe.recorder import Recording
from hightide.observe.recorder import record as record_run
from hightide.observe.stats import Stats, read_stats
from hightide.observe.watch import Watch
from hightide.optim.optimizer import WrappedOptimizer, wrap_optimizer
from hightide.optim.registry import rule_for
from hightide.planner.infeasible import InfeasiblePlan
from hightide.planner.problem import Terms
from hightide.planner.solution import Searched, Solution
from hightide.planner.verify.check_plan import check_plan, check_states
from hightide.posing import GpuRoom, Profiled, measured_products, problem_of, rehearsed_profile, room_on, solved
from hightide.process.interrupts import deferred, held
from hightide.process.progress import shown, tell
from hightide.process.system import free_host_bytes, resident_bytes
from hightide.profiler.model.block_finder import BlockChoice
from hightide.profiler.model.call_tree import Batch
from hightide.profiler.model.model_profile import profile_calls
from hightide.profiler.model.probe import ProbeResult
from hightide.profiler.model.probe_record import CallRecord
from hightide.profiler.model.values import made_up
from hightide.profiler.switches import checkpointing
from hightide.runtime.run import Run
from hightide.runtime.surgery import check_modules, run_of, unwrap_modules, wrap_modules

S = TypeVar("S", bound=Solution)
GPU_HEADROOM = 0.95  # of the GPU's free memory: the allocator's fragments and libraries' workspaces need some


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
    accumulate: int = 1,
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
    backward before each step, each time with a batch like the example: the step is planned as a whole.
    """
    place = chosen_device(device)
    if plan is not None and not isinstance(plan, Plan):
        raise ValueError(f"plan is a {type(plan).__name__}; pass a Plan, such as hightide.Plan.load('plan.json')")
    _check_limits(limits)
    if plan is not None and (_sets_memory(limits) or micro_batch is not None):
        raise ValueError(
            "plan= already fixes limits and micro_batch; pass either plan= or these, not both (of limits, only disk=: "
            "a plan does not say in which folder)"
        )
    rule = rule_for(check_fresh(model, optimizer))
    timing = _timing(update)
    if plan is not None and timing not in (Update.DEFERRED, plan.update):  # the default asks for nothing
        raise ValueError(
            f"update={update!r}, but the plan was made with update={str(plan.update)!r}; make a new plan with it"
        )
    _check_accumulate(accumulate, plan)
    rounding = _gradients(gradients)
    if plan is not None and rounding not in (GradientDtype.FLOAT32, plan.gradients):
        raise ValueError(
            f"gradients={gradients!r}, but the plan was made with gradients={str(plan.gradients)!r}; make a new plan"
        )
    disks = () if limits is None else limits.disks
    _check_disks(disks)
    run: Run | None = None
    wrapped: WrappedOptimizer | None = None
    try:
        with deferred, shown("hightide.wrap"), checkpointing.off_unless_it_fails(model):
            profiled = profile, probed, _ = _profile(model, optimizer, batch, blocks, place)
            solution: Solution
            if plan is None:
                sizes = _resolve(limits or Limits(), place, model, optimizer)
                terms = Terms(*sizes, timing, micro_batch, rule.states, rounding, _disk_bytes(disks), accumulate)
                solution = _searched(profiled, optimizer, place, compile, terms, disks)
                solution = _moving_in(solution, model, optimizer, place)
            else:
                check_plan(profile, plan)
                check_states(plan, rule.states)
                rehearsed = partial(rehearsed_profile, profiled, optimizer, place, compile, plan.gpu_limit_bytes)
                solution = _verified(Solution.of(profile, plan), rehearsed)
                if plan.is_edited:
                    solution = solution.described()
                if place.type == "cuda":
                    _warn_of_room(room_on(place, model, optimizer), plan)
            if place.type == "cuda":
                moving = solution if plan is None else _moving_in(solution, model, optimizer, place)
                _warn_of_moving_in(moving.plan)
            adapted = {id(param) for param in lora.adapted_parameters(model)}
            check_modules(
                model, solution.profile, probed, {name for name, p in model.named_parameters() if id(p) in adapted}
            )
            checks = transformers.training_checks(model, batch)
            values = first_values(model)
            around = transformers.around_call(model)
            run = Run(model, solution, probed, checks, place, compile, values, around, disks=disks)
            run.products = measured_products(place)
            for param in lora.adapted_parameters(model):
                run.chunks.ignore_version(run.keys[id(param)])
            forget(model)
            wrapped = wrap_optimizer(optimizer, run)
            run.settle()
            wrap_modules(run)
            if isinstance(solution, Searched):
                run.observer = Watch(run, solution)
            else:  # a plan that the user brings is never changed
                _warn_of_reserve(run.forecast, run.plan.gpu_limit_bytes)
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
    accumulate: int = 1,
) -> Plan:
    """The plan that `wrap` would use, without touching the model."""
    rule, place = rule_for(check_fresh(model, optimizer)), chosen_device(device)
    timing, rounding = _timing(update), _gradients(gradients)
    _check_limits(limits)
    _check_accumulate(accumulate)
    disks = () if limits is None else limits.disks
    _check_disks(disks)
    with deferred, shown("hightide.plan"), checkpointing.off(model):
        profiled = _profile(model, optimizer, batch, blocks, place)
        sizes = _resolve(limits or Limits(), place, model, optimizer)
        terms = Terms(*sizes, timing, micro_batch, rule.states, rounding, _disk_bytes(disks), accumulate)
        return _moving_in(_searched(profiled, optimizer, place, compile, terms, disks), model, optimizer, place).plan


def unwrap(model: nn.Module) -> nn.Module:
    """Makes a wrapped model plain again, with its present values; its wrapped optimizer must not be used any more."""

    def is_plain() -> None:
        unwrap_modules(model)
        checkpointing.switch_on_again(model)

    _run(model).close(is_plain)
    return model


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


def check_fresh(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    if run_of(model) is not None or any(run_of(module) is not None for module in model.modules()):
        raise ValueError("this model is wrapped already; use it as it is, or call hightide.unwrap(model) first")
    if isinstance(optimizer, WrappedOptimizer):
        raise ValueError(
            "this optimizer belongs to a wrapped model already; make a new one over this model's parameters"
        )
    return optimizer


def _check_limits(limits: Limits | None) -> None:
    if limits is not None and not isinstance(limits, Limits):
        raise ValueError(f"limits is a {type(limits).__name__}; pass hightide.Limits(gpu='24GiB', host='96GiB')")


def _check_disks(disks: Sequence[DiskLimit]) -> None:
    """Whether or not the plan will use them."""
    for disk in disks:
        if not Path(disk.path).is_dir():
            raise ValueError(f"Limits(disk) names {disk.path!r}: there is no such folder; make it, or name another")


def _sets_memory(limits: Limits | None) -> bool:
    return limits is not None and (limits.gpu, limits.host) != (None, None)


def _disk_bytes(disks: Sequence[DiskLimit]) -> int:
    return sum(disk.num_bytes for disk in disks)


def _check_accumulate(accumulate: int, plan: Plan | None = None) -> None:
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r}; pass how many times backward is called before each step, as 4")
    if plan is not None and accumulate not in (1, plan.accumulate):
        raise ValueError(
            f"accumulate={accumulate}, but the plan was made with accumulate={plan.accumulate}; make a new plan with it"
        )


def has_cuda() -> bool:
    return torch.cuda.is_available()


def chosen_device(device: str | torch.device | None) -> torch.device:
    """CUDA where there is one, else the simulated accelerator, which lives in RAM."""
    if device is None:
        device = "cuda" if has_cuda() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device={device!r} is no device of torch; use 'cuda', 'cpu' (the simulated accelerator) or None"
        ) from error
    if place.type == "cuda" and not has_cuda():
        raise ValueError(f"device={str(device)!r}, but this machine has 0 usable CUDA devices; leave device out")
    if place.type == "cpu" and place.index is not None:
        raise ValueError(f"device={str(device)!r}, but there is one simulated accelerator; use 'cpu' or None")
    if place.type not in ("cuda", "cpu"):
        raise ValueError(
            f"device={str(device)!r} is not supported; use 'cuda', 'cpu' (the simulated accelerator) or None"
        )
    return torch.device("cuda", torch.cuda.current_device()) if place == torch.device("cuda") else place


def _timing(update: str) -> Update:
    try:
        return Update(update)
    except ValueError:
        raise ValueError(f"update={update!r} is not a timing; use 'deferred' or 'in_backward'") from None


def _gradients(gradients: str) -> GradientDtype:
    try:
        return GradientDtype(gradients)
    except ValueError:
        raise ValueError(f"gradients={gradients!r} is not supported; use 'float32' or 'param'") from None


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
    profiled: Profiled,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    compile: bool,
    terms: Terms,
    disks: Sequence[DiskLimit],
) -> Searched:
    problem = problem_of(profiled, optimizer, device, compile, terms, disks)
    solution = solved(problem, profiled, device, compile)
    solution.verify()
    return solution


def _moving_in(solution: S, model: nn.Module, optimizer: torch.optim.Optimizer, place: torch.device) -> S:
    """With what the host needs meanwhile. What the process has beside it is the same for all plans only where blocks
    run on a GPU: there it has been compiled for, and has its kernels."""
    on_host = {name: param for name, param in model.named_parameters() if param.device.type == "cpu"}
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    waiting_bytes = sum(state.nbytes for state in states if state.device.type == "cpu")
    model_bytes = sum(param.nbytes for param in on_host.values())
    process_bytes = max(0, resident_bytes() - model_bytes - waiting_bytes) if place.type == "cuda" else 0
    return solution.moving_in(set(on_host), waiting_bytes, process_bytes)


def _warn_of_moving_in(plan: Plan) -> None:
    needed_bytes = plan.forecast.moving_host_bytes
    if needed_bytes > max(plan.host_limit_bytes, plan.forecast.host_peak_bytes):
        warnings.warn(
            f"the host may have {format_bytes(plan.host_limit_bytes)}, and has {format_bytes(needed_bytes)} while the "
            "model's values move from the CPU to their places, because the model is there now. Afterwards they are "
            f"{format_bytes(plan.forecast.host_peak_bytes)}. A model of hightide.from_pretrained, or one that was made "
            'under torch.device("meta"), is never there as a whole',
            stacklevel=3,
        )


def _verified(solution: Solution, rehearsed: Callable[[], ModelProfile | None]) -> Solution:
    """A plan that does not fit the GPU may have been searched for blocks that were `rehearsed`: compiled ones take less
    than tensors without values tell."""
    try:
        solution.verify()
    except InfeasiblePlan as refusal:
        measured = rehearsed() if refusal.tier is Tier.GPU else None
        if measured is None:
            raise
        solution = Solution.of(measured, solution.plan)
        solution.verify()
    return solution


def _warn_of_reserve(forecast: Forecast, limit_bytes: int) -> None:
    """Tensors fit for sure; what torch reserves beside them is an estimate, and no reason to refuse a plan."""
    above_bytes = forecast.gpu_bytes - limit_bytes
    if above_bytes > 0:
        warnings.warn(
            f"this plan's tensors take up to {format_bytes(forecast.gpu_peak_bytes)} of the GPU's "
            f"{format_bytes(limit_bytes)}, and torch is expected to reserve {format_bytes(forecast.gpu_bytes)} for "
            f"them: it may run out of memory. Make a plan with a limit that is {format_bytes(above_bytes)} lower, or "
            "raise gpu_limit_bytes of this one by as much",
            stacklevel=3,
        )


def _warn_of_room(room: GpuRoom, plan: Plan) -> None:
    if plan.gpu_limit_bytes > room.free_bytes:
        warnings.warn(
            f"this plan may take {format_bytes(plan.gpu_limit_bytes)} of the GPU, and expects to take "
            f"{format_bytes(plan.forecast.gpu_bytes)}, but {room}: it may run out of memory. Free some, or make a plan "
            f"with limits=Limits(gpu={int(room.free_bytes * GPU_HEADROOM)})",
            stacklevel=3,
        )


def _resolve(
    limits: Limits, device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, int]:
    """Fills in what the user left open, and lowers a limit of the GPU that others leave no room for. The simulated
    accelerator shares the RAM with the host tier."""
    free_bytes = free_host_bytes()
    gpu_bytes, host_bytes = limits.gpu_bytes, limits.host_bytes
    if device.type == "cuda":
        if gpu_bytes is None:
            gpu_bytes = int(torch.cuda.mem_get_info(device)[0] * GPU_HEADROOM)
        elif gpu_bytes > (room := room_on(device, model, optimizer)).free_bytes:
            planned_bytes = int(room.free_bytes * GPU_HEADROOM)
            asked, planned = format_bytes(gpu_bytes), format_bytes(planned_bytes)
            warnings.warn(f"Limits(gpu) is {asked}, but {room}: planned for {planned}", stacklevel=3)
            gpu_bytes = planned_bytes
        return gpu_bytes, host_bytes or free_bytes
    if gpu_bytes is None:
        gpu_bytes = free_bytes // 2 if host_bytes is None else max(1, free_bytes - host_bytes)
    return gpu_bytes, host_bytes or max(1, free_bytes - gpu_bytes)
