"""Odd environments: does a small training run work there, with the same losses, or is it refused clearly?

    python bench/environments.py                    # all; some need root (mounts, another user) and are else left out
    python bench/environments.py ascii "cache: "    # those whose name contains one of these

Each environment runs small programs in processes of their own: `train` (the command), `script` (a loop with
`hightide.wrap`), `plan` and `doctor`. One line each says what came of it:

    held          it worked with the losses that it has elsewhere, or was refused with one message and its exit code
    fault         a traceback, or "a fault of hightide"
    hang          not over after the time limit
    abort         ended by a signal
    other values  it worked, and the losses differ
    other end     another exit code than expected, or a file that should be as before and is not
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGES = Path(sys.executable).parents[1] / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
TIMEOUT_S = 900.0  # on a busy machine
TOLERANCE = 1e-5  # of a loss: numbers of threads change the order of sums
BAD_INPUT, FAILED, BROKEN_PIPE = 2, 3, 141
SETTINGS = """
steps: 3
device: cpu
limits: {gpu: 8MiB, host: 1GiB}
model: {hidden: 64, layers: 3, heads: 2, feed_forward: 128}
data: {sequences: 4, sequence_bytes: 32, path: @text@}
optimizer: {warmup_steps: 1}
sample: {num_bytes: 8}
micro_batch: 2
out: @out@
"""
MODEL = """
import torch
def build():
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    return torch.nn.Sequential(*layers), {"input": torch.zeros(8, 64)}
"""
PRELUDES = {
    "float64": "torch.set_default_dtype(torch.float64)",
    "device": "torch.set_default_device('cpu')",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "threads": "torch.set_num_threads(1)",
    "anomaly": "torch.autograd.set_detect_anomaly(True)",
    "no grad": "torch.set_grad_enabled(False)",
}


@dataclass(frozen=True)
class Place:
    """An environment's own folders."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def kernels(self) -> Path:
        return self.home / ".cache/hightide/kernels"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def text(self) -> Path:
        return self.folder / "text.txt"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"


@dataclass(frozen=True)
class Environment:
    """`@home`, `@folder`... in its strings are the folders of its `Place`."""

    name: str
    variables: dict[str, str | None] = field(default_factory=dict)
    programs: tuple[str, ...] = ("script",)
    exit_code: int = 0
    flags: tuple[str, ...] = ()  # of Python
    wrapper: tuple[str, ...] = ()  # words before the command
    prepare: Callable[[Place], None] = lambda place: None
    limits: dict[int, int] = field(default_factory=dict)  # of resources
    settings: dict[str, str] = field(default_factory=dict)  # in the text of the settings file
    prelude: str = ""  # of the script
    stdout: str = "pipe"  # closed: both; full: a full disk; head: nobody reads it
    umask: int = 0o022
    needs_root: bool = False
    has_cache: bool = True  # a built kernel is there when it begins
    before: str | None = None  # what the plan file holds, before and after


def _shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", f'{script} && exec "$@"', "sh")


def _mounted(script: str) -> tuple[str, ...]:
    return ("unshare", "-m", *_shell(script))


def _compiler(script: str, name: str = "cc") -> Callable[[Place], None]:
    def prepare(place: Place) -> None:
        path = place.folder / "tools and more" / name
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return prepare


def _spoil(change: Callable[[Path], None], pattern: str = "*.so") -> Callable[[Place], None]:
    def prepare(place: Place) -> None:
        for path in place.kernels.glob(pattern):
            change(path)

    return prepare


def _half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _foreign(path: Path) -> None:
    found = next(Path(sysconfig.get_path("stdlib")).rglob("lib-dynload/_json*.so"))
    shutil.copy(found, path)


def _fifo(place: Place) -> None:
    place.text.unlink()
    os.mkfifo(place.text)


