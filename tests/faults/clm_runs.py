"""Runs of examples/run_clm.py in forks: see started_ranks.py."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import hightide
from hightide.checkpoint.files import filesystem

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import run_clm  # noqa: E402


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _KillAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            _kill()


def run(rank: int, world: int, folder: str, argv: list[str], kill: str | None = None, plain: bool = False) -> Any:
    """`kill`: "step 3": in it; "rename 2": when the second checkpoint is about to be in place. `plain`: with the two
    lines taken back."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    what, _, number = (kill or "").partition(" ")
    if what == "rename":
        rename, left = filesystem.rename, [int(number)]

        def killing(*args: Any) -> None:
            left[0] -= 1
            if not left[0]:
                _kill()
            rename(*args)

        filesystem.rename = killing
    if what == "step":

        class KillHere(_KillAt):
            def __init__(self) -> None:
                super().__init__(int(number))

        transformers.trainer.DEFAULT_CALLBACKS.append(KillHere)
    if plain:
        hightide.Trainer = lambda limits, **options: transformers.Trainer(**options)  # type: ignore[misc,assignment]
    run_clm.main(["--output_dir", folder, "--do_train", "--do_eval", "--use_cpu", "--report_to", "none", *argv])
    return json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]


def tiny_model(rank: int, world: int, folder: str) -> None:
    torch.manual_seed(0)
    os.rename(run_clm.make_tiny_folder(), folder)
