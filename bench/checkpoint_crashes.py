"""Crashes, faults and damages of checkpoints: `bench/checkpoint_crashes.py` (1,000 crashes and 400 faults, 10 minutes).

Tiny models train, on the host and on all tiers, and save. Replayed crashes: the system calls of several saves (beside
training, of one step twice, with others removed, given up for an error) are recorded, and what a disk may hold after
any number of them is made again (see crash_model.py). Killed: a process that trains and saves, at any moment. Faults
sit in place of the system calls; full disks are real where the user may mount one. Damages are done to whole files.

After each: the newest checkpoint is whole and not older than the last one of which a save had returned; it loads; the
losses of the next steps are those of training that nothing happened to; the next save works, and removes what was left
behind and nothing else. Or, for damaged files: the load says which, and where the newest whole checkpoint is."""

from __future__ import annotations

import argparse
import errno
import importlib
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from crash_model import WAYS, Log, crashed, read_tree, recording, write_tree  # noqa: E402
from disk_faults import mounted  # noqa: E402

import hightide  # noqa: E402
from disk_plans import folder as disk_limits  # noqa: E402
from disk_plans import placed  # noqa: E402
from hightide.checkpoint.files import filesystem, manifest  # noqa: E402
from hightide.checkpoint.files.folder import damages  # noqa: E402
from hightide.checkpoint.files.names import parse_name  # noqa: E402

writer = importlib.import_module("hightide.checkpoint.files.writer")
blocks = importlib.import_module("hightide.checkpoint.files.blocks")

TIERS = {"host": "host", "disk": "every tier"}  # and homes of blocks
WORDS, WIDTH, SAMPLES, LENGTH = 24, 8, 4, 5
NUM_LOSSES = 160  # known of training that nothing happens to
RESUMED = 2  # steps that are compared
WAIT_S = 60.0  # a save that is not done by then hangs
# So that there are many calls, of every kind, and values are copied by the threads that write.
SMALL = ((writer, "BLOCK_BYTES", 1024), (blocks, "SMALL_BYTES", 16), (manifest, "PIECE_BYTES", 4096))
FOREIGN = {
    "notes.txt": b"mine",
    "best": {"model.safetensors": b"mine"},
    "step-700": {"mine": b""},
    "step-900.tmp": {"x": b""},
}
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT}
CALLS = ("write", "sync", "await_written", "create", "make_folder", "set_aside", "rename", "unlink", "remove_folder")
FAULTS = (*(f"{name} in {call}" for call in CALLS for name in ERRORS), "short writes", "nothing written")
DAMAGES = (
    "bit changed",
    "sector zeroed",
    "cut off",
    "longer",
    "missing",
    "manifest cut off",
    "manifest changed",
    "manifest missing",
)
REAL = ("full tmpfs", "file size limit", "read-only")
MADE_GOOD = ("unlink", "remove_folder", "short")  # of these a save may be whole


@dataclass
class Found:
    """Of one round."""

    kind: str
    problems: list[str] = field(default_factory=list)
    hit: bool = True  # what was to happen has happened
    skipped: str = ""

    def blame(self, what: str, why: object) -> None:
        self.problems.append(f"{what}: {why}")


# -- training --------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 20), nn.Dropout(0.1), nn.Tanh(), nn.Linear(20, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return {"loss": F.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())}


class Training:
    """A model with dropout, its optimizer and scheduler, and the number of steps that it has made."""

    def __init__(self, tier: str, folder: Path) -> None:
        model = Words() if tier == "host" else Words().bfloat16()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
        batch, limits = self._batch(0), hightide.Limits(gpu="16MiB", host="64MiB")
        plan = placed(hightide.plan(model, optimizer, batch, limits=limits, micro_batch=2), TIERS[tier])
        limits = disk_limits(folder) if plan.uses_disk else None
        self.model, self.optimizer = hightide.wrap(model, optimizer, batch, plan=plan, limits=limits)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.index = 0

    @staticmethod
    def _batch(seed: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return {name: torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=draw) for name in ("ids", "labels")}

    def step(self) -> float:
        loss = self.model(**self._batch(self.index))["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.index += 1
        return float(loss.detach())

    def save(self, folder: Path, **options: Any) -> hightide.Saving:
        extra = {"scheduler": self.scheduler.state_dict(), "seen": (self.index, {self.index: None})}
        return hightide.save(
            self.model, self.optimizer, folder, step=self.index, extra=extra, on_error="hold", **options
        )

    def load(self, folder: Path) -> Path:
        loaded = hightide.load(self.model, self.optimizer, folder)
        self.scheduler.load_state_dict(loaded.extra["scheduler"])
        assert loaded.step is not None and loaded.extra["seen"] == (loaded.step, {loaded.step: None})
        self.index = loaded.step
        return loaded.path


@contextmanager
def small_pieces() -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in SMALL]
    for module, name, value in SMALL:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@dataclass
