"""The public functions, and the only place that wires profile, plan, schedule and runtime together."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from hightide.integrations import transformers
from hightide.ir.action import Mode, Schedule
from hightide.ir.block import ModelProfile
from hightide.ir.limits import Limits
from hightide.ir.plan import Plan, Update
from hightide.machine import free_host_bytes
from hightide.measured import Stats, read_stats
from hightide.optim.optimizer import WrappedOptimizer, wrap_optimizer
from hightide.optim.rule import rule_for
from hightide.planner.explain import explain
from hightide.planner.lower import lower
from hightide.planner.rule import plan_by_rule
from hightide.planner.verify import check_plan, verify
from hightide.profiler.model import profile_model
from hightide.profiler.probe import ProbeResult
from hightide.profiler.split import Batch
from hightide.runtime.run import Run
from hightide.runtime.surgery import check_modules, run_of, unwrap_modules, wrap_modules


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    limits: Limits | None = None,
    plan: Plan | None = None,
    micro_batch: int | None = None,
    update: str = "deferred",
    device: str | torch.device | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Makes a model and its optimizer train within limits; the training loop stays as it is.

    `batch` is one whole step's batch, as an example: a mapping (keyword arguments), a tuple (positional arguments)
    or a tensor.
    `plan` uses a plan made earlier instead of making one. `micro_batch` pins the micro-batch size.
    `update="in_backward"` is a promise
    of one step per backward and no clipping, which hides more of the update; a broken promise raises.
    """
    _check_device(device)
    if plan is not None and (limits is not None or micro_batch is not None):
        raise ValueError("plan= already fixes limits and micro_batch; pass either plan= or these, not both")
    rule = rule_for(_check_fresh(model, optimizer))
    timing = _timing(update)
    if plan is not None and timing not in (Update.DEFERRED, plan.update):  # the default asks for nothing
        raise ValueError(
            f"update={update!r}, but the plan was made with update={str(plan.update)!r}; make a new plan with it"
        )
    profile, probed = _profile(model, optimizer, batch)
    if plan is None:
        plan, schedules = _make_plan(profile, limits, timing, micro_batch, rule.num_moments)
    else:
        check_plan(profile, plan)
        schedules = _lower(profile, plan)
    _verify(profile, plan, schedules)
    check_modules(model, profile.blocks)
    transformers.prepare(model)
    run = Run(model, profile, probed, plan, schedules, transformers.training_kwargs(model))
    wrapped = wrap_optimizer(optimizer, run)
    wrap_modules(run)
    return model, wrapped


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    limits: Limits | None = None,
    micro_batch: int | None = None,
    update: str = "deferred",
) -> Plan:
    """The plan that `wrap` would use, without touching the model."""
    rule = rule_for(_check_fresh(model, optimizer))
    profile, _ = _profile(model, optimizer, batch)
    made, schedules = _make_plan(profile, limits, _timing(update), micro_batch, rule.num_moments)
    _verify(profile, made, schedules)
    return made


def unwrap(model: nn.Module) -> nn.Module:
    """Makes a wrapped model plain again, with its present values; its wrapped optimizer must not be used any more."""
    run = _run(model)
    unwrap_modules(model)
    run.close()
    return model


def stats(model: nn.Module) -> Stats:
    """What the run has measured so far, beside its forecast."""
    return read_stats(_run(model))


def _run(model: nn.Module) -> Run:
    run = run_of(model)
    if run is None:
        raise ValueError(f"this {type(model).__name__} is not wrapped; pass the model that hightide.wrap returned")
    return run


def _check_fresh(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
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


def _check_device(device: str | torch.device | None) -> None:
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(
            f"device={str(device)!r} is not supported yet: this version runs on the simulated accelerator only; "
            "leave device out"
        )


def _timing(update: str) -> Update:
    try:
        return Update(update)
    except ValueError:
        raise ValueError(f"update={update!r} is not a timing; use 'deferred' or 'in_backward'") from None


def _profile(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[ModelProfile, ProbeResult]:
    return profile_model(model, optimizer, batch)


def _make_plan(
    profile: ModelProfile, limits: Limits | None, update: Update, micro_batch: int | None, num_moments: int
) -> tuple[Plan, dict[Mode, Schedule]]:
    gpu_bytes, host_bytes = _resolve(limits or Limits())
    made = plan_by_rule(profile, gpu_bytes, host_bytes, update, micro_batch, num_moments)
    schedules = _lower(profile, made)
    return replace(made, explanation=explain(profile, made, schedules)), schedules


def _resolve(limits: Limits) -> tuple[int, int]:
    """Fills in what the user left open. Without a GPU the simulated accelerator shares the RAM with the host tier."""
    if limits.disks:
        raise ValueError("Limits(disk=...) is not supported yet: this version has no disk tier; leave disk out")
    free_bytes = free_host_bytes()
    gpu_bytes, host_bytes = limits.gpu_bytes, limits.host_bytes
    if gpu_bytes is None:
        gpu_bytes = free_bytes // 2 if host_bytes is None else max(1, free_bytes - host_bytes)
    if host_bytes is None:
        host_bytes = max(1, free_bytes - gpu_bytes)
    return gpu_bytes, host_bytes


def _lower(profile: ModelProfile, made: Plan) -> dict[Mode, Schedule]:
    modes = [Mode.TRAIN, Mode.EVAL] + ([Mode.ACCUMULATE] if made.update is Update.DEFERRED else [])
    return {mode: lower(profile, made, mode) for mode in modes}


def _verify(profile: ModelProfile, made: Plan, schedules: dict[Mode, Schedule]) -> None:
    for schedule in schedules.values():
        verify(profile, made, schedule, made.gpu_limit_bytes, made.host_limit_bytes)