CC = "@folder/tools and more/cc"
ANSWERS = 'case "$*" in *--version*) echo cc 1.0; exit;; esac'
STRANGER = ("setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups")
TRAIN, SCRIPT, PLAN, BOTH = ("train",), ("script",), ("plan",), ("train", "script")
ASCII = {"PYTHONIOENCODING": None, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENVIRONMENTS = [
    Environment("plain", programs=("train", "script", "plan", "doctor")),
    Environment("first time", programs=BOTH, has_cache=False),
    # The kernel's cache
    Environment("cache: half a library", programs=BOTH, prepare=_spoil(_half)),
    Environment("cache: an empty library", prepare=_spoil(lambda path: os.truncate(path, 0))),
    Environment("cache: a foreign library", programs=BOTH, prepare=_spoil(_foreign)),
    Environment("cache: a foreign checksum", prepare=_spoil(lambda p: p.write_text("x"), "*.sha256")),
    Environment("cache: a folder for a library", prepare=_spoil(lambda p: (p.unlink(), p.mkdir())[1])),
    Environment("cache: writable by others", prepare=lambda place: place.kernels.chmod(0o777)),
    Environment("cache: of another user", prepare=lambda p: os.chown(p.kernels, 1, 1), needs_root=True),
    Environment("cache: relative", {"XDG_CACHE_HOME": "cache"}),
    Environment("cache: empty", {"XDG_CACHE_HOME": ""}),
    Environment("cache: a file", {"XDG_CACHE_HOME": "/dev/null"}, ("train", "script", "plan")),
    Environment("cache: full disk", wrapper=_mounted('mount -t tmpfs -o size=16k tmpfs "$HOME"'), needs_root=True),
    Environment("cache: read-only disk", wrapper=_mounted('mount -t tmpfs -o ro tmpfs "$HOME"'), needs_root=True),
    Environment("cache: nothing may run", wrapper=_mounted('mount -t tmpfs -o noexec tmpfs "$HOME"'), needs_root=True),
    # The compiler
    Environment("CC missing", {"CC": "/nowhere/cc"}, programs=BOTH),
    Environment("CC with arguments", {"CC": "cc -g -Wall"}),
    Environment("CC with half a quotation", {"CC": "cc '-g"}),
    Environment("CC with spaces in its path", {"CC": CC}, prepare=_compiler('exec cc "$@"')),
    Environment("CC writes nothing", {"CC": CC}, prepare=_compiler("exit 0")),
    Environment("CC prints junk", {"CC": CC}, prepare=_compiler("head -c 9999 /dev/urandom; exit 1")),
    Environment("CC prints without end", {"CC": CC}, prepare=_compiler("yes")),
    Environment("CC hangs", {"CC": CC}, SCRIPT, prepare=_compiler("sleep 300")),
    Environment(
        "CC makes junk",
        {"CC": CC},
        prepare=_compiler(ANSWERS + '; for o; do case "$o" in *.so) echo no > "$o";; esac; done'),
    ),
    Environment(
        "CC makes half a library",
        {"CC": CC},
        prepare=_compiler(ANSWERS + '; cc "$@"; for o; do case "$o" in *.so) truncate -s 9000 "$o";; esac; done'),
    ),
    Environment("no kernels wanted", {"HIGHTIDE_KERNELS": "0"}),
    # Home, user, folders
    Environment("HOME missing", {"HOME": None}, programs=BOTH),
    Environment("HOME nowhere", {"HOME": "/nowhere"}, wrapper=STRANGER, needs_root=True),
    Environment("HOME a file", {"HOME": "/dev/null"}, ("train", "script", "plan")),
    Environment("HOME with spaces and letters", {"HOME": "@folder/höme räume"}, programs=BOTH),
    Environment("user without a name", {"HOME": None}, programs=BOTH, wrapper=STRANGER, needs_root=True),
    Environment(  # a script ends there as without hightide: torch's matrix products do not work
        "working folder deleted",
        programs=TRAIN,
        exit_code=BAD_INPUT,
        wrapper=_shell('mkdir gone && cd gone && rmdir "$PWD"'),
    ),
    Environment(
        "working folder read-only",
        programs=BOTH,
        wrapper=(*_shell('cd "$HOME/../empty"'),),
        prepare=lambda p: _empty(p),
    ),
    Environment("TMPDIR missing", {"TMPDIR": "/nowhere"}),
    Environment("TMPDIR full", {"TMPDIR": "@work"}, wrapper=_mounted('mount -t tmpfs -o size=4k tmpfs "$TMPDIR"')),
    Environment("umask 077", programs=BOTH, umask=0o077),
    Environment("umask 000", umask=0),
    Environment("no /proc", programs=BOTH, wrapper=_mounted("mount -t tmpfs tmpfs /proc"), needs_root=True),
    Environment("no /sys", programs=BOTH, wrapper=_mounted("mount -t tmpfs tmpfs /sys"), needs_root=True),
    # What the command writes and reads
    Environment("out a dangling link", programs=TRAIN, exit_code=BAD_INPUT, prepare=lambda p: p.out.symlink_to("gone")),
    Environment("out a file", programs=TRAIN, exit_code=BAD_INPUT, prepare=lambda place: place.out.touch()),
    Environment("out below a file", programs=TRAIN, exit_code=BAD_INPUT, settings={"out": "@text/runs"}),
    Environment("out too long", programs=TRAIN, exit_code=BAD_INPUT, settings={"out": f"@out/{'o' * 300}"}),
    Environment("out with a NUL", programs=TRAIN, exit_code=BAD_INPUT, settings={"out": '"a\\0b"'}),
    Environment("out in a read-only disk", programs=TRAIN, exit_code=BAD_INPUT, settings={"out": "/proc/runs"}),
    Environment("text a pipe", programs=TRAIN, exit_code=BAD_INPUT, prepare=_fifo),
    Environment("text without end", programs=TRAIN, exit_code=BAD_INPUT, settings={"text": "/dev/zero"}),
    Environment("text empty", programs=TRAIN, exit_code=BAD_INPUT, prepare=lambda place: os.truncate(place.text, 0)),
    Environment(
        "plan: full disk",
        programs=PLAN,
        exit_code=BAD_INPUT,
        limits={resource.RLIMIT_FSIZE: 1000},
        before="the plan of yesterday\n",
    ),
    # Terminals and streams
    Environment("ascii", {"PYTHONIOENCODING": "ascii"}, ("train", "script", "plan", "doctor")),
    Environment("ascii: POSIX", ASCII, ("train", "script", "plan")),
    Environment("ascii: cp1252", {"PYTHONIOENCODING": "cp1252"}, TRAIN),
    Environment("streams closed", programs=BOTH, stdout="closed"),
    Environment("nobody reads", programs=TRAIN, stdout="head", exit_code=BROKEN_PIPE),
    Environment("output to a full disk", programs=TRAIN, stdout="full", exit_code=FAILED),
    Environment("terminal: dumb", {"TERM": "dumb", "NO_COLOR": "1"}, TRAIN),
    Environment("terminal: no columns", {"COLUMNS": "0"}, TRAIN),
    Environment("terminal: few columns", {"COLUMNS": "7"}, TRAIN),
    Environment("terminal: columns without end", {"COLUMNS": "99999999999"}, TRAIN),
    Environment("terminal: columns in words", {"COLUMNS": "²"}, TRAIN),
    # The machine and its limits
    Environment("OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1"}),
    Environment("OMP_NUM_THREADS=0", {"OMP_NUM_THREADS": "0"}),
    Environment("OMP_NUM_THREADS=many", {"OMP_NUM_THREADS": "many"}, programs=BOTH),
    Environment("one core", programs=BOTH, wrapper=("taskset", "-c", "0")),
    Environment("CUDA_VISIBLE_DEVICES=junk", {"CUDA_VISIBLE_DEVICES": "junk,-7"}),
    Environment("few files", programs=BOTH, limits={resource.RLIMIT_NOFILE: 64}),
    Environment("no locked memory", limits={resource.RLIMIT_MEMLOCK: 0}),
    Environment("address space of 6 GiB", programs=BOTH, limits={resource.RLIMIT_AS: 6 << 30}),
    Environment("no core files, small stacks", limits={resource.RLIMIT_CORE: 0, resource.RLIMIT_STACK: 1 << 20}),
    # Python and torch
    Environment("python -O", {"PYTHONOPTIMIZE": "1"}, BOTH),
    Environment("python -O -O", {"PYTHONOPTIMIZE": "2"}),  # transformers needs its docstrings, so no `train`
    Environment("python -W error", programs=BOTH, flags=("-W", "error")),
    Environment("python: development mode", {"PYTHONDEVMODE": "1"}, programs=BOTH),
    Environment("python -I", programs=BOTH, flags=("-I",)),
    Environment("python -S", flags=("-S",)),
    Environment("python -P", flags=("-P",)),
    Environment("python: other hashes", {"PYTHONHASHSEED": "7"}),
    *(Environment(f"torch: {name}", programs=SCRIPT, prelude=name) for name in PRELUDES),
    Environment("multiprocessing: spawn", programs=("spawn",)),
]


