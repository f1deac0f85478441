"""Limits by the control groups of this process: memory, processor time, processors.

[Note: which group's limit counts] Groups are nested, and each is held to the limits of all above it: the least one
counts. So everything is read from the process's own group (/proc/self/cgroup) up to the root of the mount
(/proc/self/mountinfo). Version 1 has a tree per controller, version 2 one tree; both may be there at once. In a
container the tree may begin at its own group: paths of the system are cut by the mount's root, and a path that leads
out of it is the mount itself.

A group above `memory.high` is not killed but slowed down, so far that training in it is no use: it is a limit here, as
`memory.max` is. The page cache belongs to a group's use and is given up when memory is short, so it counts as free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_HIERARCHY = "hierarchical_memory_limit"  # version 1: of groups above too, which a container may not see
_CACHES = (("total_active_file", "total_inactive_file"), ("active_file", "inactive_file"))  # version 1, 2


@dataclass(frozen=True)
class _Group:
    folder: Path
    is_unified: bool  # version 2

    def text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except (OSError, ValueError):
            return ""

    def number(self, name: str) -> int | None:
        """None: "max", -1, or it is not there."""
        text = self.text(name).strip()
        return int(text) if _is_number(text) else None

    def numbers(self, name: str) -> dict[str, int]:
        pairs = (line.split() for line in self.text(name).splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and _is_number(pair[1])}


@dataclass(frozen=True)
class MemoryLimit:
    limit_bytes: int
    free_bytes: int


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Of all groups that have one. Version 1 says "no limit" as a number larger than any memory."""
    found = []
    for group in _groups("memory", root):
        stat = group.numbers("memory.stat")
        if group.is_unified:
            limits, used = [group.number("memory.max"), group.number("memory.high")], group.number("memory.current")
        else:
            limits = [group.number("memory.limit_in_bytes"), stat.get(_HIERARCHY)]
            used = group.number("memory.usage_in_bytes")
        limit = min((limit for limit in limits if limit is not None), default=None)
        if limit is not None:
            cached = next((sum(stat[key] for key in keys) for keys in _CACHES if all(key in stat for key in keys)), 0)
            held = max(0, (used or 0) - cached)
            found.append(MemoryLimit(limit, max(0, limit - held)))
    return found


def quota_cores(root: Path = ROOT) -> int | None:
    """How many cores the processor time is worth. What is begun counts: the rest of a core is worth a thread."""
    found = []
    for group in _groups("cpu", root):
        names = ("cpu.max",) if group.is_unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(map(group.text, names)).split()
        if len(words) == 2 and all(map(_is_number, words)) and int(words[1]):
            found.append(max(1, -(-int(words[0]) // int(words[1]))))
    return min(found, default=None)


def allowed_cpus(root: Path = ROOT) -> set[int] | None:
    """The numbers of the processors that all groups allow."""
    found: set[int] | None = None
    for group in _groups("cpuset", root):
        names = (
            ("cpuset.cpus.effective", "cpuset.cpus") if group.is_unified else ("cpuset.effective_cpus", "cpuset.cpus")
        )
        cpus = next((cpus for cpus in (_cpu_list(group.text(name)) for name in names) if cpus), None)
        if cpus:
            found = cpus if found is None else found & cpus
    return found


def _groups(controller: str, root: Path) -> Iterator[_Group]:
    """This process's group and those above it, in both trees."""
    own = _own_paths(root)
    for is_unified, mount_root, mount in _mounts(controller, root):
        path = own.get("" if is_unified else controller, "/")
        for folder in _upwards(path, mount_root):
            yield _Group(root / mount.relative_to("/") / folder, is_unified)


def _upwards(path: str, mount_root: str) -> list[PurePosixPath]:
    """Relative to the mount, its own folder last."""
    try:
        inside = PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        inside = PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    return [inside, *inside.parents]


def _own_paths(root: Path) -> dict[str, str]:
    """By controller; version 2 has the empty name."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number.isdigit():
            paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _mounts(controller: str, root: Path) -> Iterator[tuple[bool, str, PurePosixPath]]:
    """Whether it is of version 2, the group at its root, and where it is."""
    seen = False
    for line in _lines(root / "proc/self/mountinfo"):
        about, _, kind = line.partition(" - ")
        words, kinds = [_unescaped(word) for word in about.split()], kind.split()
        if len(words) < 5 or not kinds or not words[4].startswith("/"):
            continue
        is_unified = kinds[0] == "cgroup2"
        if is_unified or (kinds[0] == "cgroup" and controller in kinds[-1].split(",")):
            seen = True
            yield is_unified, words[3], PurePosixPath(words[4])
    if not seen:  # where they usually are
        yield True, "/", PurePosixPath("/sys/fs/cgroup")
        yield False, "/", PurePosixPath("/sys/fs/cgroup", controller)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _cpu_list(text: str) -> set[int]:
    """Of "0-3,8"."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if _is_number(first) and (not last or _is_number(last)):
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
