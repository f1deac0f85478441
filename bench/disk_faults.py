"""Faults of disks, put below a store that reads and writes from several threads: `bench/disk_faults.py --count 300`.

Each round makes a store among files of others, does one thing to it, and looks whether everything that is read equals
what was written, or an error says what happened, in time. Faults sit in place of the system calls, below the loops of
the store; full and read-only disks are real where the user may mount them, and killed processes always are."""

from __future__ import annotations

import argparse
import errno
import fcntl
import mmap
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hightide.ir.limits import DiskLimit
from hightide.stores import disk, disk_file
from hightide.stores.disk import DiskStore
from hightide.stores.store import Region

SECTOR = 4096
REQUEST_BYTES = 16 * SECTOR
FILE_BYTES = 512 * SECTOR  # the users' regions at their largest, and more
NUM_USERS = 3  # threads
WAIT_S = 90.0  # a request that is not done by then hangs
HANG_TIMEOUT_S = 0.8  # of the store, where one is to hang
CALLS = ("preadv", "pwritev")
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT}
IN_FLIGHT = (*ERRORS, "short", "nothing moved", "slow", "hangs", "write lost", "read elsewhere", "written elsewhere")
BEHIND = ("bit changed", "sector zeroed", "sector exchanged")
AT_START = ("no folder", "a link", "no directory", "too little room", "full while set aside", "no direct transfers")
MOUNTED = ("full tmpfs", "read-only")
KINDS = (*IN_FLIGHT, *BEHIND, *AT_START, *MOUNTED, "closed under way", "killed")
MUST_SHOW = (*AT_START[:-1], *MOUNTED, "hangs")  # each time: others may hit what nobody reads again, or be made good


@dataclass
class Found:
    """Of one round."""

    kind: str
    problems: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    hit: bool = False  # the fault has happened
    skipped: str = ""

    def blame(self, what: str, detail: object = "") -> None:
        self.problems.append(f"{what}: {detail}")


