"""How the machine is set up: what is read of the system, and what of it costs speed or memory, with the remedy."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from hightide.doctor.disk_speed import Filesystem
from hightide.ir.units import format_bytes
from hightide.process.system import (
    KERNELS_SWITCH,
    cgroup_limit_bytes,
    own_kernels_allowed,
    total_bytes,
    usable_cores,
    usable_cpus,
)

FEW_CORES = 4
SWAPPED_BYTES = 1 << 30
OTHERS_BYTES = 2 << 30  # on a GPU: more than the contexts of this process
OTHERS_SHARE = 0.15  # of the cores
CGROUP_SHARE = 0.5
LINK_SHARE = 0.7  # of a PCIe link's raw rate: copies from pinned memory reach 0.85 to 0.9
IN_RAM = ("tmpfs", "ramfs", "devtmpfs")
LAYERED = ("overlay", "aufs")
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "ceph", "glusterfs")
# Bytes per second and lane, by transfers per second and lane: 8b/10b coding up to 5 GT/s, then 128b/130b.
PCIE_LANE_BYTES_PER_S = {2.5: 0.25e9, 5.0: 0.5e9, 8.0: 0.985e9, 16.0: 1.969e9, 32.0: 3.938e9, 64.0: 7.563e9}


@dataclass(frozen=True)
class Warned:
    problem: str
    remedy: str


@dataclass(frozen=True)
class PciLink:
    """As the system reports it, read while the link was busy: an idle GPU slows its link down."""

    gt_per_s: float
    num_lanes: int
    most_gt_per_s: float
    most_num_lanes: int

    @property
    def most_bytes_per_s(self) -> float | None:
        per_lane = PCIE_LANE_BYTES_PER_S.get(self.most_gt_per_s)
        return None if per_lane is None else per_lane * self.most_num_lanes


@dataclass(frozen=True)
class Others:
    """What other processes did meanwhile."""

    num_busy: float  # cores that they kept busy, on average
    num_cores: int  # of so many that they share with this process


@dataclass(frozen=True)
class Conditions:
    num_cores: int
    omp_threads: str | None  # OMP_NUM_THREADS
    memory_bytes: int  # of the machine
    cgroup_bytes: int | None
    swapped_bytes: int
    huge_pages: str | None  # always, madvise, never; None: unknown
    update_kernel: str
    kernels_allowed: bool
    others: Others | None = None  # None: the system does not say
    # Of a GPU, if there is one:
    pin_problem: str | None = None
    pci: PciLink | None = None
    h2d_bytes_per_s: float | None = None
    gpu_others_bytes: int = 0  # of its memory, that somebody else uses
    # Of a disk, if one was measured:
    filesystem: Filesystem | None = None
    is_direct: bool = True

    @property
    def are_cores_shared(self) -> bool:
        return self.others is not None and self.others.num_busy > OTHERS_SHARE * self.others.num_cores

    @property
    def is_gpu_shared(self) -> bool:
        return self.gpu_others_bytes > OTHERS_BYTES


class OtherProcesses:
    """Watches them from now on."""

    def __init__(self, path: Path = Path("/proc/stat")) -> None:
        self._path = path
        self._cores = usable_cpus()
        self._began_s, self._began = time.perf_counter(), self._busy_s()

    def seen(self) -> Others | None:
        """None where the system counts nothing, as in some sandboxes."""
        elapsed_s, (all_s, ours_s) = time.perf_counter() - self._began_s, self._busy_s()
        all_s, ours_s = all_s - self._began[0], ours_s - self._began[1]
        if all_s <= 0 or elapsed_s <= 0:
            return None
        return Others(max(0.0, all_s - ours_s) / elapsed_s, len(self._cores))

    def _busy_s(self) -> tuple[float, float]:
        """By everybody on the cores that this process may use, and by this one and the compilers that it has called."""
        try:
            lines = [line.split() for line in self._path.read_text().splitlines()]
        except OSError:
            return 0.0, 0.0
        # cpuN user nice system idle iowait irq softirq steal ...
        cores = {f"cpu{number}" for number in self._cores}
        counts = [[int(word) for word in words[1:9]] for words in lines if words and words[0] in cores]
        ticks = sum(sum(count) - sum(count[3:5]) for count in counts)
        ours = os.times()
        return (
            ticks / os.sysconf("SC_CLK_TCK"),
            ours.user + ours.system + ours.children_user + ours.children_system,
        )


def host_conditions(update_kernel: str) -> Conditions:
    return Conditions(
        num_cores=usable_cores(),
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        memory_bytes=total_bytes(),
        cgroup_bytes=cgroup_limit_bytes(),
        swapped_bytes=_swapped_bytes(),
        huge_pages=_huge_pages(),
        update_kernel=update_kernel,
        kernels_allowed=own_kernels_allowed(),
    )


def warnings_of(now: Conditions) -> list[Warned]:
    """The worst first."""
    return [*_of_gpu(now), *_of_host(now), *_of_disk(now)]


def _of_gpu(now: Conditions) -> Iterator[Warned]:
    if now.pin_problem is not None:
        yield Warned(now.pin_problem, "raise the limit of locked memory (ulimit -l unlimited), or free memory")
    if now.pci is not None:
        yield from _of_link(now.pci, now.h2d_bytes_per_s)
    if now.is_gpu_shared:
        yield Warned(
            f"{format_bytes(now.gpu_others_bytes)} of the GPU's memory are in use by somebody else, so its rates "
            "may be too low",
            "look with nvidia-smi, end the other processes, and measure again",
        )


def _of_link(pci: PciLink, h2d_bytes_per_s: float | None) -> Iterator[Warned]:
    """One at most: what is narrow or slow does not reach its rate either."""
    expected = pci.most_bytes_per_s
    if pci.num_lanes < pci.most_num_lanes:
        yield Warned(
            f"the GPU's PCIe link is ×{pci.num_lanes} wide and could be ×{pci.most_num_lanes}",
            "put the card into a slot with all lanes, reseat it, and look for risers or a second card that shares "
            "the lanes",
        )
    elif pci.gt_per_s < pci.most_gt_per_s:
        yield Warned(
            f"the GPU's PCIe link runs at {pci.gt_per_s:g} GT/s while it is busy and could run at "
            f"{pci.most_gt_per_s:g}",
            "look for the slot's generation in the firmware's settings, and for power saving of PCIe (ASPM)",
        )
    elif expected is not None and h2d_bytes_per_s is not None and h2d_bytes_per_s < LINK_SHARE * expected:
        yield Warned(
            f"host to GPU reaches {h2d_bytes_per_s / 1e9:.1f} GB/s of the link's {expected / 1e9:.0f}",
            "run the process on the processor that the GPU hangs on (numactl), and look at what else uses the link",
        )


def _of_host(now: Conditions) -> Iterator[Warned]:
    if now.others is not None and now.are_cores_shared:
        busy = f"{now.others.num_busy:.1f} of {now.others.num_cores} cores"
        yield Warned(
            f"other processes kept {busy} busy meanwhile, so the host's rates may be too low",
            "look with top, and measure again when they have ended",
        )
    if now.cgroup_bytes is not None and now.cgroup_bytes < CGROUP_SHARE * now.memory_bytes:
        yield Warned(
            f"the control group allows {format_bytes(now.cgroup_bytes)} of {format_bytes(now.memory_bytes)} of "
            "host memory",
            "ask for more: docker --memory, Slurm --mem, MemoryMax of systemd",
        )
    if now.swapped_bytes > SWAPPED_BYTES:
        yield Warned(
            f"{format_bytes(now.swapped_bytes)} are swapped out, so host memory is short",
            "end what uses it, or give Limits(host=...) less",
        )
    if now.num_cores <= FEW_CORES:
        yield Warned(
            f"{now.num_cores} cores: the host's update has {max(1, now.num_cores - 2)} of them",
            "give the process more (taskset, docker --cpus, Slurm --cpus-per-task)",
        )
    if now.update_kernel != "c":
        remedy = (
            "install a C compiler (gcc or clang), or name one in CC"
            if now.kernels_allowed
            else f"unset {KERNELS_SWITCH}, which is 0"
        )
        yield Warned("the host's update runs on torch's operations: its C kernel is not there", remedy)
    if now.omp_threads is not None and now.omp_threads.isdigit() and int(now.omp_threads) < now.num_cores // 2:
        yield Warned(
            f"OMP_NUM_THREADS={now.omp_threads} of {now.num_cores} cores: hightide's updates do not mind, torch's "
            "operations on the host do",
            "unset it, or set it to the number of cores (torchrun sets it to 1)",
        )
    if now.huge_pages == "never":
        yield Warned(
            "transparent huge pages are off: the update and pinning are slower",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _of_disk(now: Conditions) -> Iterator[Warned]:
    if now.filesystem is None:
        return
    kind = now.filesystem.kind
    if kind in IN_RAM:
        yield Warned(f"the disk's folder is a {kind}: it lies in host memory", "name a folder on a real disk")
        return
    if kind in LAYERED:
        yield Warned(
            f"the disk's folder is in a container's {kind} file system", "mount a volume and name a folder there"
        )
    if kind in REMOTE:
        yield Warned(f"the disk's folder is on the network ({kind})", "name a folder on a local disk")
    if not now.is_direct:
        yield Warned(
            f"{kind} has no direct access (O_DIRECT): the page cache takes host memory and time",
            "name a folder on ext4 or xfs",
        )


def _swapped_bytes() -> int:
    try:
        return int(psutil.swap_memory().used)
    except (OSError, ValueError, RuntimeError, RuntimeWarning):  # /proc cannot be read; psutil warns of parts of it
        return 0


def _huge_pages() -> str | None:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else None


def read_pci_link(device: torch.device, folder: Path = Path("/sys/bus/pci/devices")) -> PciLink | None:
    """None where the system does not say, as in many virtual machines."""
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, number = (getattr(properties, name, None) for name in names)
    if domain is None or bus is None or number is None:
        return None
    return pci_link_at(folder / f"{domain:04x}:{bus:02x}:{number:02x}.0")


def pci_link_at(folder: Path) -> PciLink | None:
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    try:
        numbers = [re.match(r"[\d.]+", (folder / name).read_text()) for name in names]
    except OSError:
        return None
    speed, width, most_speed, most_width = (float(number[0]) if number else 0.0 for number in numbers)
    if min(speed, width, most_speed, most_width) <= 0:  # "Unknown", or a width of 0
        return None
    return PciLink(speed, int(width), most_speed, int(most_width))
