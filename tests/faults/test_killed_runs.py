"""`hightide train` killed at the worst moments, again and again in one run folder: in the end it is the run that never
was. Each start is a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forked import Ended, run_forked
from tiny_folders import tiny_folder

pytest.importorskip("transformers")

SETTINGS = f"""
name: tiny
device: cpu
steps: 14
log_every: 5
limits: {{gpu: 4MiB, host: 1GiB}}
micro_batch: 1
model: {{path: FOLDER, dtype: float32}}
data: {{sequences: 3, length: 16, path: {__file__}}}
optimizer: {{lr: 2e-3, warmup_steps: 3}}
save: {{every: 2}}
"""

IMPORTS = """
import os, signal, sys, threading, time
from pathlib import Path
from transformers import LlamaForCausalLM
import hightide.checkpoint.save
import hightide.checkpoint.files.writer as writer
from hightide.checkpoint.files import filesystem
from hightide.cli.train import metrics_file
from hightide.cli.main import app
from hightide.cli.train.training_run import TrainingRun
from hightide.process import files
"""

SCRIPT = """
torch.set_num_threads(1)
moment, settings, out = sys.argv[1:]
checkpoints = Path(out, "tiny-001", "checkpoints")

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def before(module, name, is_the_one, act=die):
    real = getattr(module, name)
    def changed(*args):
        if is_the_one(*args):
            act(*args)
        return real(*args)
    setattr(module, name, changed)

def after(module, name, is_the_one):
    real = getattr(module, name)
    def changed(*args):
        result = real(*args)
        if is_the_one(*args):
            die()
        return result
    setattr(module, name, changed)

def in_step(number, act):
    before(TrainingRun, "step", lambda run, step, *_: step == number, act)

def wait_for(name):
    while not (checkpoints / name / "manifest.json").exists():
        time.sleep(0.01)

only_one = threading.Lock()

def twice(*_):
    if not only_one.acquire(blocking=False):  # several threads write: a third Ctrl-C would come while it ends
        return
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)  # its handler runs in the main thread
    time.sleep(5)  # a slow disk: what is written is not done when the process ends

def half_a_line(file, content):
    os.truncate(file, os.path.getsize(f"/proc/self/fd/{file}"))
    write(file, content[: len(content) // 2])
    die()

write = os.write
writer.BLOCK_BYTES = 4096  # each file in several writes
if moment == "backward":
    in_step(3, lambda *_: (wait_for("step-2"), before(torch.nn.utils, "clip_grad_norm_", lambda *_: True)))
elif moment == "written in part":
    is_under_way = (checkpoints / "step-4.tmp").exists
    before(filesystem, "write", lambda file, memory, offset: offset > 0 and is_under_way())
elif moment == "renamed":
    after(filesystem, "rename", lambda name, target, folder: target == "step-6")
elif moment == "half a line":
    in_step(7, lambda *_: wait_for("step-6"))
    before(os, "write", lambda file, content: b'"step": 7' in content, half_a_line)
elif moment == "cut":
    before(os, "replace", lambda source, target: str(target).endswith("metrics.jsonl"))
elif moment == "removed in part":
    before(filesystem, "unlink", lambda name, folder: (checkpoints / "step-4.gone").exists())
elif moment == "SIGTERM":
    in_step(9, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
elif moment == "Ctrl-C":
    in_step(11, lambda *_: os.kill(os.getpid(), signal.SIGINT))
elif moment == "Ctrl-C twice":
    is_under_way = (checkpoints / "step-10.tmp").exists
    before(filesystem, "write", lambda file, memory, offset: offset > 0 and is_under_way(), twice)
app(["train", settings, "--out", out], prog_name="hightide")
"""
KILLED = -9
# What happens, how that process ends, and from which step the next one goes on.
MOMENTS = (
    ("backward", KILLED, 2),
    ("written in part", KILLED, 2),
    ("renamed", KILLED, 6),
    ("half a line", KILLED, 6),
    ("cut", KILLED, 6),
    ("removed in part", KILLED, 8),
    ("SIGTERM", 143, 9),
    ("Ctrl-C twice", 130, 9),
    ("Ctrl-C", 130, 11),
    ("nothing", 0, 14),
)


def lines(run: Path) -> list[list[object]]:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[line[key] for key in ("step", "loss", "lr", "grad_norm")] for line in metrics]


@pytest.mark.timeout(300)
def test_a_run_that_was_killed_again_and_again_is_the_one_that_never_was(tmp_path: Path) -> None:
    settings = tmp_path / "tiny.yaml"
    settings.write_text(SETTINGS.replace("FOLDER", str(tiny_folder())))
    starts = [["nothing", str(settings), str(tmp_path / "whole")]]
    starts += [[moment, str(settings), str(tmp_path / "killed")] for moment, *_ in MOMENTS]
    starts.append(["nothing", str(settings), str(tmp_path / "killed")])
    whole, *killed, last = run_forked(IMPORTS, SCRIPT, starts, timeout_s=280)
    assert whole.status == 0, whole.stderr
    came_from: int | None = None
    for (moment, status, goes_on), ended in zip(MOMENTS, killed, strict=True):
        _check_start(ended, came_from)
        assert ended.status == status, (moment, ended.stdout[-2000:], ended.stderr)
        assert "Traceback" not in ended.stderr
        came_from = goes_on
    assert last.status == 0 and "nothing to do: " in last.stdout
    run = tmp_path / "killed" / "tiny-001"
    assert [path.name for path in run.parent.iterdir()] == ["tiny-001"]
    assert lines(run) == lines(tmp_path / "whole" / "tiny-001")
    assert [line[0] for line in lines(run)] == list(range(1, 15))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-12", "step-14"]
    assert json.loads((run / "summary.json").read_text())["steps"] == 14
    assert "step 9 is saved: the same command resumes from there" in killed[6].stdout
    assert "interrupted after step " in killed[7].stdout
    assert "interrupted after step 11 of 14" in killed[8].stdout and f"run folder: {run}" in killed[8].stdout


def _check_start(ended: Ended, step: int | None) -> None:
    if step is None:
        assert "resuming from" not in ended.stdout
    elif ended.status != KILLED or ended.stdout:  # one that is killed does not write what it has not flushed
        assert f"resuming from step {step} of 14" in ended.stdout, (ended.stdout, ended.stderr)
