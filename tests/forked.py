"""One process that imports torch, and a child of it for each case: the import takes longer than most cases do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent

_FORK = """
import gc, json, os, sys
import torch, torch._dynamo  # by the first optimizer else, in every child, for a second
import hightide
_model = torch.nn.Sequential(torch.nn.Linear(4, 4))
hightide.plan(_model, torch.optim.AdamW(_model.parameters()), torch.ones(2, 4))  # all else that is loaded lazily
del _model
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


@dataclass(frozen=True)
class Ended:
    """A case's process."""

    status: int
    stdout: str
    stderr: str


def run_forked(imports: str, script: str, cases: Sequence[Sequence[str]], timeout_s: float) -> list[Ended]:
    """Runs `script` for each case, whose strings are its arguments, one after the other. What it needs for certain is
    imported before, which must start no thread. A child ends as any process does: the script is its main program."""
    program = "\n".join((textwrap.dedent(imports), _FORK, textwrap.dedent(script)))
    path = os.pathsep.join((str(TESTS.parent / "src"), str(TESTS)))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", program, folder, json.dumps([list(case) for case in cases])],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        statuses = [int(line) for line in done.stdout.split()]
        assert done.returncode == 0 and len(statuses) == len(cases), done.stderr
        texts = [
            [Path(folder, f"{number}.{name}").read_text() for name in ("out", "err")] for number in range(len(cases))
        ]
    return [Ended(status, *text) for status, text in zip(statuses, texts, strict=True)]
