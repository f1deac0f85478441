"""What this machine has to give when the user sets no limit: memory and cores; how it gets back what was freed;
whether kernels of our own may be built on it, and where they are kept."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import psutil

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_USES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
_CPU_QUOTAS = (
    "/sys/fs/cgroup/cpu.max",
    "/sys/fs/cgroup/cpu/cpu.cfs_quota_us:/sys/fs/cgroup/cpu/cpu.cfs_period_us",
)
KERNELS_SWITCH = "HIGHTIDE_KERNELS"  # "0" in the environment: torch's own operations only
HEADROOM = 0.9  # of what is free: the process itself, its libraries and other programs need some


def free_host_bytes() -> int:
    """The smaller of free RAM and what the control group still allows."""
    free_bytes = int(psutil.virtual_memory().available)
    limit, used = cgroup_limit_bytes(), _first_number(_CGROUP_USES)
    if limit is not None and used is not None:
        free_bytes = min(free_bytes, max(0, limit - used))
    return int(free_bytes * HEADROOM)


def cgroup_limit_bytes() -> int | None:
    """What the control group allows in all. None: no limit, or one that is above what the machine has."""
    limit = _first_number(_CGROUP_LIMITS)
    return limit if limit is not None and limit < psutil.virtual_memory().total else None


def host_bytes() -> int:
    """All of the memory, or what the control group allows of it."""
    return cgroup_limit_bytes() or int(psutil.virtual_memory().total)


def usable_cpus() -> set[int]:
    """The numbers of the cores that this process may run on."""
    return os.sched_getaffinity(0)


def usable_cores() -> int:
    """Cores that this process may keep busy: by its affinity, and by its control group's quota."""
    cores = len(usable_cpus())
    for path in _CPU_QUOTAS:
        try:
            words = " ".join(Path(part).read_text() for part in path.split(":")).split()
        except OSError:
            continue
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            cores = min(cores, -(-int(words[0]) // int(words[1])))
    return max(1, cores)


def cache_folder() -> Path:
    """Where this user keeps what can be made again: built kernels, measurements."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hightide"


def own_kernels_allowed() -> bool:
    return os.environ.get(KERNELS_SWITCH, "1") != "0"


def return_freed_memory() -> None:
    """Gives pages that the C library keeps for later back to the system. Tensors below its threshold of up to 32 MiB
    come from its heap, where a freed one in the middle stays resident: a model would go on existing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _first_number(paths: tuple[str, ...]) -> int | None:
    for path in paths:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None
