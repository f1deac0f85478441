"""Memory and cores that this machine has to give when the user sets no limit; how it gets back what was freed;
whether kernels of our own may be built on it, and where they are kept."""

from __future__ import annotations

import ctypes
import os
import pwd
import resource
import stat
from contextlib import suppress
from pathlib import Path

import psutil

from hightide.process import control_groups

KERNELS_SWITCH = "HIGHTIDE_KERNELS"  # "0" in the environment: torch's own operations only
HEADROOM = 0.9  # of what is free: the process itself, its libraries and other programs need some


def free_host_bytes() -> int:
    """The least of free RAM, what control groups still allow, and what the process may still map."""
    free = [available_bytes(), *(group.free_bytes for group in control_groups.memory_limits())]
    mappable = _mappable_bytes()
    if mappable is not None:
        free.append(mappable)
    return int(min(free) * HEADROOM)


def cgroup_limit_bytes() -> int | None:
    """What control groups allow in all. None: no limit, or one that is above what the machine has."""
    limit = min((group.limit_bytes for group in control_groups.memory_limits()), default=None)
    return limit if limit is not None and limit < total_bytes() else None


def host_bytes() -> int:
    """All of the memory, or what control groups allow of it."""
    limit = cgroup_limit_bytes()
    return total_bytes() if limit is None else limit


def total_bytes() -> int:
    """RAM of the machine."""
    try:
        return int(psutil.virtual_memory().total)
    except (OSError, ValueError, KeyError, RuntimeError):  # /proc cannot be read
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """RAM that can be had without swapping."""
    try:
        return int(psutil.virtual_memory().available)
    except (OSError, ValueError, KeyError, RuntimeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Memory that this process has: its pages in RAM. 0: the system does not say."""
    try:
        return int(psutil.Process().memory_info().rss)
    except (OSError, psutil.Error):
        return 0


def _mappable_bytes() -> int | None:
    """Of the limit of the address space (ulimit -v). None: there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        mapped = 0
    return max(0, limit - mapped)


def usable_cpus() -> set[int]:
    """The numbers of the cores that this process may run on."""
    try:
        cpus = os.sched_getaffinity(0)
    except (AttributeError, OSError):
        cpus = set(range(os.cpu_count() or 1))
    allowed = control_groups.allowed_cpus()
    return (cpus & allowed if allowed is not None else cpus) or cpus  # a sandbox may number them in two ways


def usable_cores() -> int:
    """Cores that this process may keep busy: by its affinity, and by its control groups."""
    cores, quota = len(usable_cpus()), control_groups.quota_cores()
    return cores if quota is None else min(cores, quota)


def cache_folder() -> Path:
    """Where this user keeps what can be made again: built kernels, measurements. A relative path in XDG_CACHE_HOME is
    not used, as its specification says: it would be another folder wherever one stands. OSError: there is none."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else _home() / ".cache") / "hightide"


def _home() -> Path:
    home = os.environ.get("HOME", "")
    if not home:
        with suppress(KeyError):
            home = pwd.getpwuid(os.getuid()).pw_dir
    if not os.path.isabs(home):
        raise FileNotFoundError("there is no home folder: HOME is not set")
    return Path(home)


def make_private(folder: Path) -> None:
    """With all that is missing above it; others may not look into what is new."""
    for one in (*reversed(folder.parents), folder):
        if not one.is_dir():
            one.mkdir(mode=0o700, exist_ok=True)


def is_private(folder: Path) -> bool:
    """Whether only this user may change what lies there. Above it everybody may write only as in /tmp, where nobody
    may rename what others own."""
    folder = folder.resolve()
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    modes = (above.stat().st_mode for above in folder.parents)
    return all(not mode & stat.S_IWOTH or mode & stat.S_ISVTX for mode in modes)


def own_kernels_allowed() -> bool:
    return os.environ.get(KERNELS_SWITCH, "1") != "0"


def return_freed_memory() -> None:
    """Gives pages that the C library keeps for later back to the system. Tensors below its threshold of up to 32 MiB
    come from its heap, where a freed one in the middle stays resident: a model would go on existing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
