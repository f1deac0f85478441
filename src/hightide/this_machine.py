"""The machine that a model is wrapped on, as doctor has measured it; where nobody has, it is measured now, or taken for
one that is known."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from hightide.doctor.disk_speed import DiskTest, by_turns, measure_disk
from hightide.doctor.known import known_machine, load_machine, remember
from hightide.doctor.measure import examine
from hightide.ir.limits import DiskLimit
from hightide.ir.machine import SIMULATED, Disk, Estimate, Machine, MatmulRates
from hightide.planner.one_rank import machine_of_rank
from hightide.process.progress import tell

ASSUMED = "rtx-3090"  # a preset
ASSUMED_LINKS, ASSUMED_NETWORK = "4x-rtx-4090", "4-nodes-8x-h100"  # presets with several GPUs

QUICK_DISK = DiskTest(Path(), file_bytes=4 << 30, sustained_s=4.0, phase_s=1.5, small_s=0.2)

_disturbed: dict[torch.device, Machine] = {}  # measured by this process, and not kept for others
_measured_disks: dict[int, Disk] = {}  # likewise, by device; `hightide doctor --disk` measures thoroughly, and keeps it


def machine_of(device: torch.device, is_small: bool) -> Machine:
    if device.type != "cuda":
        return simulated_machine()
    known = known_machine(device)
    if known.machine is not None:
        return known.machine
    if is_small:
        return load_machine(ASSUMED)
    if device in _disturbed:
        return _disturbed[device]
    warnings.warn(f"{known.problem}: `hightide doctor` runs now, once, for about 10 s", stacklevel=4)
    report = examine(device, tell=lambda detail: tell("measuring this machine", detail))
    if report.is_undisturbed:
        with suppress(OSError):  # nowhere to keep it: the next run measures again, and says so
            remember(report.machine)
    else:
        warnings.warn(
            "other programs used the machine while it was measured (its cores, or memory of its GPU), so forecasts may "
            "be too slow. The next process measures again; `hightide doctor` says what was in use, and keeps what it "
            "measures",
            stacklevel=4,
        )
        _disturbed[device] = report.machine
    return report.machine


def machine_among_ranks(machine: Machine, nodes: Sequence[int]) -> Machine:
    """What one of several ranks has of it. Between GPUs of which nobody has measured it, as in a preset. Where
    nodes have different numbers of ranks, everything between ranks is taken for as slow as it is across nodes."""
    counts = Counter(nodes)
    gpus, num_nodes = max(counts.values()), len(counts)
    links = machine.links
    if links is None or links.gpus_per_node < gpus or links.num_nodes < num_nodes:
        like = load_machine(ASSUMED_LINKS if num_nodes == 1 else ASSUMED_NETWORK)
        assert like.links is not None
        links = replace(like.links, gpus_per_node=gpus, num_nodes=num_nodes)
        told = Estimate("links", f"taken for those of {like.name}")
        machine = replace(machine, links=links, estimates=(*machine.estimates, told))
    own = machine_of_rank(machine, gpus, num_nodes)
    if len(set(counts.values())) > 1 or len(nodes) == 1:
        return replace(own, links=replace(links, gpus_per_node=1, num_nodes=len(nodes)))
    return own


def with_disks(machine: Machine, limits: Sequence[DiskLimit]) -> Machine:
    """With the speeds of the folders' disks, each measured in a few seconds, or taken for those of a preset."""
    sizes: dict[int, int] = {}  # of what several folders may have on one disk
    for limit in limits:
        place = os.stat(limit.path).st_dev
        sizes[place] = sizes.get(place, 0) + limit.num_bytes
        if place in _measured_disks:
            continue
        size = min(QUICK_DISK.file_bytes, limit.num_bytes) // 2**20 * 2**20
        try:
            test = replace(QUICK_DISK, folder=Path(limit.path), file_bytes=size)
            _measured_disks[place] = measure_disk(test, lambda detail: tell("measuring this machine", detail))
        except ValueError as error:
            disk = load_machine(ASSUMED).disk
            assert disk is not None
            warnings.warn(
                f"the disk of {limit.path} cannot be measured ({error}); the plan follows from the speed of "
                f"{disk.name}: it fits, and may be slower than another",
                stacklevel=5,
            )
            source = f"taken for {disk.name}"
            return replace(machine, disk=disk, estimates=(*machine.estimates, Estimate("disk", source)))
    return replace(machine, disk=by_turns([(_measured_disks[place], size) for place, size in sizes.items()]))


def measured_products(device: torch.device) -> MatmulRates | None:
    """What doctor has found this GPU to reach. None: nobody has measured it. Nothing is measured here."""
    if device.type != "cuda":
        return None
    machine = known_machine(device).machine or _disturbed.get(device)
    return None if machine is None else machine.measured_products


@cache
def simulated_machine() -> Machine:
    """The simulated accelerator is taken for a small GPU that nobody has."""
    machine = load_machine(ASSUMED)
    assert machine.gpu is not None
    return replace(machine, name=SIMULATED, gpu=replace(machine.gpu, name=SIMULATED))
