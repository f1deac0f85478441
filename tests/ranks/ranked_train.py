"""`hightide train` as a rank of several: see started_ranks.py."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401  # once, before ranks are forked
from rich.console import Console
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

import hightide.checkpoint.save
import hightide.rehearsal.rehearse  # noqa: F401
from hightide.__main__ import main
from hightide.cli.train import tiny_model
from hightide.cli.train.options import TrainOptions, load_config
from hightide.cli.train.run_folder import RunFolder
from hightide.cli.train.train_command import train
from hightide.cli.train.training_run import TrainingRun
from hightide.shard import meeting

torch.set_num_threads(1)
warnings.simplefilter("ignore")


def commanded(rank: int, world: int, port: int, line: list[str]) -> None:
    """The command, under a launcher that keeps its store at `port`."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port), "COLUMNS": "80"}
    sys.argv = ["hightide", *(word.replace("RANK", str(rank)) for word in line)]
    main()


def trained_with_a_tiny_model(rank: int, world: int, **options: Any) -> dict:
    """It takes the first rank longer to make one."""
    make = tiny_model.make_tiny_model

    def slowly(*arguments: Any) -> None:
        time.sleep(1.0)
        make(*arguments)

    if rank == 0:
        tiny_model.make_tiny_model = slowly
    return trained(rank, world, **options)


def trained(
    rank: int, world: int, settings: str, signalled: int = -1, at_step: int = 0, no_room: int = 0, **options: Any
) -> dict:
    """What this rank has printed, the signal that ended it, and how long it would have waited for others. `signalled`:
    that rank gets SIGTERM in a step. `no_room`: so often the metrics, which the first rank writes, find none on the
    disk."""
    step = TrainingRun.step

    def watched(self: TrainingRun, number: int, *rest: Any) -> None:
        if (rank, number) == (signalled, at_step):
            os.kill(os.getpid(), signal.SIGTERM)
        step(self, number, *rest)

    sync, left = RunFolder.sync, iter(range(no_room))

    def full(self: RunFolder) -> None:
        if next(left, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
        sync(self)

    meet, patience = meeting._meet, []

    def noted(*arguments: Any) -> Any:
        patience.append(arguments[4].timeout_s)
        return meet(*arguments)

    meeting._meet = noted
    TrainingRun.step = watched  # type: ignore[method-assign]
    RunFolder.sync = full  # type: ignore[method-assign]
    output = io.StringIO()
    stopped = train(load_config(Path(settings), TrainOptions(**options)), Console(file=output, width=80))
    ended_by = None if stopped is None else int(stopped)
    return {"output": output.getvalue(), "stopped": ended_by, "timeouts_s": patience}
