"""All memory of one plan: the stores that it needs, and its forecast in the bytes that they count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hightide.ir.chunk import DISK_REGION_BYTES
from hightide.ir.limits import DiskLimit
from hightide.ir.plan import Forecast
from hightide.ir.tier import Tier
from hightide.ir.units import exactly, format_bytes
from hightide.planner.disk_inputs import stored_bytes
from hightide.planner.lower import modes_beside
from hightide.planner.predict.peaks import peaks, reserved_bytes
from hightide.planner.solution import Searched, Solution
from hightide.planner.waiting import left_bytes
from hightide.stores.cuda import CudaAccelerator
from hightide.stores.disk import DiskStore
from hightide.stores.host_arena import HostArena
from hightide.stores.pinned import PinnedArena
from hightide.stores.simulated import SimulatedAccelerator
from hightide.stores.store import ALIGN_BYTES, Accelerator, Store


class PlanStores:
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
    """Files of what the plan needs, on each disk in proportion to its limit. A chunk's arrays each lie on one: several
    disks may each be left with almost enough for one more (see planner/disk_room.py)."""
    inputs = stored_bytes(solution.profile, solution.plan).values()
    needed_bytes, limit_bytes = solution.peaks.disk_peak_bytes, sum(disk.num_bytes for disk in disks)
    if not needed_bytes:
        return None
    if needed_bytes > limit_bytes:
        raise ValueError(
            f"the plan keeps {exactly(needed_bytes)} on disk, and the folders of "
            f"Limits(disk=...) may have {limit_bytes} ({format_bytes(limit_bytes)}); give it a folder with as much: "
            f"limits=hightide.Limits(disk='/folder:{needed_bytes}')"
        )
    arrays = [*(place.bytes_on[Tier.DISK] for place in solution.placement.chunks), *inputs]
    room_bytes = max(arrays) if len(disks) > 1 else 0
    shares = [needed_bytes * disk.num_bytes // limit_bytes + DISK_REGION_BYTES for disk in disks]
    if any(share + room_bytes > disk.num_bytes for disk, share in zip(disks, shares, strict=True)):
        room_bytes *= len(disks)  # others make up for what that one lacks
    files = [
        DiskLimit(disk.path, min(disk.num_bytes, (share + room_bytes) // DISK_REGION_BYTES * DISK_REGION_BYTES))
        for disk, share in zip(disks, shares, strict=True)
    ]
    known = solution.problem.machine.disk if isinstance(solution, Searched) else None
    return DiskStore(files) if known is None else DiskStore(files, request_bytes=known.request_bytes, depth=known.depth)


def _memory(solution: Solution, device: torch.device) -> tuple[Accelerator, HostArena]:
    profile, plan, schedules = solution.profile, solution.plan, solution.schedules
    beside = [peaks(schedules[mode]).host_peak_bytes for mode in modes_beside(plan)]
    host_bytes = max(solution.peaks.host_peak_bytes, *beside)
    if device.type != "cuda":
        return SimulatedAccelerator(plan.gpu_limit_bytes), HostArena(plan.host_limit_bytes, needed_bytes=host_bytes)
    host = PinnedArena(max(plan.host_limit_bytes, ALIGN_BYTES), max(host_bytes, ALIGN_BYTES), device)
    base_bytes = max(schedule.gpu_base_bytes for schedule in schedules.values())
    no_regions = profile.batch_bytes + profile.buffer_bytes + left_bytes(profile, plan.micro_batch)
    slab_bytes = base_bytes - no_regions
    rounding_bytes = 2 * ALIGN_BYTES  # of the two pools of slots
    return CudaAccelerator(plan.gpu_limit_bytes, device, slab_bytes + rounding_bytes if slab_bytes else 0), host


def forecast_on(solution: Solution, device: torch.device) -> Forecast:
    """The plan's, in the bytes that this device counts. A plan that the user brings may be made for another kind of
    device, or by hand."""
    plan, peak = solution.plan, solution.peaks
    if device.type != "cuda":
        return replace(plan.forecast, gpu_reserved_bytes=None)
    if plan.forecast.gpu_reserved_bytes is not None:
        return plan.forecast
    reserved = reserved_bytes(solution.passes, peak)
    return replace(plan.forecast, gpu_peak_bytes=peak.gpu_peak_bytes, gpu_reserved_bytes=reserved)
