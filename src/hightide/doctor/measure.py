"""The whole examination: what the machine can do, what that means, and what is set up badly."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import mean

import torch

from hightide.doctor.conditions import Conditions, OtherProcesses, Warned, host_conditions, read_pci_link, warnings_of
from hightide.doctor.disk_speed import DiskTest, filesystem_of, measure_disk
from hightide.doctor.findings import findings_of
from hightide.doctor.identity import fingerprint, gpu_name, processor_name
from hightide.doctor.links import NUM_BUFFERS, Link
from hightide.doctor.pace import Work, measure_together
from hightide.doctor.rates import dram_rates, gpu_memory_rate, matmul_rates
from hightide.doctor.update_speed import UpdateWork, update_arrays
from hightide.ir.chunk import ALIGN_NUMEL
from hightide.ir.machine import (
    FIRST_TRAFFIC_BYTES,
    UPDATE_BYTES,
    UPDATE_TRAFFIC_BYTES,
    Gpu,
    Host,
    Machine,
    Speeds,
    Unpinned,
    subsets,
)
from hightide.ir.tier import Lane
from hightide.optim.operands import Operands, Part
from hightide.process.system import available_bytes, cgroup_limit_bytes, free_host_bytes, host_bytes, usable_cores
from hightide.runtime.lanes.lanes import Lanes
from hightide.stores.cuda import CudaAccelerator
from hightide.stores.host_arena import HostArena
from hightide.stores.pinned import PinnedArena
from hightide.stores.simulated import SimulatedAccelerator
from hightide.stores.store import ALIGN_BYTES, Accelerator

Tell = Callable[[str], None]  # what is being measured now

NUM_TURNS = 2


@dataclass(frozen=True)
class Effort:
    """How much memory and time measurements take. Arrays are larger than any cache; a core has its share of them."""

    buffer_bytes: int = 128 << 20  # of one copy
    update_numel: int = 96 << 20
    dram_numel: int = 128 << 20
    window_s: float = 0.5

    @classmethod
    def here(cls) -> Effort:
        """In a quarter of the free memory, and quick on few cores."""
        whole = cls()
        needed_bytes = 2 * NUM_BUFFERS * whole.buffer_bytes + UPDATE_BYTES * whole.update_numel + 8 * whole.dram_numel
        share = min(1.0, free_host_bytes() / 4 / needed_bytes, usable_cores() / 8)
        numel = max(ALIGN_NUMEL, int(whole.update_numel * share) // ALIGN_NUMEL * ALIGN_NUMEL)
        buffer_bytes = max(ALIGN_BYTES, int(whole.buffer_bytes * share) // ALIGN_BYTES * ALIGN_BYTES)
        return cls(buffer_bytes, numel, max(1, int(whole.dram_numel * share)), whole.window_s)


@dataclass(frozen=True)
class FreeMemory:
    """At the moment of the examination."""

    gpu_bytes: int | None  # from the driver
    host_bytes: int  # from the system
    cgroup_limit_bytes: int | None  # None: no limit
    usable_host_bytes: int  # what Limits(host) is by default


@dataclass(frozen=True)
class Report:
    machine: Machine
    free: FreeMemory
    findings: tuple[str, ...]
    warnings: tuple[Warned, ...]
    took_s: float
    is_undisturbed: bool  # else others have used the cores or the GPU meanwhile, and rates may be too low


def examine(
    device: torch.device, disk: DiskTest | None = None, effort: Effort | None = None, tell: Tell = lambda _: None
) -> Report:
    started_s = time.perf_counter()
    if disk is not None:
        disk.check()
    free = _free_memory(device)
    others = OtherProcesses()
    machine, now = _measure(device, effort or Effort.here(), tell)
    now = replace(now, others=others.seen())
    if disk is not None:
        machine = replace(machine, disk=measure_disk(disk, tell))
        assert machine.disk is not None
        now = replace(now, filesystem=filesystem_of(disk.folder), is_direct=machine.disk.is_direct)
    took_s = time.perf_counter() - started_s
    is_undisturbed = not now.are_cores_shared and not now.is_gpu_shared
    return Report(machine, free, tuple(findings_of(machine)), tuple(warnings_of(now)), took_s, is_undisturbed)


def _measure(device: torch.device, effort: Effort, tell: Tell) -> tuple[Machine, Conditions]:
    is_cuda = device.type == "cuda"
    others_bytes = _others_bytes(device) if is_cuda else 0
    tell("arrays in host memory")
    buffers_bytes = 2 * NUM_BUFFERS * effort.buffer_bytes
    arrays_bytes = buffers_bytes + UPDATE_BYTES * effort.update_numel + 16 * ALIGN_BYTES
    host, gpu = stores_of(device, arrays_bytes, 2 * effort.buffer_bytes + 2 * ALIGN_BYTES)
    lanes = Lanes(device=device if is_cuda else None)
    try:
        links = {lane: Link(lane, host, gpu, lanes.streams, effort.buffer_bytes) for lane in (Lane.H2D, Lane.D2H)}

        def array(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return host.view(host.allocate(numel * dtype.itemsize, "update"), dtype)

        operands = update_arrays(effort.update_numel, array)
        update = UpdateWork(operands, lanes.update_threads)
        works: dict[Lane, Work] = {**links, Lane.CPU: update}

        def speeds(*busy: Lane) -> Speeds:
            tell(f"busy: {' + '.join(busy)}")
            paces = measure_together(lanes, {lane: works[lane] for lane in busy}, effort.window_s)
            return Speeds(busy, tuple(paces[lane].bytes_per_s for lane in busy))

        unpinned = Unpinned(*(speeds(lane).bytes_per_s[0] for lane in links)) if is_cuda else None
        tell("pinning")
        pin_problem = _pin(host)
        table = [speeds(*busy) for busy in subsets()]
        first_part = _first_part(lanes, operands, effort.window_s) if update.kernel == "c" else None
        pci = read_pci_link(device) if is_cuda else None
        latency_s = links[Lane.H2D].latency_s()
    finally:
        lanes.close()
        if is_cuda:
            torch.cuda.synchronize(device)  # the last copies may still be under way
        gpu.close()
        host.close()
    alone = {one.busy[0]: one.bytes_per_s[0] for one in table if len(one.busy) == 1}
    tell("matrix products")
    matmuls = matmul_rates(device)
    tell("the accelerator's memory")
    gpu_memory_bytes_per_s = gpu_memory_rate(device, 4 * effort.buffer_bytes)
    tell("host memory")
    dram = dram_rates(effort.dram_numel, usable_cores(), repeats=3)
    machine = Machine(
        name=gpu_name(device),
        source="measured by hightide doctor",
        speeds=tuple(table),
        latency_s=latency_s,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        gpu=Gpu(gpu_name(device), _gpu_bytes(device), gpu_memory_bytes_per_s, matmuls),
        unpinned=unpinned,
        host=Host(
            processor=processor_name(),
            num_cores=usable_cores(),
            memory_bytes=host_bytes(),
            copy_bytes_per_s=dram["copy"],
            read_bytes_per_s=dram["read"],
            update_params_per_s=alone[Lane.CPU] / UPDATE_BYTES,
            update_kernel=update.kernel,
        ),
        fingerprint=fingerprint(device),
        first_part=first_part,
    )
    now = replace(
        host_conditions(update.kernel),
        pin_problem=pin_problem,
        pci=pci,
        h2d_bytes_per_s=alone[Lane.H2D] if is_cuda else None,
        gpu_others_bytes=others_bytes,
    )
    return machine, now


def _first_part(lanes: Lanes, operands: Operands, window_s: float) -> float:
    """See Machine. By turns: how fast memory is changes."""
    whole, first = (UpdateWork(operands, lanes.update_threads, part=part) for part in (Part.WHOLE, Part.PARAMS))
    shares = []
    for _ in range(NUM_TURNS):
        whole_pace, first_pace = (measure_together(lanes, {Lane.CPU: work}, window_s) for work in (whole, first))
        shares.append(whole_pace[Lane.CPU].bytes_per_s / first_pace[Lane.CPU].bytes_per_s)
    return max(1.0, mean(shares) * UPDATE_TRAFFIC_BYTES / FIRST_TRAFFIC_BYTES)


def stores_of(device: torch.device, host_bytes: int, gpu_bytes: int) -> tuple[HostArena, Accelerator]:
    """As a run has them."""
    if device.type == "cuda":
        return PinnedArena(host_bytes, device=device), CudaAccelerator(gpu_bytes, device, gpu_bytes)
    return HostArena(host_bytes), SimulatedAccelerator(gpu_bytes)


def _pin(host: HostArena) -> str | None:
    """What went wrong, if anything."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        host.pin()
    return str(caught[0].message) if caught else None


def _gpu_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_bytes()  # the simulated accelerator lies in host memory


def _others_bytes(device: torch.device) -> int:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device)


def _free_memory(device: torch.device) -> FreeMemory:
    return FreeMemory(
        gpu_bytes=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
        host_bytes=available_bytes(),
        cgroup_limit_bytes=cgroup_limit_bytes(),
        usable_host_bytes=free_host_bytes(),
    )