class Subject:
    """A training that is loaded again and again, and what it does when nothing happens."""

    training: Training
    losses: list[float]
    first: Path  # a checkpoint of step 1
    folder: Path  # for what rounds leave

    @classmethod
    def make(cls, tier: str, folder: Path, num_losses: int = NUM_LOSSES) -> Subject:
        (folder / "disk").mkdir(parents=True)
        training = Training(tier, folder / "disk")
        torch.manual_seed(5)
        losses = [training.step()]
        first = training.save(folder / "first", wait=True).wait(WAIT_S)
        losses += [training.step() for _ in range(num_losses - 1)]
        return cls(training, losses, first, folder)


# -- what must hold --------------------------------------------------------------------------------------------------


def check(
    subject: Subject, folder: Path, least_step: int | None, found: Found, again: Callable[[], None] | None = None
) -> None:
    """After a crash or a fault. `again` is called instead of the save that must work afterwards."""
    path = hightide.latest(folder)
    if path is None:
        if least_step is not None:
            found.blame("lost", f"step {least_step} was saved, nothing is there: {sorted(os.listdir(folder))}")
        subject.training.load(subject.first)
    else:
        resume(subject, folder, path, least_step, found)
    if again is not None:
        again()
        return
    save_again(subject, folder, found)


def resume(subject: Subject, folder: Path, path: Path, least_step: int | None, found: Found) -> None:
    step, _ = parse_name(path.name) or (-1, "")
    if least_step is not None and step < least_step:
        found.blame("lost", f"step {least_step} was saved, {path.name} is the newest: {sorted(os.listdir(folder))}")
    for text in damages(path):
        found.blame("silent", text)
    try:
        loaded = subject.training.load(folder)
    except ValueError as error:
        found.blame("lost", error)
        return
    if loaded != path or subject.training.index != step:
        found.blame("silent", f"{loaded} was loaded, {path} is the newest")
    losses = [subject.training.step() for _ in range(RESUMED)]
    if losses != subject.losses[step : step + RESUMED]:
        found.blame("silent", f"losses after step {step}: {losses}, not {subject.losses[step : step + RESUMED]}")


def save_again(subject: Subject, folder: Path, found: Found) -> None:
    try:
        path = subject.training.save(folder, keep=3).wait(WAIT_S)
    except TimeoutError as error:
        found.blame("hung", error)
        return
    except ValueError as error:
        found.blame("no save any more", error)
        return
    newest = hightide.latest(folder, verify=True)
    if newest is None or path not in (newest, folder / f"step-{subject.training.index}"):
        found.blame("lost", f"{path} was saved, {newest} is the newest")
    there = read_tree(folder)
    for name in there:
        if name not in FOREIGN and (parse_name(name) or (0, "."))[1]:
            found.blame("left behind", name)
    if {name: there[name] for name in FOREIGN if name in there} != {
        name: tree for name, tree in FOREIGN.items() if name in there
    } or ("notes.txt" in there and not FOREIGN.keys() <= there.keys()):
        found.blame("foreign files touched", sorted(there))


# -- replayed crashes ------------------------------------------------------------------------------------------------


def record(subject: Subject, folder: Path) -> Log:
    """Saves of every kind, among files of others."""
    write_tree(folder, FOREIGN)
    training = subject.training
    training.load(subject.first)
    with small_pieces(), recording(folder) as log:
        saving = training.save(folder)
        training.step()  # beside it
        log.commit(parse_name(saving.wait(WAIT_S).name)[0])  # type: ignore[index]
        for _ in range(2):  # the second replaces the first
            training.save(folder).wait(WAIT_S)
            log.commit(training.index)
        training.step()
        saving = training.save(folder, keep=2)  # removes one
        training.step()
        log.commit(parse_name(saving.wait(WAIT_S).name)[0])  # type: ignore[index]
        with failing("write", 9, errno.EIO):
            try:
                training.save(folder).wait(WAIT_S)
                raise AssertionError("a save with an error is none")
            except ValueError:
                pass
        training.step()
        training.save(folder, keep=1, keep_every=3).wait(WAIT_S)
        log.commit(training.index)
    return log


