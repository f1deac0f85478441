"""Memory that is free on this machine, and the limits that follow for those that the user has left open.

[Note: what is free on a GPU] A limit counts what a run takes, so everything that others hold makes less of it
available: other programs, and tensors of this process outside of the model. Three things are free although somebody has
them now. What torch keeps for later is given back before the slab is allocated, unless a wrapped model will use it
again. The model's parameters and its optimizer's states move into the run's own memory. While they move, they exist
beside the slab: a plan that is filled to the brim may be refused then. So a limit that the user has set is held against
all that is free in this sense, but where none was set, only what the driver has free is planned for.

Nothing like it is said of the host. Pages of files count as used by a control group, and those of a model that was
mapped from files as free: both are most of the memory, right after a model was loaded. A limit of the user's that is
lowered by such a number would refuse models that fit.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import nn

from hightide.ir.limits import Limits
from hightide.ir.plan import Forecast, Plan
from hightide.ir.units import format_bytes
from hightide.process.system import free_host_bytes
from hightide.stores import device_limit

GPU_HEADROOM = 0.95  # of the GPU's free memory: the allocator's fragments and libraries' workspaces need some


@dataclass(frozen=True)
class GpuRoom:
    """What a run could take of a GPU now, and who has the rest. See [Note: what is free on a GPU]."""

    device: torch.device
    free_bytes: int
    here_bytes: int  # of this process, outside of the model
    elsewhere_bytes: int

    def __str__(self) -> str:
        return (
            f"only {format_bytes(self.free_bytes)} of {self.device} are free (other programs and CUDA itself hold "
            f"{format_bytes(self.elsewhere_bytes)}, other tensors of this process {format_bytes(self.here_bytes)})"
        )


def room_on(device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer) -> GpuRoom:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved_bytes = torch.cuda.memory_reserved(device)
    held_bytes = reserved_bytes if device_limit.num_limits(device.index) else torch.cuda.memory_allocated(device)
    here_bytes = max(0, held_bytes - _moving_bytes(device, model, optimizer))
    elsewhere_bytes = max(0, total_bytes - free_bytes - reserved_bytes)
    return GpuRoom(device, free_bytes + reserved_bytes - here_bytes, here_bytes, elsewhere_bytes)


def _moving_bytes(device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What `wrap` will move out of the device's memory, into the run's own. Views of one storage hold it once."""
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *states) if tensor.device == device]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def memory_limits(
    limits: Limits, device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer, ranks_on_node: int = 1
) -> tuple[int, int]:
    """Fills in what the user left open, and lowers a limit of the GPU that others leave no room for. The simulated
    accelerator shares the RAM with the host tier. `ranks_on_node` divide its memory."""
    free_bytes = free_host_bytes() // ranks_on_node
    gpu_bytes, host_bytes = limits.gpu_bytes, limits.host_bytes
    host_bytes = None if host_bytes is None else max(1, host_bytes // ranks_on_node)  # 0 would be no limit
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
    elif gpu_bytes >= free_bytes and host_bytes is None:  # nothing would be left for the host
        asked_bytes, gpu_bytes = gpu_bytes, max(1, free_bytes // 2)
        warnings.warn(
            f"Limits(gpu) is {format_bytes(asked_bytes)}, but without a GPU it is RAM of this machine, of which "
            f"{format_bytes(free_bytes)} are free: planned for {format_bytes(gpu_bytes)}",
            stacklevel=3,
        )
    return gpu_bytes, host_bytes or max(1, free_bytes - gpu_bytes)


def check_still_fits(
    plan: Plan,
    limits: Limits,
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks_on_node: int = 1,
) -> None:
    """Whether a plan that was made for these limits, by an earlier process, may be used by this one: of what the user
    leaves open there may be less now. `ranks_on_node`: as of `memory_limits`, and there may be more."""
    if device.type == "cuda" and plan.gpu_limit_bytes > (room := room_on(device, model, optimizer)).free_bytes:
        raise ValueError(f"it may take {format_bytes(plan.gpu_limit_bytes)} of the GPU, but {room}")
    free_bytes, needed_bytes = free_host_bytes() // ranks_on_node, plan.forecast.host_peak_bytes
    if limits.host_bytes is not None:
        free_bytes, needed_bytes = limits.host_bytes // ranks_on_node, plan.host_limit_bytes
    elif device.type == "cpu":
        needed_bytes += plan.forecast.gpu_bytes
    if needed_bytes > free_bytes:
        raise ValueError(
            f"it takes {format_bytes(needed_bytes)} of the host, which has {format_bytes(free_bytes)} for it"
        )
    needed_bytes, free_bytes = plan.disk_limit_bytes, limits.disk_bytes // ranks_on_node
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
