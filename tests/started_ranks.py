"""Processes that are ranks of one another, as torchrun starts them. One process imports what they need, itself a fork
of the one that has torch in place (forked.py), and each rank of each case is a fork of it: the imports take longer than
most cases do. What a rank does is a function `(rank, world, **arguments)` of a module that the caller names, or that
the program's name begins with; it ends as any program does, by an exception too. `quick_end`: where nothing was raised
it ends quickly (forked.py), in tests that are not about how ranks end."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import Conversation, end_quickly

KILLED_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


@dataclass(frozen=True)
class EndedRank:
    """A rank's process. A status below 0 is the signal that ended it."""

    status: int
    stdout: str
    stderr: str
    ended_s: float  # on the clock of the machine, as time.time()
    timed_out: bool

    @property
    def result(self) -> Any:
        """What the function returned."""
        assert self.status == 0 and not self.timed_out, (self.status, self.timed_out, self.stderr)
        return json.loads(self.stdout.splitlines()[-1])

    @property
    def error(self) -> str:
        """The last line of what it wrote."""
        return (self.stderr.strip().splitlines() or [""])[-1]


class StartedRanks:
    """Starts ranks, again and again."""

    def __init__(self, module: str, folder: Path, quick_end: bool = False) -> None:
        self._quick_end = quick_end
        self._process = Conversation("import started_ranks; started_ranks.serve()", [module, str(folder)])

    def run(
        self,
        program: str,
        world: int,
        within_s: float = 30.0,
        stopped: int | None = None,
        quick_end: bool | None = None,
        **arguments: object,
    ) -> list[EndedRank]:
        """Of each rank. Who has not ended in time is killed; so is `stopped`, when all others have ended."""
        is_quick = self._quick_end if quick_end is None else quick_end
        answer = self._process.ask(json.dumps([program, world, within_s, stopped, is_quick, arguments]))
        assert answer, "the process that starts ranks has ended"
        return [EndedRank(**rank) for rank in json.loads(answer)]

    def close(self) -> None:
        self._process.close()


# ---- in the process that starts them


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _become(rank: int, world: int, port: int, folder: str) -> None:
    ctypes.CDLL(None).prctl(KILLED_WITH_PARENT, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{rank}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",  # else it asks what the host's name means
    }


def _wait(children: dict[int, int], timeout_s: float, stopped: int | None) -> dict[int, tuple[int, float, bool]]:
    """By rank: status, when it ended, whether it was killed for that."""
    deadline_s = time.monotonic() + timeout_s
    ended: dict[int, tuple[int, float, bool]] = {}
    descriptors = {os.pidfd_open(pid): rank for rank, pid in children.items()}
    while descriptors:
        wait_s = 0.0 if list(descriptors.values()) == [stopped] else max(0.0, deadline_s - time.monotonic())
        ready, _, _ = select.select(list(descriptors), [], [], wait_s)
        is_late = not ready
        for descriptor in ready or list(descriptors):
            rank = descriptors.pop(descriptor)
            if is_late:
                os.kill(children[rank], signal.SIGKILL)  # also if it is stopped
            status = os.waitstatus_to_exitcode(os.waitpid(children[rank], 0)[1])
            ended[rank] = (status, time.time(), is_late)
            os.close(descriptor)
    return ended


def _function(module: object, program: str) -> Callable[..., object]:
    """Of that module, or "another.one": it is imported in the fork, which has most of it in place."""
    name, _, function = program.rpartition(".")
    return getattr(importlib.import_module(name) if name else module, function)


def _run(function: Callable[..., object], quick_end: bool, rank: int, world: int, arguments: dict[str, Any]) -> None:
    print(json.dumps(function(rank, world, **arguments)))
    if quick_end:
        end_quickly()


def _start_each_case(module: object) -> Callable[[], None] | None:
    """What a rank is to do, in a fork; None in the first process, when there is no more to do."""
    for line in sys.stdin:
        program, world, timeout_s, stopped, quick_end, arguments = json.loads(line)
        port, children, folder = _free_port(), {}, tempfile.mkdtemp()  # a fork must not remove it
        for rank in range(world):
            child = os.fork()
            if child == 0:
                _become(rank, world, port, folder)
                return lambda rank=rank: _run(_function(module, program), quick_end, rank, world, arguments)
            children[rank] = child
        ended = _wait(children, timeout_s, stopped)
        texts = [[Path(folder, f"{rank}.{name}").read_text() for name in ("out", "err")] for rank in range(world)]
        shutil.rmtree(folder)
        answer = [
            {"status": status, "stdout": out, "stderr": err, "ended_s": ended_s, "timed_out": timed_out}
            for (status, ended_s, timed_out), (out, err) in zip(map(ended.get, range(world)), texts, strict=True)
        ]
        print(json.dumps(answer), flush=True)
    return None


def serve() -> None:
    name, folder = sys.argv[1:]
    sys.path.insert(0, folder)
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun has it
    importlib.import_module("torch").set_num_threads(1)
    gc.disable()
    module = importlib.import_module(name)
    gc.freeze()  # else each child looks through all of it, when it ends at the latest, and so copies it
    gc.enable()
    program = _start_each_case(module)
    if program is not None:
        program()