def replay(subject: Subject, log: Log, num_calls: int, way: str, seed: int) -> Found:
    """With `seed` a multiple of 5, the save that follows the crash crashes too."""
    chance, found = random.Random(seed), Found(way)
    folder = subject.folder / f"replayed-{seed}"
    write_tree(folder, crashed(log, num_calls, way, chance))
    least_step = log.committed_step(num_calls)
    again = None
    if seed % 5 == 0:
        found.kind = "twice"

        def again() -> None:
            with small_pieces(), recording(folder) as second:
                before = hightide.latest(folder)
                if before is not None:
                    second.commit((parse_name(before.name) or (0, ""))[0])
                subject.training.save(folder, keep=2).wait(WAIT_S)
                second.commit(subject.training.index)
            num_second = chance.randint(0, len(second.calls))
            crashed_again = subject.folder / f"replayed-{seed}-again"
            write_tree(crashed_again, crashed(second, num_second, way, chance))
            least_of_second = second.committed_step(num_second)
            check(subject, crashed_again, least_of_second, found)
            shutil.rmtree(crashed_again)

    check(subject, folder, least_step, found, again)
    shutil.rmtree(folder)
    return found


def replays(subject: Subject, count: int, seed: int) -> Iterator[Found]:
    """Evenly over the log, each way in turn."""
    log = record(subject, subject.folder / "recorded")
    shutil.rmtree(subject.folder / "recorded")
    for index in range(count):
        num_calls = round(index * len(log.calls) / max(count - 1, 1))
        yield replay(subject, log, num_calls, WAYS[(index + seed) % len(WAYS)], seed * 100_000 + index)


# -- killed processes ------------------------------------------------------------------------------------------------