def _empty(place: Place) -> None:
    (place.folder / "empty").mkdir(mode=0o555)


# ---- what runs in a process of its own


def _child(program: str, place: Place, prelude: str) -> None:
    sys.path[:0] = [str(SOURCE), str(PACKAGES)]  # also where Python was told to look nowhere
    if program == "script":
        place.result.write_text(json.dumps(_losses(prelude)))
    elif program == "spawn":
        import multiprocessing

        with multiprocessing.get_context("spawn").Pool(1) as pool:
            place.result.write_text(json.dumps(pool.apply(_spawned)))
    else:
        from hightide.__main__ import main

        sys.argv[1:] = {
            "train": ["train", str(place.folder / "settings.yaml")],
            "plan": ["plan", f"{place.folder / 'model.py'}:build", "--machine", "h200", "--save", str(place.plan)],
            "doctor": ["doctor", "--out", str(place.folder / "machine.json")],
        }[program]
        main()


def _spawned() -> list[float]:
    sys.path[:0] = [str(SOURCE)]
    return _losses("")


def _losses(prelude: str) -> list[float]:
    """Of a model that is trained plain and wrapped; they must agree."""
    import torch

    import hightide

    exec(PRELUDES.get(prelude, ""))
    torch.manual_seed(0)
    with torch.enable_grad():
        inputs, targets = torch.randn(8, 32), torch.randn(8, 32)
        models = [_model(torch) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        pairs = [(model, torch.optim.AdamW(model.parameters(), lr=1e-2)) for model in models]
    limits = hightide.Limits(gpu="1MiB", host="256MiB")
    pairs[1] = hightide.wrap(*pairs[1], inputs, limits=limits, micro_batch=4, device="cpu")
    losses: list[list[float]] = [[], []]
    with torch.enable_grad():
        for found, (model, optimizer) in zip(losses, pairs, strict=True):
            for _ in range(3):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
    if not _are_close(*losses):
        raise SystemExit(f"other values: plain {losses[0]}, wrapped {losses[1]}")
    return losses[1]


def _model(torch):  # type: ignore[no-untyped-def]
    layers = (torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(3))
    return torch.nn.Sequential(*layers)


def _are_close(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(math.isclose(*pair, rel_tol=TOLERANCE) for pair in pairs)


# ---- what starts them, and looks at what came of it


@dataclass(frozen=True)
class Outcome:
    name: str
    program: str
    verdict: str
    detail: str = ""
    losses: tuple[float, ...] = ()


def tried(environment: Environment, program: str, cache: Path | None = None) -> Outcome:
    """`cache`: a cache folder with a built kernel, to begin with."""
    with tempfile.TemporaryDirectory(prefix="environment-", ignore_cleanup_errors=True) as folder:
        place = _furnished(environment, Path(folder), cache)
        output = place.folder / "output"
        command = [sys.executable, *environment.flags, __file__, "--as", program, str(place.folder)]
        try:
            with output.open("wb") as file:
                ended = subprocess.run(
                    [*environment.wrapper, *command, environment.prelude],
                    env=_variables(environment, place),
                    cwd=place.work,
                    stdin=subprocess.DEVNULL,
                    stderr=file,
                    stdout=_stdout(environment.stdout, file.fileno()),
                    preexec_fn=functools.partial(_confine, environment),
                    timeout=TIMEOUT_S,
                )
        except subprocess.TimeoutExpired:
            return Outcome(environment.name, program, "hang", f"after {TIMEOUT_S:.0f} s")
        return _judged(environment, program, place, ended.returncode, output.read_text(errors="replace"))


def _furnished(environment: Environment, folder: Path, cache: Path | None) -> Place:
    place = Place(folder)
    if environment.needs_root:
        folder.chmod(0o777)  # for another user
    for made in (place.home, place.work):
        made.mkdir()
    place.text.write_text("".join(f"line {number} of a text\n" for number in range(200)))
    (folder / "model.py").write_text(MODEL)
    if environment.has_cache and cache is not None:
        shutil.copytree(cache, place.home / ".cache")
    settings = SETTINGS
    for key in ("out", "text"):
        settings = settings.replace(f"@{key}@", environment.settings.get(key, f"@{key}"))
    (folder / "settings.yaml").write_text(_filled(settings, place))
    if environment.before is not None:
        place.plan.write_text(environment.before)
    environment.prepare(place)
    return place


def _filled(text: str, place: Place) -> str:
    for name in ("folder", "home", "work", "text", "out"):
        text = text.replace(f"@{name}", str(getattr(place, name)))
    return text


def _variables(environment: Environment, place: Place) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    variables = {**kept, "HOME": str(place.home), **environment.variables}
    return {name: _filled(text, place) for name, text in variables.items() if text is not None}


def _stdout(kind: str, same: int) -> int:
    if kind == "full":
        return os.open("/dev/full", os.O_WRONLY)
    if kind == "head":
        reading, writing = os.pipe()
        os.close(reading)
        return writing
    return same


def _confine(environment: Environment) -> None:
    os.umask(environment.umask)
    for number, limit in environment.limits.items():
        resource.setrlimit(number, (limit, limit))
    if environment.stdout == "closed":
        for descriptor in (0, 1, 2):
            os.close(descriptor)


def _judged(environment: Environment, program: str, place: Place, code: int, output: str) -> Outcome:
    about = functools.partial(Outcome, environment.name, program)
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1][:150] if lines else f"exit code {code}"
    if code < 0 or (code > 128 and code != environment.exit_code):
        return about("abort", f"{code}: {last}")
    if "other values" in output:
        return about("other values", last)
    if "fault of hightide" in output or "Traceback (most recent" in output:
        return about("fault", last)
    if code != environment.exit_code:
        return about("other end", f"{code}: {last}")
    if environment.before is not None and place.plan.read_text() != environment.before:
        return about("other end", "the old file was changed")
    if left := [path.name for path in place.folder.rglob(".*.hightide")]:
        return about("other end", f"left behind: {', '.join(left)}")
    if code:
        said = [line for line in lines if line.startswith("error: ")]
        return about("held", last) if said or code == BROKEN_PIPE else about("other end", f"{code} without a message")
    return about("held", losses=_found_losses(program, place))


def _found_losses(program: str, place: Place) -> tuple[float, ...]:
    if program == "train":
        lines = next(place.out.glob("*/metrics.jsonl")).read_text().splitlines()
        return tuple(json.loads(line)["loss"] for line in lines)
    return tuple(json.loads(place.result.read_text())) if place.result.exists() else ()


def compared(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """With those of each program in the first environment where it ran."""
    usual: dict[str, Outcome] = {}
    for one in outcomes:
        if one.losses and one.verdict == "held" and not one.name.endswith("float64"):
            first = usual.setdefault("script" if one.program == "spawn" else one.program, one)
            if not _are_close(first.losses, one.losses):
                one = replace(one, verdict="other values", detail=f"{one.losses} instead of {first.losses}")
        yield one


def built_cache(folder: Path) -> Path:
    """A cache folder as one training run leaves it."""
    script = "from hightide.optim import build; assert build.load('adam') is not None"
    environment = {**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": "", "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=TIMEOUT_S)
    return folder / ".cache"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of environments' names; all by default")
    parser.add_argument("--at-once", type=int, default=2, help="so many processes")
    options = parser.parse_args()
    chosen = [one for one in ENVIRONMENTS if any(name in one.name for name in options.names or [""])]
    possible = [one for one in chosen if os.geteuid() == 0 or not (one.needs_root or "unshare" in one.wrapper)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        cache = built_cache(Path(folder))
        pairs = [(one, program, cache) for one in possible for program in one.programs]
        outcomes = []
        for one in compared(pool.map(lambda pair: tried(*pair), pairs)):
            print(f"{one.name:32} {one.program:8} {one.verdict:13} {one.detail}", flush=True)
            outcomes.append(one)
    counts = Counter(one.verdict for one in outcomes)
    print(f"\n{len(possible)} environments, {len(outcomes)} runs: ", end="")
    print(
        ", ".join(f"{counts[kind]} {kind}" for kind in ("held", "fault", "hang", "abort", "other values", "other end"))
    )
    if len(possible) < len(chosen):
        print(f"{len(chosen) - len(possible)} need root and were left out")
    return 0 if counts["held"] == len(outcomes) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        _child(sys.argv[2], Place(Path(sys.argv[3])), sys.argv[4])
    else:
        sys.exit(main())
