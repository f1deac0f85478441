"""What a disk may hold after a crash: the system calls of saves are recorded, and any moment of them can be made again.

[Note: what a crash leaves] As far as POSIX promises anything: what was synced is there. Of a file that was not, each
write is there, lost or torn (some sectors of it), its length is what it was or what it was set to. Of a folder's names
that were not synced, each change is there or not, whatever the order; a rename is there as a whole or not. A file's
sync says nothing about its name. `ways` are picked at random: everything (the process was killed, the machine lives),
nothing that was not synced, names without data, data without names, changes of names up to some moment, any.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hightide.checkpoint.files import filesystem

WAYS = ("everything", "nothing", "names only", "data only", "in order", "any")
SECTOR_BYTES = 512
Tree = dict[str, Any]  # names to trees or bytes
ROOT = 0


@dataclass(frozen=True)
class Call:
    """One change. `node` is the folder or file it is made in."""

    kind: str
    node: int
    name: str = ""
    target: str = ""
    child: int = -1
    offset: int = 0
    data: bytes = b""
    num_bytes: int = 0


@dataclass
class Log:
    """`calls` from the beginning on, and how many there were when each save had returned."""

    before: Tree
    calls: list[Call] = field(default_factory=list)
    committed: list[tuple[int, int]] = field(default_factory=list)  # calls, step

    def commit(self, step: int) -> None:
        self.committed.append((len(self.calls), step))

    def committed_step(self, num_calls: int) -> int | None:
        """The newest step of which a save had returned by then."""
        return max((step for count, step in self.committed if count <= num_calls), default=None)


@contextmanager
def recording(folder: Path) -> Iterator[Log]:
    """Of all changes below a folder by `hightide.checkpoint`."""
    log = Log(read_tree(folder))
    recorder = _Recorder(log, folder)
    real = {name: getattr(filesystem, name) for name in _Recorder.CALLS}
    for name in real:
        setattr(filesystem, name, recorder.of(name, real[name]))
    try:
        yield log
    finally:
        for name, call in real.items():
            setattr(filesystem, name, call)


class _Recorder:
    CALLS = ("make_folder", "create", "write", "set_aside", "sync", "rename", "unlink", "remove_folder")

    def __init__(self, log: Log, folder: Path) -> None:
        self._log = log
        self._nodes = {_inode(os.stat(folder)): ROOT}  # the newest of each inode: numbers are used again
        self._count = ROOT
        self._add_existing(folder)

    def _add_existing(self, folder: Path) -> None:
        """In the order of `Disk`."""
        for name in sorted(os.listdir(folder)):
            self._new(os.lstat(folder / name))
            if (folder / name).is_dir():
                self._add_existing(folder / name)

    def _new(self, status: os.stat_result) -> int:
        self._count += 1
        self._nodes[_inode(status)] = self._count
        return self._count

    def _node(self, descriptor: int) -> int:
        return self._nodes[_inode(os.fstat(descriptor))]

    def of(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = real(*args)
            getattr(self, f"_{kind}")(*args, result)
            return result

        return call

    def _note(self, kind: str, node: int, **more: Any) -> None:
        self._log.calls.append(Call(kind, node, **more))

    def _make_folder(self, name: str, folder: int, _: None) -> None:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        self._note("make_folder", self._node(folder), name=name, child=self._new(status))

    def _create(self, name: str, folder: int, file: int) -> None:
        self._note("create", self._node(folder), name=name, child=self._new(os.fstat(file)))

    def _write(self, file: int, memory: memoryview, offset: int, count: int) -> None:
        self._note("write", self._node(file), offset=offset, data=bytes(memory[:count]))

    def _set_aside(self, file: int, num_bytes: int, _: None) -> None:
        self._note("set_aside", self._node(file), num_bytes=num_bytes)

    def _sync(self, file: int, _: None) -> None:
        self._note("sync", self._node(file))

    def _rename(self, name: str, target: str, folder: int, _: None) -> None:
        self._note("rename", self._node(folder), name=name, target=target)

    def _unlink(self, name: str, folder: int, _: None) -> None:
        self._note("unlink", self._node(folder), name=name)

    def _remove_folder(self, name: str, folder: int, _: None) -> None:
        self._note("remove_folder", self._node(folder), name=name)


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


# -- replaying -------------------------------------------------------------------------------------------------------


class Disk:
    """What is on it for certain, and what has been changed since each sync."""

    def __init__(self, before: Tree) -> None:
        self._names: dict[int, dict[str, int]] = {ROOT: {}}
        self._content: dict[int, bytes] = {}
        self._changes: list[Call] = []  # not synced
        self._count = ROOT
        self._add(ROOT, before)

    def _add(self, node: int, tree: Tree) -> None:
        for name in sorted(tree):
            self._count += 1
            child = self._names[node][name] = self._count
            if isinstance(tree[name], dict):
                self._names[child] = {}
                self._add(child, tree[name])
            else:
                self._content[child] = tree[name]

    def do(self, call: Call) -> None:
        if call.kind in ("make_folder", "create"):
            (self._names if call.kind == "make_folder" else self._content)[call.child] = (
                {} if call.kind == "make_folder" else b""
            )
        if call.kind != "sync":
            self._changes.append(call)
            return
        for change in self._changes:
            if change.node == call.node:
                self._apply(change, self._names, self._content)
        self._changes = [change for change in self._changes if change.node != call.node]

    def crashed(self, way: str, chance: random.Random) -> Tree:
        """See [Note: what a crash leaves]."""
        names = {node: dict(entries) for node, entries in self._names.items()}
        content = dict(self._content)
        of_names = [change for change in self._changes if change.node in names]
        num_in_order = chance.randint(0, len(of_names))
        kept = {
            "everything": lambda _, __: True,
            "nothing": lambda _, __: False,
            "names only": lambda is_name, _: is_name,
            "data only": lambda is_name, _: not is_name,
            "in order": lambda is_name, index: index < num_in_order if is_name else chance.random() < 0.5,
            "any": lambda _, __: chance.random() < 0.5,
        }[way]
        index = 0
        for change in self._changes:
            is_name = change.node in names
            if kept(is_name, index):
                self._apply(change, names, content, chance if way in ("in order", "any") else None)
            index += is_name
        return _tree(ROOT, names, content)

    def _apply(
        self,
        change: Call,
        names: dict[int, dict[str, int]],
        content: dict[int, bytes],
        tearing: random.Random | None = None,
    ) -> None:
        if change.kind == "write":
            content[change.node] = _written(content[change.node], change, tearing)
            return
        if change.kind == "set_aside":
            content[change.node] = content[change.node].ljust(change.num_bytes, b"\0")
            return
        entries = names[change.node]
        if change.kind in ("make_folder", "create"):
            entries[change.name] = change.child
        elif change.kind == "rename":
            if change.name in entries:
                entries[change.target] = entries.pop(change.name)
        else:
            entries.pop(change.name, None)


def _written(before: bytes, change: Call, tearing: random.Random | None) -> bytes:
    end = change.offset + len(change.data)
    after = bytearray(before.ljust(end, b"\0"))
    if tearing is None or tearing.random() < 0.5:
        after[change.offset : end] = change.data
        return bytes(after)
    for start in range(0, len(change.data), SECTOR_BYTES):
        if tearing.random() < 0.5:
            part = change.data[start : start + SECTOR_BYTES]
            after[change.offset + start : change.offset + start + len(part)] = part
    return bytes(after)


def _tree(node: int, names: dict[int, dict[str, int]], content: dict[int, bytes]) -> Tree:
    return {
        name: _tree(child, names, content) if child in names else content[child] for name, child in names[node].items()
    }


def crashed(log: Log, num_calls: int, way: str, chance: random.Random) -> Tree:
    disk = Disk(log.before)
    for call in log.calls[:num_calls]:
        disk.do(call)
    return disk.crashed(way, chance)


# -- trees on the real disk ------------------------------------------------------------------------------------------


def read_tree(folder: Path) -> Tree:
    return {path.name: read_tree(path) if path.is_dir() else path.read_bytes() for path in sorted(folder.iterdir())}


def write_tree(folder: Path, tree: Tree) -> None:
    folder.mkdir()
    for name, entry in tree.items():
        if isinstance(entry, dict):
            write_tree(folder / name, entry)
        else:
            (folder / name).write_bytes(entry)