class Faults:
    """Stands in for `os.preadv` and `os.pwritev`: the call with the chosen number, of those that can be, is hit."""

    def __init__(self, kind: str, at: int, chance: random.Random, found: Found) -> None:
        self.kind, self.at, self.chance, self.found = kind, at, chance, found
        self.real = {name: getattr(os, name) for name in CALLS}
        self.go_on = threading.Event()  # for one that hangs
        self._lock = threading.Lock()
        self._num = 0

    def call(self, name: str, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        real, num_bytes = self.real[name], len(buffers[0])
        if not self._is_hit(name):
            return real(descriptor, buffers, offset)
        self.found.hit = True
        elsewhere = (offset + SECTOR * self.chance.randrange(1, 64)) % (FILE_BYTES - REQUEST_BYTES) // SECTOR * SECTOR
        match self.kind:
            case "short":
                return real(descriptor, [memoryview(buffers[0])[: max(1, num_bytes // SECTOR // 2) * SECTOR]], offset)
            case "nothing moved":
                return 0
            case "slow":
                time.sleep(self.chance.uniform(0.05, 0.3))
            case "hangs":
                self.go_on.wait(WAIT_S)
            case "write lost":
                return num_bytes
            case "read elsewhere" | "written elsewhere":
                return real(descriptor, buffers, elsewhere)
            case error:
                raise OSError(ERRORS[error], os.strerror(ERRORS[error]))
        return real(descriptor, buffers, offset)

    def _is_hit(self, name: str) -> bool:
        only = {"write lost": "pwritev", "written elsewhere": "pwritev", "read elsewhere": "preadv"}
        if self.kind not in IN_FLIGHT or only.get(self.kind, name) != name:
            return False
        with self._lock:
            self._num += 1
            return self._num == self.at

    @contextmanager
    def in_place(self) -> Iterator[None]:
        for name in CALLS:
            setattr(os, name, lambda *args, name=name: self.call(name, *args))
        try:
            yield
        finally:
            self.go_on.set()
            for name, real in self.real.items():
                setattr(os, name, real)


class User:
    """A thread that writes and reads regions of its own. It knows what is in them."""

    def __init__(self, store: DiskStore, seed: int, found: Found) -> None:
        self.store, self.found, self.chance = store, found, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        sizes = [self.chance.choice((700, SECTOR, 5 * SECTOR + 300, 40 * SECTOR)) for _ in range(3)]
        self.regions = [store.allocate(size, f"array {seed}-{index}") for index, size in enumerate(sizes)]
        self.content = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        arena = torch.frombuffer(mmap.mmap(-1, 64 * SECTOR), dtype=torch.uint8)
        self.memory = {True: arena, False: arena[13:]}  # aligned as the disk asks for, or not
        self.wrote = threading.Event()

    def run(self, num_turns: int) -> None:
        try:
            for _ in range(num_turns):
                index = self.chance.randrange(len(self.regions))
                if self.chance.random() < 0.5:
                    self.write(index)
                else:
                    self.read(index)
        except RuntimeError as error:  # the store is closed
            self.found.errors.append(error)
        finally:
            self.wrote.set()

    def write(self, index: int) -> None:
        region, content = self.regions[index], self.content[index]
        start = self.chance.choice((0, 0, self.chance.randrange(region.num_bytes)))
        part = content[start:]
        part.copy_(torch.randint(256, part.shape, generator=self.generator).to(torch.uint8))
        source = self.memory[self.chance.random() < 0.5][: len(part)]
        source.copy_(part)
        self._wait(lambda: self.store.write(region, source, start), region)
        self.wrote.set()

    def read(self, index: int) -> None:
        region = self.regions[index]
        into = self.memory[self.chance.random() < 0.5][: region.num_bytes]
        into.fill_(0x55)
        if self._wait(lambda: self.store.read(region, into), region) and not torch.equal(into, self.content[index]):
            self.found.blame("silent", region)

    def _wait(self, move: Callable[[], object], region: Region) -> bool:
        ticket = move()
        began_s = time.monotonic()
        try:
            ticket.wait(WAIT_S)  # type: ignore[attr-defined]
            return True
        except (OSError, RuntimeError) as error:
            self.found.errors.append(error)
            if time.monotonic() - began_s > WAIT_S - 1:
                self.found.blame("hang", error)
            if isinstance(error, OSError) and " bytes at " not in str(error):
                self.found.blame("error without a place", repr(error))
            return False


def store_round(kind: str, folder: Path, seed: int, found: Found) -> None:
    chance = random.Random(seed)
    first = 3 if kind == "hangs" else 1  # before that the store is being made
    faults = Faults(kind, chance.randrange(first, 40), chance, found)
    with faults.in_place() if kind != "no direct transfers" else refused_transfers(found):
        timeout_s = HANG_TIMEOUT_S if kind == "hangs" else WAIT_S / 2
        is_direct = chance.random() < 0.8
        try:
            store = DiskStore(
                [DiskLimit(str(folder), FILE_BYTES)],
                request_bytes=REQUEST_BYTES,
                depth=2,
                timeout_s=timeout_s,
                is_direct=is_direct or kind == "no direct transfers",
            )
        except ValueError as error:  # it was hit when it was tried
            found.errors.append(error)
            return
        users = [User(store, seed * NUM_USERS + number, found) for number in range(NUM_USERS)]
        threads = [threading.Thread(target=user.run, args=(30,), daemon=True) for user in users]
        for thread in threads:
            thread.start()
        if kind in BEHIND and chance.random() < 0.5:
            users[0].wrote.wait(WAIT_S)
            change_behind(kind, store, users[0], faults, chance)
        if kind == "closed under way":
            time.sleep(chance.random() * 0.02)
            found.hit = True
            store.close()
        for thread in threads:
            thread.join(2 * WAIT_S)
            if thread.is_alive():
                found.blame("hang", "a thread waits for ever")
        if kind in BEHIND and not found.hit:
            change_behind(kind, store, users[0], faults, chance)
            found.hit = True
        if kind != "closed under way":
            for user in users:
                for index in range(len(user.regions)):
                    user.read(index)
        before_s = time.monotonic()
        store.close()
        if time.monotonic() - before_s > WAIT_S:
            found.blame("hang", "close")


@contextmanager
def refused_transfers(found: Found) -> Iterator[None]:
    """A file system that accepts O_DIRECT when a file is opened, and then refuses each transfer."""
    real = {name: getattr(os, name) for name in CALLS}

    def call(name: str, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            found.hit = True
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real[name](descriptor, buffers, offset)

    for name in CALLS:
        setattr(os, name, lambda *args, name=name: call(name, *args))
    try:
        yield
    finally:
        for name in CALLS:
            setattr(os, name, real[name])


def change_behind(kind: str, store: DiskStore, user: User, faults: Faults, chance: random.Random) -> None:
    """The first sectors of a region, past the store."""
    file = store._disks[0].file
    region = max(user.regions, key=lambda one: one.num_bytes)
    page, other = mmap.mmap(-1, SECTOR), mmap.mmap(-1, SECTOR)
    faults.real["preadv"](file._descriptor, [page], region.offset)
    if kind == "bit changed":
        page[chance.randrange(min(SECTOR, region.num_bytes))] ^= 1 << chance.randrange(8)
    elif kind == "sector zeroed":
        page[:] = bytes(SECTOR)
    else:
        faults.real["preadv"](file._descriptor, [other], FILE_BYTES - SECTOR)
        page[:] = other[:]
    with suppress(OSError):
        faults.real["pwritev"](file._descriptor, [page], region.offset)


def start_round(kind: str, folder: Path, found: Found) -> None:
    """What is refused before anything is trained."""
    target, num_bytes = folder, FILE_BYTES
    real = os.posix_fallocate
    if kind == "no folder":
        target = folder / "missing"
    elif kind == "a link":
        target = folder / "link"
    elif kind == "no directory":
        target = folder / "weights.bin"
    elif kind == "too little room":
        num_bytes = 1 << 60
    else:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.posix_fallocate = refuse
    try:
        refuse_store(target, num_bytes, found)
    finally:
        os.posix_fallocate = real


def refuse_store(target: Path, num_bytes: int, found: Found) -> None:
    found.hit = True
    try:
        DiskStore([DiskLimit(str(target), num_bytes)]).close()
    except ValueError as error:
        found.errors.append(error)
        if str(target) not in str(error):
            found.blame("error without a place", error)
    else:
        found.blame("silent", "a store where there can be none")


def mounted_round(kind: str, folder: Path, found: Found) -> None:
    with mounted(folder / "mount", "size=1m" if kind == "full tmpfs" else "ro,size=8m") as is_there:
        if not is_there:
            found.skipped = "may not mount"
            return
        mount = folder / "mount"
        if kind == "full tmpfs":
            mount.joinpath("mine").write_bytes(bytes(512 << 10))
        refuse_store(mount, FILE_BYTES, found)
        if kind == "full tmpfs":  # what was free a moment ago is not any more
            checked, disk_file._check_room = disk_file._check_room, lambda *_: None
            try:
                refuse_store(mount, FILE_BYTES, found)
            finally:
                disk_file._check_room = checked
        if kind == "full tmpfs" and [path.name for path in mount.iterdir()] != ["mine"]:
            found.blame("left behind", list(mount.iterdir()))


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[bool]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        is_there = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        is_there = False
    try:
        yield is_there
    finally:
        if is_there:
            subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def killed_round(folder: Path, seed: int, found: Found) -> None:
    """In a child of a process without threads, at any moment of the store's life."""
    child = multiprocessing.get_context("forkserver").Process(target=work_until_killed, args=(str(folder), seed))
    child.start()
    time.sleep(random.Random(seed).uniform(0.0, 0.25))
    found.hit = child.is_alive()
    child.kill()
    child.join(WAIT_S)
    if child.is_alive():
        found.blame("hang", "a killed process")


def work_until_killed(folder: str, seed: int) -> None:
    while True:
        store = DiskStore([DiskLimit(folder, FILE_BYTES)], request_bytes=REQUEST_BYTES, depth=2)
        User(store, seed, Found("killed")).run(20)
        store.close()


class Others:
    """Files and links of somebody else, in the same folder."""

    def __init__(self, folder: Path, outside: Path) -> None:
        self.folder, self.outside = folder, outside
        outside.mkdir()
        for name in ("weights.bin", ".hightide-0123456789abcdef", "notes"):
            (folder / name).write_bytes(os.urandom(3 * SECTOR))
        (folder / "link").symlink_to(outside)
        self.before = self._look()

    def _look(self) -> dict[str, object]:
        seen: dict[str, object] = {"outside": sorted(self.outside.iterdir())}
        for path in sorted(self.folder.iterdir()):
            seen[path.name] = os.readlink(path) if path.is_symlink() else (path.read_bytes(), path.stat().st_mtime_ns)
        return seen

    def check(self, found: Found) -> None:
        now = self._look()
        touched = [name for name in self.before if now.get(name) != self.before[name]]
        if touched:
            found.blame("foreign files touched", touched)
        if set(now) - set(self.before):
            found.blame("left behind", set(now) - set(self.before))


def run_round(kind: str, folder: Path, others: Others, seed: int) -> Found:
    found = Found(kind)
    num_threads, num_open = threading.active_count(), len(os.listdir("/proc/self/fd"))
    if kind in AT_START[:-1]:
        start_round(kind, folder, found)
    elif kind in MOUNTED:
        mounted_round(kind, folder, found)
    elif kind == "killed":
        killed_round(folder, seed, found)
    else:
        store_round(kind, folder, seed, found)
    if kind in MUST_SHOW and found.hit and not found.errors:
        found.blame("silent", "no error was raised")
    others.check(found)
    if kind not in ("hangs", "killed"):  # a thread that hung ends by and by
        deadline_s = time.monotonic() + WAIT_S
        while threading.active_count() > num_threads and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if threading.active_count() > num_threads or len(os.listdir("/proc/self/fd")) > num_open:
            found.blame("left behind", "threads or open files")
    return found


def run_all(kinds: list[str], folder: Path, seed: int, tell: Callable[[Found], None] = lambda _: None) -> list[Found]:
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "hightide.stores.disk"])
    with tempfile.TemporaryDirectory(dir=folder) as place:
        inside = Path(place, "scratch")
        inside.mkdir()
        others = Others(inside, Path(place, "outside"))
        all_found = []
        for index, kind in enumerate(kinds):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = run_round(kind, inside, others, seed * 100_003 + index)
            tell(found)
            all_found.append(found)
        return all_found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    disk.JOIN_TIMEOUT_S = 0.5  # nobody waits for what hangs
    kinds = [KINDS[index % len(KINDS)] for index in range(options.count)]
    random.Random(options.seed).shuffle(kinds)
    rows: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    problems: Counter[str] = Counter()

    def tell(found: Found) -> None:
        row = rows[found.kind]
        row["rounds"] += 1
        row["hit"] += found.hit
        row["told"] += found.hit and bool(found.errors)
        row["skipped"] += bool(found.skipped)
        for problem in found.problems:
            problems[problem.split(":")[0]] += 1
            print(f"{found.kind}: {problem}", file=sys.stderr)

    run_all(kinds, options.folder, options.seed, tell)
    print(f"{'kind':22} {'rounds':>6} {'hit':>5} {'an error told it':>17} {'skipped':>8}")
    for kind, row in rows.items():
        print(f"{kind:22} {row['rounds']:6} {row['hit']:5} {row['told']:17} {row['skipped']:8}")
    names = ("hang", "silent", "foreign files touched", "left behind", "error without a place")
    print(", ".join(f"{name}: {problems[name]}" for name in names))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
