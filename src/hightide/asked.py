"""The user's arguments, checked; the device that was left out is found."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from hightide.doctor.conditions import IN_RAM
from hightide.doctor.disk_speed import filesystem_of
from hightide.free_memory import memory_limits
from hightide.ir.foreign import kind_of
from hightide.ir.limits import DiskLimit, Limits
from hightide.ir.plan import GradientDtype, Plan, Update
from hightide.optim.optimizer import WrappedOptimizer
from hightide.optim.registry import in_parts, rule_for
from hightide.optim.rule import Rule
from hightide.planner.problem import Terms
from hightide.profiler.model.block_finder import BlockChoice
from hightide.profiler.model.call_tree import Batch, call_arguments, flatten_call, tensors
from hightide.profiler.model.samples import refuse_nested
from hightide.runtime.surgery import run_of, wrapped_part

PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
Calls = int | Literal["auto"]  # of a step


@dataclass(frozen=True, eq=False)
class Asked:
    """The arguments of `wrap`. Checked: each by itself, and that none says other than a plan that is given."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    _: KW_ONLY
    device: torch.device
    limits: Limits | None = None
    plan: Plan | None = None  # that the user brings
    micro_batch: int | None = None
    update: str = Update.DEFERRED
    gradients: str = GradientDtype.FLOAT32
    compile: bool = False
    blocks: BlockChoice | None = None
    accumulate: Calls = 1
    ranks_on_node: int = 1  # which divide its memory and disks

    def __post_init__(self) -> None:
        plan = self.plan
        if plan is not None and not isinstance(plan, Plan):
            raise ValueError(f"plan is {kind_of(plan)}; pass a Plan, such as hightide.Plan.load('plan.json')")
        if self.limits is not None and not isinstance(self.limits, Limits):
            raise ValueError(f"limits is {kind_of(self.limits)}; pass hightide.Limits(gpu='24GiB', host='96GiB')")
        limits = self.bounds
        if plan is not None and ((limits.gpu, limits.host) != (None, None) or self.micro_batch is not None):
            raise ValueError(
                "plan= already fixes limits and micro_batch; pass either plan= or these, not both (of limits, only "
                "disk=: a plan does not say in which folder)"
            )
        rule_for(check_fresh(self.model, self.optimizer))
        timing = timing_of(self.update)
        if plan is not None and timing not in (Update.DEFERRED, plan.update):  # the default asks for nothing
            raise ValueError(
                f"update={self.update!r}, but the plan was made with update={str(plan.update)!r}; make a new plan with "
                "it"
            )
        check_accumulate(self.accumulate, plan)
        rounding = gradient_dtype(self.gradients)
        if plan is not None and rounding not in (GradientDtype.FLOAT32, plan.gradients):
            raise ValueError(
                f"gradients={self.gradients!r}, but the plan was made with gradients={str(plan.gradients)!r}; make a "
                "new plan"
            )
        check_disks(limits.disks)
        refuse_nested(tensors(flatten_call(*call_arguments(self.batch))[0]), "a tensor of the batch")

    @property
    def bounds(self) -> Limits:
        """The limits; those that were left out are open."""
        return self.limits or Limits()

    @cached_property
    def rule(self) -> Rule:
        """Of the optimizer."""
        return rule_for(self.optimizer)

    @property
    def cuts(self) -> bool:
        """The batch is all of a step, and the plan says in how many calls it comes."""
        return self.accumulate == "auto"

    @property
    def disks(self) -> tuple[DiskLimit, ...]:
        """What this rank has of them."""
        return tuple(DiskLimit(disk.path, disk.num_bytes // self.ranks_on_node) for disk in self.bounds.disks)

    def terms(self) -> Terms:
        """Of a plan that is to be made, with what is free now where the user has left a limit open."""
        gpu_bytes, host_bytes = memory_limits(self.bounds, self.device, self.model, self.optimizer, self.ranks_on_node)
        return Terms(
            gpu_bytes=gpu_bytes,
            host_bytes=host_bytes,
            update=timing_of(self.update),
            micro_batch=self.micro_batch,
            states=self.rule.states,
            gradients=gradient_dtype(self.gradients),
            disk_bytes=sum(disk.num_bytes for disk in self.disks),
            accumulate=1 if self.accumulate == "auto" else self.accumulate,
            in_parts=in_parts(self.rule, self.optimizer),
        )


def check_fresh(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {kind_of(model)}; pass a torch.nn.Module")
    parallel = next((module for module in model.modules() if isinstance(module, PARALLEL)), None)
    if parallel is not None:
        raise ValueError(
            f"the model is, or has in it, a {type(parallel).__name__}, which averages gradients itself; pass what is "
            "in it (model.module): under torchrun hightide does what it does, and shards the model too"
        )
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise ValueError(
            "the model is what torch.compile returned; pass the model itself, and compile=True, which compiles its "
            "blocks"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is {kind_of(optimizer)}; pass a torch.optim.Optimizer")
    if (run := run_of(model)) is not None and run.model is model:
        raise ValueError("this model is wrapped already; use it as it is, or call hightide.unwrap(model) first")
    if part := wrapped_part(model):
        raise ValueError(
            f"{part}, which has its values and updates it: two wrapped models cannot share parameters. Put both into "
            "one module and wrap that, with one optimizer; or call hightide.unwrap on the other first"
        )
    check_kind(model)
    if isinstance(optimizer, WrappedOptimizer):
        raise ValueError(
            "this optimizer belongs to a wrapped model already; make a new one over this model's parameters"
        )
    return optimizer


def check_kind(model: nn.Module) -> None:
    """What cannot be called as blocks are."""
    if inspect.isgeneratorfunction(model.forward):
        raise ValueError(
            f"the forward of {type(model).__name__} is a generator, so its blocks run after the model's call has "
            "ended; return a list of what it yields"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"the module {(name or type(module).__name__)!r} is TorchScript, whose parameters and code hightide "
                "cannot exchange; pass the Python module that it was made from (compile=True compiles blocks). "
                "Functions of torch.jit.script that blocks call are fine"
            )


def check_disks(disks: Sequence[DiskLimit]) -> None:
    """Whether or not the plan will use them."""
    for disk in disks:
        if not Path(disk.path).is_dir():
            raise ValueError(f"Limits(disk) names {disk.path!r}: there is no such folder; make it, or name another")
        kind = filesystem_of(Path(disk.path)).kind
        if kind in IN_RAM:
            warnings.warn(
                f"Limits(disk) names {disk.path!r}, which is a {kind}: what is put there lies in host memory, beside "
                "the host's limit; name a folder on a real disk",
                stacklevel=1,  # from here, so that it is told once
            )


def check_accumulate(accumulate: Calls, plan: Plan | None = None) -> None:
    if accumulate == "auto":
        return
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


def timing_of(update: str) -> Update:
    try:
        return Update(update)
    except ValueError:
        raise ValueError(f"update={update!r} is not a timing; use 'deferred' or 'in_backward'") from None


def gradient_dtype(gradients: str) -> GradientDtype:
    try:
        return GradientDtype(gradients)
    except ValueError:
        raise ValueError(f"gradients={gradients!r} is not supported; use 'float32' or 'param'") from None