def train_until_killed(tier: str, folder: str, disk: str, told: Any) -> None:
    """Goes on from the newest checkpoint, saves after each step, and tells each that is there."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    training = Training(tier, Path(disk))
    training.load(Path(folder))
    told.send_bytes(b"begin")
    with small_pieces():
        while True:
            training.step()
            saving = training.save(Path(folder), keep=2, keep_every=10)
            step = training.index
            training.step()
            saving.wait(WAIT_S)
            told.send_bytes(b"%d" % step)


def kills(subject: Subject, tier: str, count: int, seed: int) -> Iterator[Found]:
    context, chance = multiprocessing.get_context("forkserver"), random.Random(seed)
    context.set_forkserver_preload(["hightide.api", "hightide.checkpoint.save", "hightide.checkpoint.load"])
    folder = subject.folder / "killed"
    least_step = 1
    for index in range(count):
        if not folder.exists():
            write_tree(folder, {**FOREIGN, subject.first.name: read_tree(subject.first)})
            least_step = 1
        found = Found("killed")
        ours, theirs = context.Pipe(duplex=False)
        arguments = (tier, str(folder), str(subject.folder / "disk"), theirs)
        child = context.Process(target=train_until_killed, args=arguments)
        child.start()
        theirs.close()
        assert ours.poll(WAIT_S) and ours.recv_bytes() == b"begin", "the process did not begin"
        time.sleep(chance.uniform(0.0, 0.4))
        found.hit = child.is_alive()
        child.kill()
        child.join(WAIT_S)
        if child.is_alive():
            found.blame("hung", "a killed process")
        while True:
            try:
                least_step = int(ours.recv_bytes())
            except (EOFError, OSError):
                break
        check(subject, folder, least_step, found)
        least_step = subject.training.index
        if index % 8 == 7 or subject.training.index > NUM_LOSSES - 60:
            shutil.rmtree(folder)
        yield found
    shutil.rmtree(folder, ignore_errors=True)


# -- faults ----------------------------------------------------------------------------------------------------------


@contextmanager
def failing(call: str, index: int, number: int) -> Iterator[Counter[str]]:
    """The call of that number fails, and each after it: a disk that is full stays so. `unlink` fails once."""
    real, count = getattr(filesystem, call), Counter[str]()

    def fail(*args: Any) -> Any:
        count["calls"] += 1
        if count["calls"] == index or (count["calls"] > index and call not in ("unlink", "remove_folder")):
            count["hit"] += 1
            raise OSError(number, os.strerror(number))
        return real(*args)

    setattr(filesystem, call, fail)
    try:
        yield count
    finally:
        setattr(filesystem, call, real)


@contextmanager
def coming_short(kind: str, chance: random.Random) -> Iterator[Counter[str]]:
    """Writes that take a part of what they are given; or nothing, from some moment on."""
    real, count, start = filesystem.write, Counter[str](), chance.randint(1, 20)

    def write(file: int, memory: memoryview, offset: int) -> int:
        count["calls"] += 1
        if kind == "nothing written" and count["calls"] >= start:
            count["hit"] += 1
            return 0
        taken = chance.choice([0, 1, len(memory) // 2, len(memory)])
        count["hit"] += taken < len(memory)
        return real(file, memory[:taken], offset)

    filesystem.write = write
    try:
        yield count
    finally:
        filesystem.write = real


def fault(subject: Subject, kind: str, seed: int) -> Found:
    """In the save of step 3; steps 1 and 2 are there, every second time step 3 too. One is to be removed."""
    name, _, call = kind.partition(" in ")
    chance, found = random.Random(seed), Found(name)
    folder, training = subject.folder / f"fault-{seed}", subject.training
    write_tree(folder, {**FOREIGN, subject.first.name: read_tree(subject.first)})
    training.load(subject.first)
    training.step()
    training.save(folder).wait(WAIT_S)
    training.step()
    if seed % 2:
        training.save(folder).wait(WAIT_S)
    most = {"write": 40, "sync": 12, "await_written": 4, "create": 7, "set_aside": 7, "rename": 2, "unlink": 5}.get(
        call, 1
    )
    wrong = failing(call, chance.randint(1, most), ERRORS[name]) if call else coming_short(kind, chance)
    saved = False
    with small_pieces(), wrong as count, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            training.save(folder, keep=2).wait(WAIT_S)
            saved = True
        except TimeoutError as error:
            found.blame("hung", error)
        except ValueError as error:
            if "as they were" not in str(error):
                found.blame("not said", error)
    found.hit = count["hit"] > 0
    is_told = any("an old checkpoint cannot be removed" in str(one.message) for one in told)
    if saved and found.hit and not is_told and not any(word in kind for word in MADE_GOOD):
        found.blame("silent", f"{kind}: the save returned")
    check(subject, folder, 3 if saved or seed % 2 else 2, found)
    shutil.rmtree(folder)
    return found


def real_fault(subject: Subject, kind: str, seed: int) -> Found:
    """Of the system itself."""
    found, training = Found(kind), subject.training
    folder = subject.folder / f"real-{seed}"
    training.load(subject.first)
    size = sum(file.stat().st_size for file in subject.first.iterdir())
    options = {"full tmpfs": f"size={2 * size // 1024 + 8 * 4}k", "read-only": "size=16m", "file size limit": ""}[kind]
    with mounted(folder, options) if options else made(folder) as is_there:
        if not is_there:
            return replace(found, skipped="may not mount")
        training.save(folder).wait(WAIT_S)
        training.step()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if kind == "full tmpfs":
            (folder / "mine").write_bytes(bytes(size // 2))
        elif kind == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            training.save(folder).wait(WAIT_S)
            found.blame("silent", "the save returned")
        except ValueError as error:
            if kind != "read-only" and "are free" not in str(error):
                found.blame("not said", error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        training.step()  # goes on
        (folder / "mine").unlink(missing_ok=True) if kind != "read-only" else None
        if kind == "read-only":
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        if kind == "full tmpfs":
            subprocess.run(["mount", "-o", "remount,size=16m", str(folder)], check=True)
        check(subject, folder, 1, found)
    return found


@contextmanager
def made(folder: Path) -> Iterator[bool]:
    folder.mkdir()
    yield True
    shutil.rmtree(folder)


# -- damaged files ---------------------------------------------------------------------------------------------------


def damage(subject: Subject, kind: str, seed: int) -> Found:
    """To a file of step 2; step 1 is whole."""
    chance, found, training = random.Random(seed), Found(kind), subject.training
    folder = subject.folder / f"damaged-{seed}"
    write_tree(folder, {subject.first.name: read_tree(subject.first)})
    training.load(subject.first)
    training.step()
    with small_pieces():
        path = training.save(folder).wait(WAIT_S)
    names = sorted(os.listdir(path))
    names = ["manifest.json"] if "manifest" in kind else [name for name in names if name != "manifest.json"]
    file = path / names[seed % len(names)]
    found.hit = spoil(file, kind, chance)
    by_size = kind not in ("bit changed", "sector zeroed")
    if found.hit and not damages(path):
        if kind != "manifest changed":
            found.blame("silent", f"{file.name} is damaged, and nobody sees it")
    elif found.hit and by_size and hightide.latest(folder) != folder / "step-1":
        found.blame("silent", f"{file.name} is damaged, and latest is {hightide.latest(folder)}")
    if found.hit and damages(path):
        if hightide.latest(folder, verify=True) != folder / "step-1":
            found.blame("lost", f"{hightide.latest(folder, verify=True)} is the newest whole one")
        refused(subject, path, file, found)
    resume(subject, folder / "step-1", folder / "step-1", 1, found)
    shutil.rmtree(folder)
    return found


def spoil(file: Path, kind: str, chance: random.Random) -> bool:
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    if kind in ("bit changed", "manifest changed"):
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "sector zeroed":
        start = at // 512 * 512
        if not any(data[start : start + 512]):
            return False
        data[start : start + 512] = bytes(len(data[start : start + 512]))
    elif kind == "longer":
        data += b"\0"
    else:
        del data[at:]
    file.unlink()
    if "missing" not in kind:
        file.write_bytes(data)
    return True


def refused(subject: Subject, path: Path, file: Path, found: Found) -> None:
    """By a load of just that one; or nothing of the file was needed, and everything is right."""
    try:
        subject.training.load(path)
    except ValueError as error:
        if file.name not in str(error) or str(error).count(str(path.parent / "step-1")) != 1:
            found.blame("not said", error)
        return
    losses = [subject.training.step() for _ in range(RESUMED)]
    if losses != subject.losses[2 : 2 + RESUMED]:
        found.blame("silent", f"{file.name} was loaded")


# -- all of it -------------------------------------------------------------------------------------------------------


def rounds(
    tier: str, folder: Path, num_replays: int, num_kills: int, num_faults: int, num_damages: int, seed: int = 0
) -> Iterator[Found]:
    subject = Subject.make(tier, folder, NUM_LOSSES if num_kills else 12)
    yield from replays(subject, num_replays, seed)
    for index in range(num_faults):
        yield fault(subject, FAULTS[index % len(FAULTS)], seed + index // len(FAULTS) + index)
    for index in range(num_damages):
        yield damage(subject, DAMAGES[index % len(DAMAGES)], seed + index)
    for index, kind in enumerate(REAL if num_faults else ()):
        if kind != "file size limit" or tier == "host":  # what lives on a disk would not be allowed to grow either
            yield real_fault(subject, kind, index)
    yield from kills(subject, tier, num_kills, seed)


def table(found: list[Found]) -> str:
    kinds: dict[str, list[Found]] = defaultdict(list)
    for one in found:
        kinds[one.kind].append(one)
    lines = ["| kind | rounds | happened | lost | hung | silent | other |", "|---|---:|---:|---:|---:|---:|---:|"]
    for kind, those in [*kinds.items(), ("all", found)]:
        words = Counter(problem.partition(":")[0] for one in those for problem in one.problems)
        named = [words.pop(word, 0) for word in ("lost", "hung", "silent")]
        happened = sum(one.hit and not one.skipped for one in those)
        lines.append(f"| {kind} | {len(those)} | {happened} | {' | '.join(map(str, named))} | {sum(words.values())} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=900)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--damages", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where trees are made; by default in memory")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found, began_s = [], time.monotonic()
    place = arguments.folder or ("/dev/shm" if os.path.isdir("/dev/shm") else None)
    for tier in TIERS:
        with tempfile.TemporaryDirectory(dir=place, prefix="hightide-") as folder:
            counts = [
                number // 2 for number in (arguments.replays, arguments.kills, arguments.faults, arguments.damages)
            ]
            for one in rounds(tier, Path(folder) / tier, *counts, arguments.seed):
                found.append(one)
                for problem in one.problems:
                    print(f"{tier}, {one.kind}: {problem}", flush=True)
    print(table(found))
    print(f"{time.monotonic() - began_s:.0f} s")
    sys.exit(any(one.problems for one in found))


if __name__ == "__main__":
    main()
