"""One process that imports torch and what else is loaded lazily, and a fork of it for each script: the imports take
longer than most scripts do. It lives as long as the process of the tests, and starts when the first of them asks."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

TESTS = Path(__file__).resolve().parent
KILLED_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
MMAP_THRESHOLD = -3  # mallopt's M_MMAP_THRESHOLD


@dataclass(frozen=True)
class Ended:
    """A script's process. A status below 0 is the signal that ended it."""

    status: int
    stdout: str
    stderr: str


def run_script(
    script: str, arguments: Sequence[str], timeout_s: float, mmap_bytes: int | None = None, quick_end: bool = False
) -> Ended:
    """In a process with torch in place and one thread, which ends as any does: the script is its main program. It is
    killed when its time is over. `mmap_bytes`: what is larger is not kept by malloc when it is freed. `quick_end`: for
    scripts that are not about how a process ends; see `end_quickly`."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"script": textwrap.dedent(script), "arguments": list(arguments), "folder": folder}
        asked |= {"timeout_s": timeout_s, "mmap_bytes": mmap_bytes, "quick_end": quick_end}
        status = _first_process().ask(asked)
        return Ended(status, *(Path(folder, name).read_text() for name in ("out", "err")))


_FILE = """
import os, runpy, sys, torch
torch.set_num_threads(1)
os.chdir(sys.argv[1])
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Conversation:
    """With a script's process that stays: its standard input and output are ours. One thread in it, and in place what
    `run_script` has."""

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as meeting:
            meeting.bind(f"{folder}/meeting")
            meeting.listen()
            meeting.settimeout(60)
            asked = {"script": textwrap.dedent(script), "arguments": list(arguments), "quick_end": False}
            _first_process().ask({**asked, "meeting": f"{folder}/meeting"})
            self._socket, _ = meeting.accept()
        self._file = self._socket.makefile("rw")

    def ask(self, line: str) -> str:
        """What it answers: a line, or nothing where it has ended."""
        print(line, file=self._file, flush=True)
        return self._file.readline()

    def close(self) -> None:
        """It has no more to read, and ends."""
        self._socket.shutdown(socket.SHUT_WR)
        self._socket.settimeout(30)
        assert self._socket.recv(1) == b""
        self._file.close()
        self._socket.close()


def end_quickly() -> NoReturn:
    """Ends this fork well, but leaves alone what was in place before: to take all of it apart, and the libraries below,
    takes a process a quarter of a second. Other threads and whoever wants to be called at the end come first, as
    ever."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_file(folder: Path, path: str, *arguments: str, timeout_s: float = 110.0) -> Ended:
    """As `python path arguments` in that folder."""
    return run_script(_FILE, [str(folder), path, *arguments], timeout_s, quick_end=True)


_FORK = """
import gc, json, os, sys, torch, hightide
gc.freeze()  # else each child looks through all of it, when it ends at the latest, and so copies it
_folder, _cases = sys.argv[1], json.loads(sys.argv[2])
for _number, _arguments in enumerate(_cases):
    _child = os.fork()
    if _child == 0:
        for _descriptor, _name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{_folder}/{_number}.{_name}", os.O_WRONLY | os.O_CREAT), _descriptor)
        sys.argv = ["-c", *_arguments]
        break
    _status = os.waitstatus_to_exitcode(os.waitpid(_child, 0)[1])
    print(_status, flush=True)
else:
    sys.exit(0)
"""


def run_forked(imports: str, script: str, cases: Sequence[Sequence[str]], timeout_s: float) -> list[Ended]:
    """Runs `script` for each case, whose strings are its arguments, one after the other. What it needs for certain is
    imported before, which must start no thread. A child ends as any process does: the script is its main program."""
    program = "\n".join((textwrap.dedent(imports), _FORK, textwrap.dedent(script)))
    with tempfile.TemporaryDirectory() as folder:
        done = run_script(program, [folder, json.dumps([list(case) for case in cases])], timeout_s)
        statuses = [int(line) for line in done.stdout.split()]
        assert done.status == 0 and len(statuses) == len(cases), (done.status, done.stderr)
        texts = [
            [Path(folder, f"{number}.{name}").read_text() for name in ("out", "err")] for number in range(len(cases))
        ]
    return [Ended(status, *text) for status, text in zip(statuses, texts, strict=True)]


class _FirstProcess:
    """The one that others are forks of."""

    def __init__(self) -> None:
        path = os.pathsep.join((str(TESTS.parent / "src"), str(TESTS)))
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._close)

    def ask(self, asked: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process that starts others has ended: {self._process.wait()}"
        return int(answer)

    def _close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


_first_process = cache(_FirstProcess)


# ---- in the first process


def _load() -> None:
    """All that is loaded lazily else, in every child, for seconds."""
    torch, hightide = (importlib.import_module(name) for name in ("torch", "hightide"))
    importlib.import_module("torch._dynamo")
    importlib.import_module("transformers.models.llama.modeling_llama")
    if torch.backends.cuda.is_built():  # a profile would start threads of autograd, behind which no fork runs backward
        return
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    hightide.plan(model, torch.optim.AdamW(model.parameters()), torch.ones(2, 4))


def _become(asked: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(KILLED_WITH_PARENT, signal.SIGKILL)
    sys.argv = ["-c", *asked["arguments"]]
    if "meeting" in asked:
        with socket.socket(socket.AF_UNIX) as ours:
            ours.connect(asked["meeting"])
            for descriptor in (0, 1):
                os.dup2(ours.fileno(), descriptor)
        return
    if asked["mmap_bytes"] is not None:
        assert ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, asked["mmap_bytes"]) == 1
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{asked['folder']}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)


def _wait(child: int, timeout_s: float) -> int:
    descriptor = os.pidfd_open(child)
    if not select.select([descriptor], [], [], timeout_s)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _fork_each() -> dict[str, Any] | None:
    """What to run, in a fork; None in the first process, when there is no more to do."""
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(asked)
            return asked
        print(0 if "meeting" in asked else _wait(child, asked["timeout_s"]), flush=True)
    return None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
    gc.disable()
    _load()
    gc.freeze()
    gc.enable()
    _asked = _fork_each()
    if _asked is not None:
        exec(compile(_asked["script"], "<string>", "exec"), {"__name__": "__main__"})
        if _asked["quick_end"]:
            end_quickly()
