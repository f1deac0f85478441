"""What the user asks for: arguments are checked, the device and the limits that were left out are found."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from hightide.doctor.conditions import IN_RAM
from hightide.doctor.disk_speed import filesystem_of
from hightide.ir.foreign import kind_of
from hightide.ir.limits import DiskLimit, Limits
from hightide.ir.plan import Forecast, GradientDtype, Plan, Update
from hightide.ir.units import format_bytes
from hightide.optim.optimizer import WrappedOptimizer
from hightide.posing import GpuRoom, room_on
from hightide.process.system import free_host_bytes
from hightide.runtime.surgery import run_of

GPU_HEADROOM = 0.95  # of the GPU's free memory: the allocator's fragments and libraries' workspaces need some


def check_fresh(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {kind_of(model)}; pass a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is {kind_of(optimizer)}; pass a torch.optim.Optimizer")
    if run_of(model) is not None or any(run_of(module) is not None for module in model.modules()):
        raise ValueError("this model is wrapped already; use it as it is, or call hightide.unwrap(model) first")
    if isinstance(optimizer, WrappedOptimizer):
        raise ValueError(
            "this optimizer belongs to a wrapped model already; make a new one over this model's parameters"
        )
    return optimizer


def check_limits(limits: Limits | None) -> None:
    if limits is not None and not isinstance(limits, Limits):
        raise ValueError(f"limits is {kind_of(limits)}; pass hightide.Limits(gpu='24GiB', host='96GiB')")


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


def sets_memory(limits: Limits | None) -> bool:
    return limits is not None and (limits.gpu, limits.host) != (None, None)


def disk_bytes_of(disks: Sequence[DiskLimit]) -> int:
    return sum(disk.num_bytes for disk in disks)


def known_calls(accumulate: int | Literal["auto"]) -> int:
    return 1 if accumulate == "auto" else accumulate


def check_accumulate(accumulate: int | Literal["auto"], plan: Plan | None = None) -> None:
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


def memory_limits(
    limits: Limits, device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer, sharers: int = 1
) -> tuple[int, int]:
    """Fills in what the user left open, and lowers a limit of the GPU that others leave no room for. The simulated
    accelerator shares the RAM with the host tier. `sharers`: ranks of this node, which divide its memory."""
    free_bytes = free_host_bytes() // sharers
    gpu_bytes, host_bytes = limits.gpu_bytes, limits.host_bytes
    host_bytes = None if host_bytes is None else host_bytes // sharers
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


def check_still_fits(
    plan: Plan,
    limits: Limits,
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sharers: int = 1,
) -> None:
    """Whether a plan that was made for these limits, by an earlier process, may be used by this one: of what the user
    leaves open there may be less now. `sharers`: as of `memory_limits`, and there may be more."""
    if device.type == "cuda" and plan.gpu_limit_bytes > (room := room_on(device, model, optimizer)).free_bytes:
        raise ValueError(f"it may take {format_bytes(plan.gpu_limit_bytes)} of the GPU, but {room}")
    free_bytes, needed_bytes = free_host_bytes() // sharers, plan.forecast.host_peak_bytes
    if limits.host_bytes is not None:
        free_bytes, needed_bytes = limits.host_bytes // sharers, plan.host_limit_bytes
    elif device.type == "cpu":
        needed_bytes += plan.forecast.gpu_bytes
    if needed_bytes > free_bytes:
        raise ValueError(
            f"it takes {format_bytes(needed_bytes)} of the host, which has {format_bytes(free_bytes)} for it"
        )
    needed_bytes, free_bytes = plan.disk_limit_bytes, disk_bytes_of(limits.disks) // sharers
    if plan.uses_disk and needed_bytes > free_bytes:
        raise ValueError(
            f"it takes {format_bytes(needed_bytes)} of the disk, which has {format_bytes(free_bytes)} for it"
        )


def warn_of_room(room: GpuRoom, plan: Plan) -> None:
    if plan.gpu_limit_bytes > room.free_bytes:
        warnings.warn(
            f"this plan may take {format_bytes(plan.gpu_limit_bytes)} of the GPU, and expects to take "
            f"{format_bytes(plan.forecast.gpu_bytes)}, but {room}: it may run out of memory. Free some, or make a plan "
            f"with limits=Limits(gpu={int(room.free_bytes * GPU_HEADROOM)})",
            stacklevel=3,
        )


def warn_of_reserve(forecast: Forecast, limit_bytes: int) -> None:
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


def warn_of_moving_in(plan: Plan) -> None:
    needed_bytes = plan.forecast.moving_host_bytes
    if needed_bytes > max(plan.host_limit_bytes, plan.forecast.host_peak_bytes):
        warnings.warn(
            f"the host may have {format_bytes(plan.host_limit_bytes)}, and has {format_bytes(needed_bytes)} while the "
            "model's values move from the CPU to their places, because the model is there now. Afterwards they are "
            f"{format_bytes(plan.forecast.host_peak_bytes)}. A model of hightide.from_pretrained, or one that was made "
            'under torch.device("meta"), is never there as a whole',
            stacklevel=3,
        )
